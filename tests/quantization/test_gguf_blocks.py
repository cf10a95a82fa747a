"""GGUF's blocks against the `gguf` package's dequantization: equal to a bit in every type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.errors import ModelConfigError, WeightsError
from quire.formats.stored_linear import stored_from
from quire.formats.weight_format import GGUF
from quire.gguf.types import TYPES, TensorType
from quire.hf_config.gguf_types import GgufWeights
from quire.kernels import reference
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.quantization import gguf_blocks
from quire.quantization.gguf import GgufBlocks
from quire.quantization.gguf_blocks import unpack_blocks

# Where a block has numbers of float16, which random bytes would make infinite now and then.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
EDGES = (0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 1.0, -1.0)  # 6e-8 is the smallest float16


def tensor_type(name: str) -> TensorType:
    return next(known for known in TYPES.values() if known.name == name)


def random_blocks(name: str, num_rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales; the first blocks hold the edges of float16 and all-zero and all-one codes."""
    random = np.random.default_rng(seed)
    size = tensor_type(name).block_bytes
    blocks = random.integers(0, 256, (num_rows * blocks_per_row, size), dtype=np.uint8)
    blocks[:2], blocks[2:4] = 0, 255
    if name == "MXFP4":  # exponents of numbers that float32 holds
        blocks[:, 0] = blocks[:, 0].clip(max=252)
    for column, begin in enumerate(HALVES[name]):
        numbers = random.standard_normal(len(blocks)).astype(np.float16)
        for row in range(min(len(EDGES) * (column + 1), len(blocks))):
            numbers[row] = EDGES[row // (column + 1) % len(EDGES)]
        blocks[:, begin : begin + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


def test_every_quantized_type_is_covered() -> None:
    quantized = {known.name for known in TYPES.values() if known.block_size > 1}
    assert quantized == set(GGUF) == set(HALVES)


@pytest.mark.parametrize("name", GGUF)
def test_sizes_are_those_of_the_package(name: str) -> None:
    known = tensor_type(name)
    assert (known.block_size, known.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", GGUF)
def test_equal_to_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(name, 37, 3)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    monkeypatch.setattr(gguf_blocks, "_CHUNK_BYTES", 5000)  # several chunks, the last one cut
    raw_NR = torch.from_numpy(raw)
    with torch.device("meta"):  # without data: weights may arrive on a GPU, and stay there
        weight = unpack_blocks(raw_NR, tensor_type(name))
    assert weight.format == GGUF[name], "held in another form than planned"
    assert int(weight.codes_NK.max()) < 1 << weight.bits
    found = reference.dequantize_grouped(weight).numpy()
    assert np.isfinite(expected).all()
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantizes(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    weights = np.random.default_rng(1).standard_normal((65, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weights, kind)
    found = reference.dequantize_grouped(unpack_blocks(torch.from_numpy(raw), tensor_type(name))).numpy()
    assert np.array_equal(found, gguf.quants.dequantize(raw, kind))
    assert np.abs(found - weights).max() < 0.5


@pytest.mark.parametrize("name", GGUF)
def test_keeps_nothing_of_the_file(name: str) -> None:
    raw = torch.from_numpy(random_blocks(name, 4, 2))
    weight = unpack_blocks(raw, tensor_type(name))
    before = reference.dequantize_grouped(weight)
    raw.zero_()
    assert torch.equal(reference.dequantize_grouped(weight), before)


def test_widths_that_are_not_whole_blocks() -> None:
    """They would be rounded down: the file's rows are shorter than the layer's."""
    shape = LinearShape(prefix="model.", shards=(("embed_tokens", 8),), in_features=40)
    with pytest.raises(ModelConfigError, match=r"Got 40\. Expected a multiple of 32"):
        stored_from(shape, GgufWeights({"model.embed_tokens": tensor_type("Q8_0")}, {}, {}, False))
    shape = LinearShape(prefix="", shards=(("q_proj", 8),), in_features=40)
    layer = Linear(shape, dtype=torch.float32, scheme=GgufBlocks(tensor_type("Q8_0")))
    ((_, slot),) = layer.slots()
    with pytest.raises(WeightsError, match=r"Got 32\. Expected 40"):
        slot.load(torch.from_numpy(random_blocks("Q8_0", 8, 1)))
