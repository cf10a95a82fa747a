"""The page docs/flags.md, made from the definitions: `python -m quire.cli.flags_page > docs/flags.md`."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from quire import envs
from quire.compat.commands import ABSENT_COMMANDS
from quire.compat.environment import NOT_READ, REFUSED
from quire.compat.foreign import Foreign
from quire.compat.speculation import OTHER_SPELLINGS, SPECULATION_KEYS
from quire.compat.table import FOREIGN, SHORT_FLAGS, as_flag
from quire.compat.values import FOREIGN_VALUES
from quire.config import EngineConfig, ServerConfig
from quire.option import options

CELL_WIDTH = 300  # longer lists of flags stand below the table
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_HEAD = """# Flags

This page lists every setting. `python -m quire.cli.flags_page` makes it from the definitions; do not edit it. A flag
`--max-num-seqs` is the argument `max_num_seqs` of `LLM(...)` and the key `max-num-seqs` of a config file. `no` before
the name turns a switch off: `--no-enable-prefix-caching`. Numbers of tokens and bytes take the suffixes k, m, g (powers
of 1000) and K, M, G (powers of 1024).

`quire explain [MODEL] [flags]` prints the value that each setting would have on this machine, its source, and what it
limits. `GET /v1/config` prints the same for a running server. Settings marked *live* move while serving:
`POST /v1/config` with `{"max_num_seqs": 8}`.

Settings for GPUs are tested only without a GPU: no part of Quire has run on a GPU yet
([architecture.md](architecture.md#the-engine-on-a-gpu)).

`--config FILE` reads settings from a YAML file; the command line wins. An unknown key is an error that names its line:

```yaml
model: Qwen/Qwen3-0.6B
max-model-len: 32k
served-model-name: [qwen, default]
enable-prefix-caching: false
```

`--flag.key value` sets one key of a flag that takes a JSON object.
"""


def render() -> str:
    """The whole page in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for title, config in (("The model, its memory and its schedule", EngineConfig), ("The server", ServerConfig)):
        yield from (f"## {title}", "", *_table(("flag", "default", "meaning", "limits"), _settings(config)), "")
    yield from ("## Environment variables", "", *_table(("variable", "default", "meaning"), _environment()), "")
    yield from ("## vLLM's names without a setting here", "")
    yield "Flags of vLLM 0.1 to 0.32 and their `LLM(...)` arguments. Nothing is dropped in silence."
    for title, kind in (
        ("Translated, with a notice", "translated"),
        ("Accepted with a notice: there is nothing to set", "accepted"),
        ("Refused, unless the value asks for nothing", "refused"),
    ):
        yield from ("", f"### {title}", "")
        answers = _foreign(entry for entry in FOREIGN.values() if entry.kind == kind)
        cells = ((_cell(flags), why, instead) for flags, why, instead in answers)
        yield from _table(("flags", "why", "instead"), cells)
        for flags, why, _ in answers:
            if _cell(flags) != ", ".join(flags):
                yield from ("", *textwrap.wrap(f"{len(flags)} flags ({why}): {', '.join(flags)}.", 120, **_WHOLE_WORDS))
    yield from ("", "### Values of settings that exist here", "")
    yield from _table(("flag", "values", "why", "instead"), _values())
    yield from ("", "### Keys of --speculative-config", "")
    yield "The keys that exist here are in [speculation.md](speculation.md)."
    yield ""
    yield from _table(("keys", "answer"), _speculation_keys())
    yield from ("", "### Environment variables", "")
    yield from _table(("variable", "answer"), _foreign_environment())
    yield from ("", "### Commands", "")
    rows = ((f"`{name}`", f"{why}; {_lowered(fix)}") for name, (why, fix) in ABSENT_COMMANDS.items())
    yield from _table(("command", "answer"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _settings(config: type[Any]) -> Iterator[tuple[str, ...]]:
    for f in options(config):
        flags = ", ".join(f"`{flag}`" for flag in (as_flag(f.name), *f.metadata["flags"]))
        meaning = f.metadata["help"].rstrip(".") + (" (*live*)" if f.metadata["live"] else "")
        yield flags, _default(f), meaning, f.metadata["limits"]


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is None or f.default == ():
        return ""
    return f"`{str(f.default).lower()}`" if isinstance(f.default, bool) else f"`{f.default}`"


def _environment() -> Iterator[tuple[str, ...]]:
    for variable in sorted(envs.VARIABLES, key=lambda variable: variable.name):
        default = "" if variable.default == "" else f"`{str(variable.default).lower()}`"
        yield f"`{variable.name}`", default, variable.help


def _foreign(entries: Iterable[Foreign]) -> list[tuple[list[str], str, str]]:
    """Entries (flags, reason, advice), one for all names with the same answer."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        spelled = (f"`{flag}`" for flag in (as_flag(entry.name), *SHORT_FLAGS.get(entry.name, ())))
        rows.setdefault((entry.text, entry.instead), []).extend(spelled)
    return [(flags, text, instead) for (text, instead), flags in rows.items()]


def _cell(flags: list[str]) -> str:
    whole = ", ".join(flags)
    return whole if len(whole) <= CELL_WIDTH else f"{flags[0]}, {flags[1]}, ... ({len(flags)} flags, all of them below)"


def _values() -> Iterator[tuple[str, ...]]:
    for name, entries in FOREIGN_VALUES.items():
        for entry in entries:
            yield f"`{as_flag(name)}`", ", ".join(f"`{value}`" for value in entry.values), entry.text, entry.instead


def _speculation_keys() -> Iterator[tuple[str, str]]:
    rows: dict[str, list[str]] = {}
    for entry in SPECULATION_KEYS.values():
        instead = f"; {_lowered(entry.instead)}" if entry.instead else ""
        answer = f"refused: {entry.text}{instead}" if entry.kind == "refused" else f"no effect: {entry.text}"
        rows.setdefault(answer, []).append(f"`{entry.name}`")
    yield from ((", ".join(names), answer) for answer, names in rows.items())
    yield from ((f"`{name}`", f"becomes `{key}`") for name, key in OTHER_SPELLINGS.items())


def _foreign_environment() -> Iterator[tuple[str, ...]]:
    for name, (why, fix) in REFUSED.items():
        yield f"`{name}`", f"refused: {why}; {_lowered(fix)}"
    for name, why in sorted(NOT_READ.items()):
        yield f"`{name}`", f"not read: {why}"


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


if __name__ == "__main__":
    sys.stdout.write(render())
