"""What a step computes and moves, estimated from its record and the model's sizes: for utilization of the hardware."""

from __future__ import annotations

from quire.formats.kv_format import kv_format
from quire.model_config import ModelConfig
from quire.schedule import StepRecord


class StepWork:
    """Counts of one model, all weights read once a step.

    Attention is counted as if every row had one new token: exact for decoding, low for prompts by the products between
    their own tokens.

    Args:
        dtype: of activations, a key of DTYPE_BYTES.
        kv_cache_dtype: as the setting of that name.
        quantization: of the weights, as ModelConfig.weight_bytes takes it.
    """

    def __init__(self, model: ModelConfig, dtype: str, quantization: str | None, kv_cache_dtype: str) -> None:
        self._weight_bytes = model.weight_bytes(dtype, quantization)
        self._kv_bytes_per_token = model.kv_bytes_per_token(kv_format(kv_cache_dtype, dtype))
        self._head_flops = 2 * model.vocab_size * model.hidden_size
        self._block_flops = 2 * model.num_block_parameters()
        self._attention_flops = model.attention_flops()

    def num_flops(self, record: StepRecord) -> int:
        """Floating point operations, a multiplication and an addition being two."""
        tokens = record.num_prefill_tokens + record.num_decode_tokens
        head = self._head_flops * record.num_sampled_tokens
        return self._block_flops * tokens + head + self._attention_flops * record.num_kv_tokens_read

    def read_bytes(self, record: StepRecord) -> int:
        """Weights and the keys and values of all rows."""
        return self._weight_bytes + self._kv_bytes_per_token * record.num_kv_tokens_read

    def write_bytes(self, record: StepRecord) -> int:
        """Keys and values of the new tokens."""
        return self._kv_bytes_per_token * (record.num_prefill_tokens + record.num_decode_tokens)
