"""Reads a command of vLLM's that somebody has pasted, like a shell, but nothing is executed or expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from quire.compat.commands import absent_command
from quire.errors import ConfigError

SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_CONTAINERS = ("docker", "podman", "nerdctl")
_IMAGE = re.compile(r"(?:[\w.-]+(?::\d+)?/)*vllm[\w.-]*(?:/[\w.-]+)*(?:[:@][\w.:-]+)?")  # vllm/vllm-openai:latest
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_CONTINUED = re.compile(r"\\\r?(?:\n|\Z)")
_PLACEHOLDER = re.compile(r"<[^<>|&;\n]+>")  # <model>, for the reader to replace; a shell would read a file
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>|<)(?:&[\d-])?")
_EXPANSION = re.compile(r"\$\([^()\n]*\)|`[^`\n]*`")
_QUOTED = {"'": re.compile(r"'([^']*)'"), '"': re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)}
_IN_DOUBLE_QUOTES = re.compile(r'\\(["\\$`\n])')
_EXPECTED = (
    "`vllm serve MODEL [flags]`, `python -m vllm.entrypoints.openai.api_server [flags]`, "
    "`docker run ... vllm/vllm-openai [flags]`, or the flags alone"
)
BROKEN = "a comment or a blank after `\\`: a shell ends the command there, and does not read the flags below it"
ESCAPED = "a blank after `\\` within a line: a shell takes it for a part of the next word, and finds no flag there"
UNCONTINUED = "no `\\` at the end of a line before flags: a shell ends the command there, and does not read them"


@dataclass
class PastedCommand:
    """A pasted command.

    Attributes:
        words: the words after the program: perhaps a model, and flags.
        variables: environment variables that are set for it.
        is_whole: whether the text names the program too; else it has only flags.
        notes: unintended effects of the text in a shell, and parts that were not read.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    is_whole: bool = True
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Program:
    """The beginning of a server's command.

    Args:
        title: the server's name.
        words: all possible beginnings: the name of a program, or `-m` and a module, and the words after it.
        image: the name of container images.
        expected: the expected text, for messages.
    """

    title: str
    words: tuple[tuple[str, ...], ...]
    image: re.Pattern[str]
    expected: str


VLLM = Program("vLLM", (("vllm", "serve"), *(("-m", module) for module in SERVER_MODULES)), _IMAGE, _EXPECTED)


def read_pasted(text: str, program: Program = VLLM) -> PastedCommand:
    """The command of the one server in a text. The text may have variables, continued lines and comments.

    Raises:
        ConfigError: the text has no such command or several, an unpaired quotation mark, or a zero byte.
    """
    if "\0" in text:
        raise ConfigError("The text holds a zero byte", fix="Paste a text", param="vllm")
    notes: list[str] = []
    commands = list(_joined(_Scanner(text, notes).commands(), notes))
    if not commands:
        raise ConfigError("There is no command in the text", expected=program.expected, param="vllm")
    variables: dict[str, str] = {}
    found: list[PastedCommand] = []
    for words in commands:
        if (server := _server(words, program)) is not None:
            found.append(server)
        elif words[0] == "export" or all(_ASSIGNMENT.match(word) for word in words):
            variables |= _assignments(words)
        else:
            notes.append(f"not read: the command {_first_word(words)}")
    if not found and len(commands) == 1 and _is_flag(commands[0][0]):
        found, notes = [PastedCommand(commands[0], is_whole=False)], notes[:-1]
    if len(found) != 1:
        raise _not_one(commands, found, program)
    (server,) = found
    server.variables, server.notes = variables | server.variables, notes + server.notes
    return server


class _Scanner:
    """Cuts a text into commands, and these into words. Nothing is expanded: `$NAME` and `*` stay as they are."""

    def __init__(self, text: str, notes: list[str]) -> None:
        self._text, self._notes = text, notes

    def commands(self) -> Iterator[list[str]]:
        """The commands of a text that have words."""
        text, at, words = self._text, 0, list[str]()
        goes_on = False  # the line before ends with `\`, and no word has come since
        is_blank = True  # this line is empty so far
        while at < len(text):
            char = text[at]
            if continued := _CONTINUED.match(text, at):
                at, goes_on, is_blank = continued.end(), True, True
            elif char == "\n":
                if not goes_on or is_blank:
                    if words:
                        yield words
                    words, goes_on = [], False
                at, is_blank = at + 1, True
            elif char.isspace():
                at += 1
            elif char == "\\" and text[at + 1 : at + 2].isspace():
                rest = text[at + 1 : self._end_of_line(at)].lstrip()
                self._note(BROKEN if not rest or rest.startswith("#") else ESCAPED)
                at, goes_on, is_blank = at + 1, True, False
            elif char == "#":
                if goes_on and is_blank:
                    self._note(BROKEN)
                at, is_blank = self._end_of_line(at), False
            elif char in ";|&()" and not _REDIRECTION.match(text, at):
                if words:
                    yield words
                at, words, goes_on, is_blank = at + 1, [], False, False
            elif _REDIRECTION.match(text, at) and not _PLACEHOLDER.match(text, at):
                at, is_blank = self._after_redirection(at), False
            else:
                word, at = self._word(at)
                goes_on = is_blank = False
                if words or word not in ("$", "%", "❯"):  # a shell's prompt
                    words.append(word)
        if words:
            yield words

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _end_of_line(self, at: int) -> int:
        end = self._text.find("\n", at)
        return len(self._text) if end < 0 else end

    def _after_redirection(self, at: int) -> int:
        redirection = _REDIRECTION.match(self._text, at)
        assert redirection is not None
        at = redirection.end()
        if "&" in redirection.group()[1:]:
            return at  # 2>&1
        while self._text[at : at + 1] in (" ", "\t"):
            at += 1
        return self._word(at)[1]

    def _word(self, at: int) -> tuple[str, int]:
        """The word that begins at `at`, without its quotation marks, and the place after its end."""
        text, parts = self._text, list[str]()
        while at < len(text):
            char = text[at]
            if (found := _PLACEHOLDER.match(text, at)) or (found := _EXPANSION.match(text, at)):
                parts.append(found.group())
                at = found.end()
            elif char.isspace() or char in ";|&()<>":
                break
            elif (quoted := _QUOTED.get(char)) is not None:
                if (found := quoted.match(text, at)) is None:
                    raise ConfigError(
                        f"A quotation mark {char} is not closed",
                        value=f"line {text.count(chr(10), 0, at) + 1}",
                        fix="Paste the whole command",
                        param="vllm",
                    )
                parts.append(found[1] if char == "'" else _IN_DOUBLE_QUOTES.sub(_unescaped, found[1]))
                at = found.end()
            elif continued := _CONTINUED.match(text, at):
                at = continued.end()
            elif char == "\\" and at + 1 < len(text):
                parts.append(text[at + 1])
                at += 2
            else:
                parts.append(char)
                at += 1
        return "".join(parts), at


def _unescaped(found: re.Match[str]) -> str:
    return "" if found[1] == "\n" else found[1]


def _joined(commands: Iterator[list[str]], notes: list[str]) -> Iterator[list[str]]:
    """The commands. A command that begins with a flag is joined to the command before it."""
    last: list[str] = []
    for words in commands:
        if last and _is_flag(words[0]):
            if not _is_flag(last[0]) and UNCONTINUED not in notes and BROKEN not in notes:
                notes.append(UNCONTINUED)
            last += words
            continue
        if last:
            yield last
        last = words
    if last:
        yield last


def _first_word(words: list[str]) -> str:
    """The first word of a command. The other words may hold secrets, so they are not shown."""
    name, equals, _ = words[0].partition("=")
    return name + equals


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1


def _server(words: list[str], program: Program) -> PastedCommand | None:
    """The command, if it starts a server of `program`; None: it does not."""
    if any(PurePosixPath(word).name in _CONTAINERS for word in words[:3]) and "run" in words:
        start = words.index("run") + 1
        at = next((i for i in range(start, len(words)) if _is_image(words, i, program)), None)
        if at is None:
            return None
        inner = _server(words[at + 1 :], program) or PastedCommand(words[at + 1 :])
        inner.variables = _container_variables(words[start:at]) | inner.variables
        inner.notes.append("not read: what the container is told before the image, but for its variables")
        return inner
    for i, word in enumerate(words):
        for begin in program.words:
            if (PurePosixPath(word).name, *words[i + 1 : i + len(begin)]) == begin:
                return PastedCommand(words[i + len(begin) :], _assignments(words[:i]))
    return None


def _is_image(words: list[str], at: int, program: Program) -> bool:
    """Whether a word is the name of an image of the server, and not the value of a flag such as `--name vllm`."""
    is_value = words[at - 1] in ("--name", "-h", "--hostname", "--network", "--entrypoint")
    return not is_value and program.image.fullmatch(words[at]) is not None


def _container_variables(words: list[str]) -> dict[str, str]:
    """The variables that `-e NAME=value`, `--env NAME=value` and `--env=NAME=value` set."""
    given = [value for flag, value in pairwise(words) if flag in ("-e", "--env")]
    given += [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    return _assignments(given)


def _assignments(words: list[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words if _ASSIGNMENT.match(word))
    return {name: value for name, _, value in pairs}


def _not_one(commands: list[list[str]], found: list[PastedCommand], program: Program) -> ConfigError:
    if found:
        return ConfigError(
            f"The text starts {len(found)} servers", expected="one", fix="Paste one of them", param="vllm"
        )
    for words in commands if program is VLLM else ():
        for i, word in enumerate(words[:-1]):
            after = words[i + 1]
            if word == "-m" and after.startswith("vllm."):
                is_benchmark = after.startswith("vllm.benchmarks.")
                return _other_command(
                    after, f"Use python -m quire{after.removeprefix('vllm')}" if is_benchmark else None
                )
            if PurePosixPath(word).name == "vllm":
                return _other_command(
                    f"vllm {after}", absent_command(after) or f"`quire {after} --help` lists its flags"
                )
    return ConfigError(
        f"There is no command of {program.title}'s in the text",
        value=_first_word(commands[0]),
        expected=program.expected,
        param="vllm",
    )


def _other_command(name: str, fix: str | None) -> ConfigError:
    return ConfigError(f"{name} does not start a server", expected=_EXPECTED, fix=fix, param="vllm")
