"""Ranks read only their rows of the layers of modelling code. Here all other rows are undefined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import conversion_mapping, core_model_loading

from quire.distributed.shared_memory import SharedMemoryGroup
from quire.kernels import cpu
from quire.layers.weight_slot import Extent
from quire.models.form import CPU
from quire.models.transformers_layers import CodeRanks, extents, replace_layers
from tests.distributed.test_shared_memory import Make, together

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

VOCAB, HIDDEN, WIDTH = 200, 128, 192


class Code(nn.Module):
    """What ranks know of modelling code. A layer keeps float32, as routers do; the others have the model's dtype."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16)
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.float32)
        self.down = nn.Linear(WIDTH, HIDDEN, dtype=torch.bfloat16)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, token_ids: Tensor) -> Tensor:
        gate = self.gate(self.embed(token_ids).to(self.gate.weight.dtype))
        down: Tensor = self.down(gate.to(self.down.weight.dtype))
        return down


def read(tensor: Tensor, extent: Extent | None) -> Tensor:
    """A tensor of which only a part is read."""
    if extent is None:
        return tensor
    assert (extent.num_rows, extent.num_columns) == (len(tensor), 1)
    found = torch.full_like(tensor, torch.nan)
    for rows in extent.own:
        found[rows.start : rows.stop] = tensor[rows.start : rows.stop]
    return found


@torch.inference_mode()
def test_a_layer_that_keeps_float32() -> None:
    torch.manual_seed(0)
    weights, token_ids = Code().state_dict(), torch.arange(VOCAB)
    whole = Code()
    whole.load_state_dict(weights)
    replace_layers(whole, CPU)
    expected = whole(token_ids)

    def computed(group: SharedMemoryGroup) -> Tensor:
        ranks = CodeRanks(group)
        with torch.inference_mode():
            with torch.device("meta"):
                extent = extents(Code(), ranks)
            model = Code()
            model.load_state_dict({name: read(tensor, extent(name)) for name, tensor in weights.items()})
            assert model.gate.weight[-1].isnan().all() == (group.rank == 0), "a rank has read all rows"
            replace_layers(model, CPU, ranks)
            result: Tensor = model(token_ids)
            return result

    for found in together(Make(has_machines=False)(2), computed):
        assert torch.equal(found, expected)


def test_all_is_read_if_transformers_does_not_say_what_is_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its functions for this are private, and missing before version 5; and some names depend on earlier ones."""
    ranks = CodeRanks(Make(has_machines=False)(2)[0])

    def read_in_part() -> list[str]:
        extent = extents(Code(), ranks)
        return [name for name in Code().state_dict() if extent(name) is not None]

    def without_state(source: str, renamings: Any, converters: Any) -> tuple[str, None]:
        return source, None

    usual = ["embed.weight", "gate.weight", "down.weight"]
    stateful = core_model_loading.GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])
    assert read_in_part() == usual
    assert not caplog.records
    for module, name, value in (
        (conversion_mapping, "get_model_conversion_mapping", lambda model: [stateful]),
        (core_model_loading, "rename_source_key", without_state),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            assert read_in_part() == []
            patched.delattr(module, name)
            assert read_in_part() == []
    assert read_in_part() == usual
    assert len(caplog.records) == 4
    assert "each rank reads all of the checkpoint" in caplog.text
