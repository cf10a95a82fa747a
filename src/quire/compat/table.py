"""The table of all foreign names. With it, given settings are settled: names are accepted, translated or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.compat.engine_flags import ENGINE_FLAGS
from quire.compat.foreign import Foreign
from quire.compat.old_flags import INVENTED_FLAGS, OLD_FLAGS
from quire.compat.server_flags import SERVER_FLAGS
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.speculative_config import SpeculativeConfig

logger = get_logger(__name__)

FOREIGN: dict[str, Foreign] = {
    entry.name: entry for entry in (*ENGINE_FLAGS, *SERVER_FLAGS, *OLD_FLAGS, *INVENTED_FLAGS)
}

# Further spellings of foreign flags on the command line.
SHORT_FLAGS: dict[str, tuple[str, ...]] = {
    "prefill_context_parallel_size": ("-pcp",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_multi_port_external_lb": ("-dpm",),
    "diffusion_config": ("-dc",),
    "compilation_config": ("-cc",),
    "attention_config": ("-ac",),
    "api_server_count": ("-asc",),
    "optimization_level": ("-O",),
}


def as_flag(name: str) -> str:
    """The flag of a setting, for example `--max-num-seqs` for `max_num_seqs`."""
    return "--" + name.replace("_", "-")


def flag_words(name: str, value: Any) -> list[str]:
    """The words of a command line that give a setting this value; a shell needs them quoted."""
    flag = as_flag(name)
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, value)]
    return [flag, shown_value(value)]


def settle(
    given: Mapping[str, Any], spell: Callable[[str], str] = str, foreign: Mapping[str, Foreign] = FOREIGN
) -> dict[str, Any]:
    """The settings, with foreign names translated or removed.

    Args:
        given: the settings by name, with foreign names among them.
        spell: makes the form of a name for messages, for example `as_flag` for the command line.
        foreign: the foreign names of flags, or of keys.

    Raises:
        ConfigError: a name is refused, or it becomes a setting that is given too.
    """
    asked = {name: given[name] for name in given.keys() & foreign.keys()}
    asked = {name: value for name, value in sorted(asked.items()) if not foreign[name].asks_for_nothing(value)}
    _check_refused(asked, spell, foreign)
    settled = {name: value for name, value in given.items() if name not in foreign}
    for name, value in asked.items():
        entry = foreign[name]
        becomes = entry.translation(value)
        if not becomes:
            logger.warning("%s has no effect: %s", spell(name), entry.text)
        for target, new in becomes.items():
            logger.warning("%s is taken as %s %s: %s", spell(name), spell(target), shown_value(new), entry.text)
            settled[target] = joined(settled.get(target), new, spell(name), spell(target))
    return settled


def _check_refused(asked: Mapping[str, Any], spell: Callable[[str], str], foreign: Mapping[str, Foreign]) -> None:
    refused = [name for name in asked if foreign[name].kind == "refused"]
    if refused:
        error = foreign[refused[0]].refusal(spell(refused[0]), asked[refused[0]])
        if others := ", ".join(spell(name) for name in refused[1:]):
            error = ConfigError(
                error.what,
                value=error.value,
                expected=error.expected,
                param=error.param,
                fix=f"{error.fix}. Not supported either: {others}",
            )
        raise error


def joined(old: Any, new: Any, source: str, target: str) -> Any:
    """The value of a setting that is given and is also the result of a translation.

    Raises ConfigError if the two values contradict each other.
    """
    if isinstance(old, dict) and isinstance(new, dict) and all(old[key] == new[key] for key in old.keys() & new.keys()):
        return {**old, **new}
    if old is not None and old != new:
        raise ConfigError(f"{source} and {target} say different things", value=[new, old], fix=f"Leave {source} out")
    return new


def shown_value(value: Any) -> str:
    """The value as a command line spells it."""
    if isinstance(value, SpeculativeConfig):
        value = value.effective()
    return json.dumps(value) if isinstance(value, dict) else str(value)
