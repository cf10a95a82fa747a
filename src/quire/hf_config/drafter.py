"""The method of a drafter's checkpoint, by its config.json and its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DRAFT_MODEL = "draft_model"
# Parts of names in small letters, the more special ones first. Only the name shows heads of EAGLE-1.
_MARKS = {
    "eagle3": ("eagle3", "eagle-3", "eagle_3"),
    "dflash": ("dflash",),
    "dspark": ("dspark",),
    "medusa": ("medusa",),
    "mlp_speculator": ("mlp_speculator", "mlpspeculator"),
    "eagle": ("eagle-", "eagle_", "eagleforcausallm", "eaglellama", "eagleqwen"),
}


def method_of_checkpoint(name: str, config: Mapping[str, Any] | None = None) -> str:
    """The drafting method of a checkpoint, in vLLM's words; `draft_model` for a model that can run alone.

    Args:
        name: folder or hub id.
        config: its config.json; None: there is none, so the name decides.
    """
    config = config or {}
    speculators = config.get("speculators_config")
    algorithm = speculators.get("algorithm") if isinstance(speculators, Mapping) else None
    said = [algorithm, config.get("speculators_model_type"), config.get("model_type"), *_list(config, "architectures")]
    words = [word.lower() for word in said if isinstance(word, str)]
    for method, marks in _MARKS.items():
        if any(mark in word for word in words for mark in (*marks, method)):
            return method
    if any("mtp" in word for word in words) or "mimo" in words:
        return "mtp"
    if "draft_vocab_size" in config:  # only EAGLE-3 has it: its output layer knows only the likely tokens
        return "eagle3"
    own_name = name.rstrip("/").rpartition("/")[2].lower()
    return next((method for method, marks in _MARKS.items() if any(mark in own_name for mark in marks)), DRAFT_MODEL)


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    value = config.get(name)
    return value if isinstance(value, list) else []
