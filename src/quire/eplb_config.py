"""How experts are moved between ranks (--eplb-config), in vLLM's keys. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """Says when ranks exchange experts, so that all ranks get about the same number of tokens.

    Attributes:
        window_size: the number of steps before a move in which tokens are counted; at most step_interval count.
        step_interval: the number of steps between two moves.
        num_redundant_experts: the number of additional copies of experts in every layer.
        log_balancedness: whether it is logged how evenly the tokens of a step went to ranks.
        log_balancedness_interval: the number of steps between two such lines.
        use_async: True: a few experts move before each step. False: all move before one step, which takes longer.
        policy: only `default`.
        communicator: it has no effect: experts always move through memory that ranks share.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    use_async: bool = True
    policy: str = "default"
    communicator: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EplbConfig:
        """The config from an object of keys. Raises ConfigError for a key or a value that does not exist."""
        known = {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise _illegal("There is no such key in eplb_config", name, f"one of {', '.join(known)}")
            if name == "communicator":
                continue
            default = known[name].default
            if type(value) is not type(default):
                raise _illegal(f"{name} of eplb_config", value, f"a value such as {default}")
            least = 0 if name == "num_redundant_experts" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise _illegal(f"{name} of eplb_config", value, f"{least} or more")
            if name == "policy" and value != default:
                raise _illegal(f"{name} of eplb_config", value, "default, the only policy")
        return cls(**given)


def _illegal(what: str, value: object, expected: str) -> ConfigError:
    return ConfigError(what, value=value, expected=expected, param="eplb_config")
