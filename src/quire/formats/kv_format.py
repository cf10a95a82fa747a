"""The formats of `--kv-cache-dtype`: the bytes of a KV cache row. Planning and allocation both count with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KvFormat:
    """The stored form of a key or a value of one token and KV head.

    Args:
        name: in vLLM's spelling.
        torch_dtype: name of the elements' type in torch.
        element_bytes: bytes of one of its head_dim elements.
        scale_bytes: bytes of the scale beside the elements; 0: there is no scale.
    """

    name: str
    torch_dtype: str
    element_bytes: int
    scale_bytes: int = 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one key or one value of one KV head."""
        return head_dim * self.element_bytes + self.scale_bytes


KV_FORMATS: dict[str, KvFormat] = {
    each.name: each
    for each in (
        KvFormat("bfloat16", "bfloat16", 2),
        KvFormat("float16", "float16", 2),
        KvFormat("float32", "float32", 4),
        KvFormat("fp8_e4m3", "float8_e4m3fn", 1),
        KvFormat("fp8_e5m2", "float8_e5m2", 1),
        KvFormat("int8", "int8", 1, scale_bytes=4),
    )
}
# Positions whose keys and values become one partial result of attention: kAttentionRange of
# csrc/include/quire/kernels/attention.h.
RANGE_POSITIONS = 256
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")  # values of the setting


def kv_format(kv_cache_dtype: str, dtype: str) -> KvFormat:
    """The format that the setting `kv_cache_dtype` names, for a model that runs in `dtype`."""
    return KV_FORMATS[{"auto": dtype, "fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)]
