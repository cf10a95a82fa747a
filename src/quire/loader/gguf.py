"""GGUF checkpoints: tensors with Hugging Face's names and order of rows, mapped like safetensors.

Floating-point weights come in their dtype. Quantized weights come as the bytes of their blocks, uint8 [N, row bytes].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from quire.gguf.file import GgufFile, TensorInfo, open_gguf
from quire.gguf.types import FLOAT_TYPES
from quire.hf_config.gguf_types import GgufWeights
from quire.layer_spec.attention import Full, Latent
from quire.layers.rope import halves_from_pairs
from quire.layers.weight_slot import Extent, ExtentOf
from quire.loader.extents import all_of
from quire.loader.safetensors import Checkpoint
from quire.loader.safetensors_headers import TensorEntry
from quire.messages import Progress
from quire.model_config import ModelConfig


class GgufCheckpoint:
    """The validated headers of a model's files.

    Raises:
        WeightsError: a file is missing or malformed.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._file: GgufFile = open_gguf(Path(config.model))
        assert isinstance(config.quantized, GgufWeights)
        self._names = {name: ours for name, ours in config.quantized.names.items() if config.holds(ours)}
        self._num_heads = dict(_rotating(config)) if config.quantized.is_interleaved else {}
        self._norm_offset = config.norm_offset
        self._gates = {part.shared_gate.names[0] for part in config.experts() if part.shared_gate is not None}
        self._of_heads = set(_taken_apart(config))

    @property
    def files(self) -> list[Path]:
        return list(self._file.parts)

    def headers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor without values)."""
        return self._in_hf_form(self._in_file_form().headers())

    def tensors(self, progress: Progress | None = None, extent_of: ExtentOf = all_of) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in file order. Tensors are views of the mapped file, as in `Checkpoint.tensors`."""

        def of_file(name: str) -> Extent | None:
            """The part that is read; None: the whole tensor is needed to bring it into Hugging Face's form."""
            ours = self._names[name]
            module = ours.rpartition(".")[0]
            return None if module in self._num_heads or module in self._of_heads else extent_of(ours)

        return self._in_hf_form(self._in_file_form().tensors(progress, of_file))

    def _in_file_form(self) -> Checkpoint:
        entries = {path: [_entry(info) for info in infos] for path, infos in self._file.parts.items()}
        return Checkpoint(self._file.path.parent, entries).only(self._names.__contains__)

    def _in_hf_form(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in self._names:
                yield self._converted(self._names[name], tensor)
            del tensor

    def _converted(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """The tensor and its name in Hugging Face's form."""
        module = name.rpartition(".")[0]  # empty for a name without dots
        if module in self._num_heads:
            tensor = halves_from_pairs(tensor, self._num_heads[module])
        if tensor.dim() == 1 and module in self._gates:
            tensor = tensor.unsqueeze(0)
        if module in self._of_heads:
            tensor = tensor.flatten(0, 1)
        if self._norm_offset and module.endswith("norm"):
            tensor = tensor.float() - self._norm_offset
        return name, tensor


def _rotating(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """The modules whose outputs rotate, with their numbers of heads."""
    for attention in (layer.attention for layer in config.layers):
        if isinstance(attention, Full):
            whole = attention.qkv.whole()  # with the sizes of the file's tensors
            for name, (_, num_rows) in zip(
                whole.names[:2], whole.shards, strict=False
            ):  # v, the third, does not rotate
                yield name, num_rows // attention.head_dim


def _taken_apart(config: ModelConfig) -> Iterator[str]:
    """The modules that have a matrix for each head."""
    for layer in config.layers:
        if isinstance(layer.attention, Latent):
            yield from (name for part in layer.attention.up.taken_apart() for name in part.names)


def _entry(info: TensorInfo) -> TensorEntry:
    """The place, dtype and shape of a tensor for torch."""
    if info.type.name in FLOAT_TYPES:
        return TensorEntry(info.name, FLOAT_TYPES[info.type.name], info.shape, info.begin, info.end)
    row_bytes = info.shape[-1] // info.type.block_size * info.type.block_bytes
    return TensorEntry(info.name, "uint8", (*info.shape[:-1], row_bytes), info.begin, info.end)
