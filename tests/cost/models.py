"""Models whose layers see different tokens, and the costs of their steps."""

from __future__ import annotations

from dataclasses import replace

from quire import demo
from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.model import CostModel
from quire.cost.step_time import Constants
from quire.layer_spec.attention import Attention, Chunked, Full, State, Window
from quire.layer_spec.kv_spec import KvKind
from quire.model_config import ModelConfig, load_model_config

BOUND = 24  # tokens of a window or a chunk
CONSTANTS = Constants(1e-3, 5e-5, 4e-11, 2e-12, 5e-11, 4e-12, 4e-11, 2.0)


def model_with(*kinds: KvKind) -> ModelConfig:
    """The demo model with as many layers, whose attention is of these kinds."""
    model = load_model_config(demo.path())
    layer = model.layers[0]
    assert isinstance(layer.attention, Full)
    fields = {name: getattr(layer.attention, name) for name in layer.attention.__dataclass_fields__}
    attention: dict[KvKind, Attention] = {
        "full": layer.attention,
        "window": Window(**fields, size=BOUND),
        "chunked": Chunked(**fields, size=BOUND),
        "state": State(num_bytes=4096, linears=layer.attention.linears),
    }
    return replace(model, layers=tuple(replace(layer, attention=attention[kind]) for kind in kinds))


def cost_model(constants: Constants = CONSTANTS, spread: float = 0.05, isa: str = "") -> CostModel:
    arithmetic = StepArithmetic(model_with("full", "window"), "bfloat16", None, "auto", isa)
    return CostModel(arithmetic, Fit(constants, spread))
