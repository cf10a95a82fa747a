"""The limits of a running engine that may move: their bounds, and the record of settings after a move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.compat.names import nearest
from quire.errors import ConfigError, InvalidRequestError
from quire.frontend.async_engine import AsyncEngine
from quire.messages import EngineReady, SetLimits
from quire.option import ATTAINMENTS, DURATION, check_reachable, parse_duration

LEAST = {  # 0 means no limit. Limits that are not here are at least 1.
    "long_prefill_token_threshold": 0,
    "max_shared_prefill_tokens": 0,
    "spec_tokens": 0,
}
MOST = 2**31 - 1  # for limits without planned memory
TARGETS = ("slo_ttft", "slo_itl")  # durations, or null


@dataclass(frozen=True)
class LiveLimit:
    """One limit: its present value and its bounds."""

    value: float | None
    minimum: float
    maximum: float | None  # None: it is a duration, which has no bound and may be null

    @property
    def bounds(self) -> str:
        """`1 to 128`, for people."""
        if self.maximum is None:
            return f"{DURATION}, or null for no target"
        return f"{self.minimum} or more" if self.maximum == MOST else f"{self.minimum} to {self.maximum}"


def live_limits(ready: EngineReady) -> dict[str, LiveLimit]:
    """The limits that may move, by name."""
    limits = {}
    for name in SetLimits.__struct_fields__:
        if name in ready.resolved:
            setting = _record(ready, name)
            if name == "spec_tokens" and setting["value"] is None:
                continue  # the server does not speculate
            bounds: tuple[float, float | None] = LEAST.get(name, 1), setting.get("max", MOST)
            if name in TARGETS:
                bounds = 0.0 if ready.pace is None else ready.pace.fastest_step, None
            elif name == "slo_attainment":
                bounds = ATTAINMENTS
            limits[name] = LiveLimit(setting["value"], *bounds)
    return limits


def move_limits(engine: AsyncEngine, changes: Mapping[str, Any]) -> None:
    """Move all of these limits or none, from the next step of every engine, and update the replicas' records.

    Raises:
        InvalidRequestError: an unknown name, a limit that cannot move, a value out of its bounds, or limits that
            contradict each other. NotReadyError, EngineDeadError: there is no engine.
    """
    engine.check_running()
    records = [replica.facts for replica in engine.replicas if replica.facts is not None]
    for ready in records:
        _check_all(changes, ready)
    changes = {name: _target(name, value) if name in TARGETS else value for name, value in changes.items()}
    moves: dict[str, Any] = {name: 0.0 if value is None else value for name, value in changes.items()}
    engine.set_limits(SetLimits(**moves))
    for ready in records:
        for name, value in changes.items():
            ready.resolved[name] = _moved(_record(ready, name), value)
        if "max_shared_prefill_tokens" in changes:
            ready.resolved["most_answer_times"] = _moved(_record(ready, "most_answer_times"), 0.0)
        ready.max_num_seqs = changes.get("max_num_seqs", ready.max_num_seqs)
        ready.max_num_batched_tokens = changes.get("max_num_batched_tokens", ready.max_num_batched_tokens)


def _record(ready: EngineReady, name: str) -> dict[str, Any]:
    setting = ready.resolved[name]
    assert isinstance(setting, dict)
    return setting


def _movable(limits: Mapping[str, LiveLimit]) -> str:
    return "one or more of " + ", ".join(f"{name} ({limit.bounds})" for name, limit in limits.items())


def _check_all(changes: Mapping[str, Any], ready: EngineReady) -> None:
    limits = live_limits(ready)
    if not changes:
        raise InvalidRequestError("The body names no limit to change", expected=_movable(limits))
    for name, value in changes.items():
        _check(name, value, limits, ready)
    _check_together(changes, limits, ready)


def _check(name: str, value: Any, limits: Mapping[str, LiveLimit], ready: EngineReady) -> None:
    fix: str | None
    if name not in limits:
        if name in ready.resolved:
            what, fix = f"{name} cannot be moved while serving", f"Restart with --{name.replace('_', '-')}"
        else:
            near = nearest(name, limits)
            what, fix = f"Unknown setting {name[:64]!r}", f"Did you mean {near}?" if near else None
        raise InvalidRequestError(what, expected=_movable(limits), fix=fix, param=name[:64])
    limit = limits[name]
    if limit.maximum is None:
        seconds, pace = _target(name, value), ready.pace
        if pace is not None:
            check_reachable(name, seconds, pace.fastest_step, pace.usual_step, InvalidRequestError)
        return
    is_share = name == "slo_attainment"
    if isinstance(value, bool) or not isinstance(value, int | float if is_share else int):
        what = f"{name} is not a {'share' if is_share else 'whole number'}"
        raise InvalidRequestError(what, value=value, expected=limit.bounds, param=name)
    if not limit.minimum <= value <= limit.maximum:
        why = None
        if limit.maximum < min(value, MOST):
            why = f"Memory was planned for {limit.maximum} at the start: restart with --{name.replace('_', '-')}"
        raise InvalidRequestError(
            f"{name} is out of its bounds", value=value, expected=limit.bounds, fix=why, param=name
        )


def _target(name: str, value: Any) -> float | None:
    """A target in seconds; None: there is no target."""
    try:
        return None if value is None else parse_duration(value)
    except ConfigError as error:
        raise InvalidRequestError(f"{name} is no duration", value=value, expected=error.expected, param=name) from None


def _check_together(changes: Mapping[str, Any], limits: Mapping[str, LiveLimit], ready: EngineReady) -> None:
    """Check the rules between limits, as `resolve` does."""

    def after(name: str) -> Any:
        return changes[name] if name in changes else limits[name].value

    budget, seqs = after("max_num_batched_tokens"), after("max_num_seqs")
    if budget < seqs:
        raise InvalidRequestError(
            "The token budget would be smaller than the number of running requests",
            value={"max_num_batched_tokens": budget, "max_num_seqs": seqs},
            fix="Change both in one request",
            param="max_num_batched_tokens" if "max_num_batched_tokens" in changes else "max_num_seqs",
        )
    if not _record(ready, "enable_chunked_prefill")["value"] and budget < ready.max_model_len:
        raise InvalidRequestError(
            "Without chunked prefill the longest prompt must fit into one step",
            value=budget,
            expected=f"max_num_batched_tokens of at least max_model_len = {ready.max_model_len}",
            param="max_num_batched_tokens",
        )


def _moved(setting: Mapping[str, Any], value: float | None) -> dict[str, Any]:
    """The record of a setting after its move. It keeps the record of the start."""
    first = setting.get("start") or {key: setting[key] for key in ("value", "source", "detail")}
    detail = f"moved while serving; started as {first['value']} ({first['source']})"
    return {**setting, "value": value, "source": "live", "detail": detail, "start": first}
