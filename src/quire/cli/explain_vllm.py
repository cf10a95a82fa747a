"""`quire explain --vllm COMMAND`: each flag of a pasted command, its effect here, and the command for Quire.

`--llama-server`, `--sglang`, `--tgi` and `--modelfile` do the same for other servers.

The answers come from `compat` and from the settings themselves. Nothing is executed, loaded or downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quire import __version__, envs
from quire.cli.config_file import converted
from quire.cli.flags import Parser, Switch, config_from_values
from quire.cli.settings import add_settings_flags
from quire.cli.words import plain_words
from quire.compat.environment import NOT_READ, REFUSED, is_refused, nearest_variable
from quire.compat.foreign import Foreign
from quire.compat.old_flags import INVENTED_FLAGS, OLD_FLAGS
from quire.compat.pasted import PastedCommand, read_pasted
from quire.compat.peers import Peer, read_modelfile
from quire.compat.table import FOREIGN, as_flag, flag_words, joined, shown_value
from quire.compat.values import SAME_VALUES
from quire.config import EngineConfig, ServerConfig
from quire.entry.launch import find_model
from quire.entry.listen import check_guarded
from quire.errors import ConfigError, MemoryPlanError, printable
from quire.loader.hub import cached_file, local_folder, local_path
from quire.model_config import ModelConfig, load_model_config
from quire.option import Source, options
from quire.planning.hardware import this_machine
from quire.screen.explain import Explanation, explain, shown_setting

# same: Quire has it under this name; translated: it is another setting or value here; no effect: there is nothing to
# set; contradictory: it does not go with another flag, the model or the machine; removed: a vLLM before 0.32 had it;
# never existed: no vLLM had it; refused: vLLM 0.32 has it, and Quire does not start with it.
Status = Literal["same", "translated", "no effect", "contradictory", "removed", "never existed", "refused"]
STOPS: frozenset[Status] = frozenset({"contradictory", "removed", "never existed", "refused"})

_REMOVED = {entry.name for entry in OLD_FLAGS}
_INVENTED = {entry.name for entry in INVENTED_FLAGS}
_FIELDS = {f.name: f for config in (EngineConfig, ServerConfig) for f in options(config)}
_DASHES = "-–—"  # web pages often replace two hyphens by one of these dashes
_NUMBER = re.compile(r"-\d*\.?\d+")
_EXPANDED = re.compile(r"\$\w|\$\{|\$\(|`")  # a shell would put something else there
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASS|PASSWD|PASSWORD|AUTH|CREDENTIALS?)$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")  # user:password@ of an address
_HIDDEN = "***"
_PLAIN_VARIABLES = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_HOME", "OMP_NUM_THREADS"}  # read by others
_KNOWN_VARIABLES = {variable.name for variable in envs.VARIABLES} | NOT_READ.keys() | REFUSED.keys() | _PLAIN_VARIABLES
_SECRET_FROM = {"api_key": envs.API_KEY.name, "hf_token": "HF_TOKEN"}


@dataclass(frozen=True)
class Answer:
    """The answer to one flag or variable of the command.

    Attributes:
        name: the name as the command spells it.
        value: the given value, with secrets hidden.
        status: see STOPS.
        does: its effect here, or the reason why it has none.
        limits: the quantity that the setting bounds.
        here: the setting's value with this model on this machine.
        next: the cost of the next larger value.
        targets: the settings that it becomes.
    """

    name: str
    value: str
    status: Status
    does: str
    limits: str = ""
    here: str = ""
    next: str = ""
    targets: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, str]:
        """The object for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "targets"}


@dataclass(frozen=True)
class CommandExplanation:
    """The answers to a command.

    Attributes:
        model: the command's model in words.
        is_model_known: whether the model's files are on this machine, so that the settings were tried with it.
        error: the error that stops a start, if it is not the fault of a single flag.
        command: the words of the command for Quire, as a shell reads them.
    """

    model: str
    is_model_known: bool
    notes: list[str]
    answers: list[Answer]
    error: str | None
    command: list[str]

    @property
    def starts(self) -> bool:
        """Whether `quire serve` starts with these flags, as far as is known without a start."""
        return self.error is None and all(answer.status not in STOPS for answer in self.answers)

    def as_dict(self) -> dict[str, Any]:
        """The object for JSON."""
        return {
            "version": __version__,
            "model": self.model,
            "is_model_known": self.is_model_known,
            "notes": self.notes,
            "flags": [answer.as_dict() for answer in self.answers],
            "starts": self.starts,
            "error": self.error,
            "command": " ".join(self.command),
        }

    def text(self) -> str:
        """The text for people."""
        return "\n".join(printable(line.replace("\n", "\\n")) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"model   {self.model}"
        for note in self.notes:
            yield f"note    {note}"
        for answer in self.answers:
            yield ""
            yield f"{answer.name} {answer.value}".rstrip() + f"   [{answer.status}]"
            for label in ("does", "limits", "here", "next"):
                if text := getattr(answer, label):
                    yield f"    {label:<7} {text}"
        yield ""
        if self.error is not None:
            yield f"A start would fail: {self.error}"
        if self.starts:
            known = "" if self.is_model_known else ", if its model goes with them"
            yield f"Quire starts with these flags as they are{known}. The same command for Quire:"
        else:
            stopping = [answer.name for answer in self.answers if answer.status in STOPS]
            yield f"Quire does not start with {', '.join(stopping) or 'this'}. The rest of the command for Quire:"
        yield ""
        yield from self._command_lines()

    def _command_lines(self) -> Iterator[str]:
        """The lines of the command. Each has a flag with its values."""
        lines: list[list[str]] = [[]]
        for word in self.command:
            if word.startswith("--"):
                lines.append([])
            lines[-1].append(word)
        for i, words in enumerate(lines):
            yield "    " * bool(i) + " ".join(words) + (" \\" if i + 1 < len(lines) else "")


@dataclass(frozen=True)
class _Given:
    """One flag of the command. `action` is None for an unknown flag; `value` is parsed by its flag."""

    flag: str
    action: argparse.Action | None
    words: list[str]

    @property
    def name(self) -> str:
        return "" if self.action is None else self.action.dest

    @property
    def shown(self) -> str:
        field = _FIELDS.get(self.name)
        is_secret = _SECRET_NAME.search(self.flag) is not None if field is None else field.metadata["secret"]
        return _HIDDEN if is_secret and self.words else _without_login(" ".join(self.words))

    def value(self) -> Any:
        """The value as `quire serve` reads it. Raises ConfigError."""
        assert self.action is not None
        if isinstance(self.action, Switch):
            return self.action.is_on(self.flag)
        if not self.words and self.action.nargs in (None, "+"):
            raise ConfigError(f"{self.flag} has no value", expected=f"{self.flag} VALUE")
        return converted(self.words if self.action.nargs in ("+", "*") else self.words[0], self.action, self.flag)


def explain_command(text: str) -> CommandExplanation:
    """The answers to a vLLM command. Raises ConfigError for a text that is no such command."""
    pasted = read_pasted(text)
    parser = Parser(prog="quire serve", allow_abbrev=False)
    add_settings_flags(parser)
    return _Reading(pasted, parser, FOREIGN, "in vLLM 0.1 to 0.32").explanation()


def explain_peer(text: str, peer: Peer) -> CommandExplanation:
    """The answers to the command, or the Modelfile, of another server. Raises ConfigError."""
    pasted = read_modelfile(text) if peer.program is None else read_pasted(text, peer.program)
    parser = Parser(prog=peer.title, allow_abbrev=False, add_help=False)
    for flag in peer.flags:
        words: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS}
        if flag.shape == "switch":
            words["action"] = Switch
        else:
            words |= {"type": str, "nargs": "*" if flag.shape == "list" else None}
        parser.add_argument(*flag.flags, **words)
    return _Reading(pasted, parser, peer.foreign, f"of {peer.title}").explanation()


class _Reading:
    """The flags of one command, answered one after another, then tried together."""

    def __init__(self, pasted: PastedCommand, parser: Parser, foreign: Mapping[str, Foreign], where: str) -> None:
        self._pasted, self._parser, self._table, self._where = pasted, parser, foreign, where
        self._given = list(_given(plain_words(pasted.words, parser.switches), parser))
        self._values: dict[str, Any] = {}  # the values of settings, by name
        self._unchecked: dict[str, list[str]] = {}  # words of settings that only a shell or a file completes
        self._variables = dict(pasted.variables)
        self._failures: dict[str, tuple[Status, str]] = {}  # by setting or variable
        self._error: ConfigError | None = None

    def explanation(self) -> CommandExplanation:
        own = [self._setting(i, given) for i, given in enumerate(self._given)]
        answers = [answer or self._foreign(given) for answer, given in zip(own, self._given, strict=True)]
        answers += [self._variable(name, value) for name, value in self._variables.items()]
        model, found = self._tried()
        answers = [self._judged(answer, found) for answer in answers]
        is_known = found is not None
        return CommandExplanation(
            model, is_known, self._pasted.notes, answers, self._said(found), self._command(answers)
        )

    def _setting(self, at: int, given: _Given) -> Answer | None:
        """The answer to the name of a setting; None: the name is foreign."""
        if given.action is None and not _is_flag(given.flag):
            return Answer(
                given.flag, "", "contradictory", "a second word that belongs to no flag; the first is the model"
            )
        if given.action is None:
            near = self._parser.nearest_flag(given.flag)
            does = f"Quire knows of no such flag {self._where}" + (f"; did you mean {near}?" if near else "")
            return Answer(given.flag, given.shown, "never existed", does)
        name = given.name
        if any(later.name == name != "" for later in self._given[at + 1 :]):
            return self._repeated(given)
        if name in self._table:
            return None
        if name == "help":
            return Answer(given.flag, "", "no effect", "it shows the flags there are, and starts nothing")
        if name == "config":
            self._unchecked[name] = given.words
            return Answer(
                given.flag, given.shown, "same", str(given.action.help), here="it is not read here", targets=(name,)
            )
        field = _FIELDS[name]
        answer = Answer(
            given.flag, given.shown, "same", field.metadata["help"], field.metadata["limits"], targets=(name,)
        )
        if any(_EXPANDED.search(word) for word in given.words):
            self._unchecked[name] = given.words
            return replace(answer, here="a shell puts a value there that is not known here, so nothing is checked")
        try:
            value = self._values[name] = given.value()
        except ConfigError as error:
            return replace(answer, status="refused", does=error.message, limits="", targets=())
        if isinstance(value, str) and (same := SAME_VALUES.get(name, {}).get(value)) is not None:
            return replace(answer, status="translated", does=f"taken as {same}. {answer.does}")
        return answer

    def _repeated(self, given: _Given) -> Answer:
        """The answer to a flag that comes again later: the last one counts. Two names of the model must be equal."""
        last = next(later for later in reversed(self._given) if later.name == given.name)
        if given.name == "model" and (given.flag == "MODEL") != (last.flag == "MODEL") and given.words != last.words:
            return Answer(given.flag, given.shown, "contradictory", f"Two models are named: {last.shown} is the other")
        return Answer(given.flag, given.shown, "no effect", f"it is given again: {last.flag} {last.shown} counts")

    def _foreign(self, given: _Given) -> Answer:
        """The answer from the table of foreign names."""
        entry = self._table[given.name]
        is_vllms = self._table is FOREIGN
        is_removed, is_invented = (is_vllms and entry.name in names for names in (_REMOVED, _INVENTED))
        since = "; vLLM 0.32 no longer has it" if is_removed else ""
        try:
            value = given.value()
            if entry.asks_for_nothing(value):
                does = f"it asks for what happens anyway: {entry.text}{since}"
                return Answer(given.flag, given.shown, "no effect", does)
            if entry.kind == "refused":
                raise entry.refusal(given.flag, value)
            becomes = entry.translation(value)
        except ConfigError as error:
            status: Status = "removed" if is_removed else "never existed" if is_invented else "refused"
            return Answer(given.flag, given.shown, status, error.message)
        try:
            for target, new in becomes.items():
                self._values[target] = joined(self._values.get(target), new, given.flag, as_flag(target))
        except ConfigError as error:
            return Answer(given.flag, given.shown, "contradictory", error.message)
        if not becomes:
            return Answer(given.flag, given.shown, "no effect", f"{entry.text}{since}")
        taken = ", ".join(f"{as_flag(target)} {shown_value(new)}" for target, new in becomes.items())
        does = f"taken as {taken}: {entry.text}{since}"
        return Answer(given.flag, given.shown, "translated", does, targets=tuple(becomes))

    def _variable(self, name: str, value: str) -> Answer:
        shown = _HIDDEN if _is_hidden(name, value) else value
        read = next((variable for variable in envs.VARIABLES if variable.name == name), None)
        if read is not None:
            return Answer(name, shown, "same", read.help, targets=(name,))
        if is_refused(name, value):
            why, fix = REFUSED[name]
            return Answer(name, shown, "refused", f"{why}. {fix}.")
        if name in NOT_READ or name in REFUSED:
            return Answer(name, shown, "no effect", NOT_READ.get(name, "it asks for what happens anyway"))
        if name.startswith(("VLLM_", "QUIRE_")):
            near = nearest_variable(name)
            return Answer(name, shown, "no effect", "it is not read" + (f"; did you mean {near}?" if near else ""))
        return Answer(name, shown, "same", "not Quire's own: it is passed on", targets=(name,))

    def _tried(self) -> tuple[str, Explanation | None]:
        """Try all settings together, and leave out one that fails each time. Returns a description of the model."""
        while True:
            try:
                with _environment(self._variables):
                    return self._attempt()
            except ConfigError as error:
                name = error.param or ""
                if name in self._values:
                    value = self._values.pop(name)
                    self._failures[name] = "contradictory" if _is_legal({name: value}) else "refused", error.message
                elif self._variables.pop(name, None) is not None:
                    self._failures[name] = "refused", error.message
                else:
                    self._error = error
                    return self._values.get("model") or "the bundled demo model", None

    def _attempt(self) -> tuple[str, Explanation | None]:
        engine, server = _configs(self._values)
        keys = [*server.api_key, server.api_key_file, envs.API_KEY.get(), *self._unchecked.get("api_key", ())]
        if "host" not in self._unchecked:
            check_guarded(server, [key for key in keys if key])
        if not self._pasted.is_whole and engine.model is None:
            return "none is named: no value is checked against one, and no cost is known", None
        if "model" in self._unchecked:
            return "the shell puts its name in: no value is checked against it, and no cost is known", None
        if {"model", "gguf_file"} & self._failures.keys():
            return "it cannot be read: no value is checked against it, and no cost is known", None
        found = _model_here(engine)
        if found is None:
            return f"{engine.model}: not on this machine, so no value is checked against it, and no cost is known", None
        name, model = found
        explanation = explain(name, engine, server, model, this_machine(engine.device))
        return f"{name}: {model.architecture}, its config is on this machine", explanation

    def _judged(self, answer: Answer, found: Explanation | None) -> Answer:
        """The answer, completed by the trial of its settings."""
        for name in answer.targets:
            if name in self._failures:
                status, message = self._failures[name]
                return replace(answer, status=status, does=message, limits="", targets=())
            if found is not None and name in found.settings and name not in self._unchecked:
                setting = found.settings[name]
                here = f"{shown_setting(name, setting.value)}: {setting.detail}" if setting.detail else ""
                return replace(answer, limits=setting.limits, here=here, next=found.next_costs.get(name, ""))
        return answer

    def _said(self, found: Explanation | None) -> str | None:
        error: ConfigError | MemoryPlanError | None = self._error or (None if found is None else found.error)
        return None if error is None else error.message

    def _command(self, answers: list[Answer]) -> list[str]:
        """The words for a shell: flags that have an effect here and do not stop the start."""
        kept = {name for answer in answers if answer.status in ("same", "translated") for name in answer.targets}
        words = []
        for name, value in self._variables.items():
            if name in kept:
                words.append(f"{name}=" + (f'"${name}"' if _is_hidden(name, value) else _word(value)))
        words += ["quire", "serve"]
        if "model" in kept:
            words += self._unchecked_words("model") or [_word(self._values["model"])]
        for name in [*self._values, *self._unchecked]:
            if name in kept and name != "model":
                words += self._flag(name)
        return words

    def _flag(self, name: str) -> list[str]:
        flag = as_flag(name)
        if name in _SECRET_FROM:
            return [flag, f'"${_SECRET_FROM[name]}"']
        if name in self._unchecked:
            return [flag, *self._unchecked_words(name)]
        flag, *values = flag_words(name, self._values[name])
        return [flag, *map(_word, values)]

    def _unchecked_words(self, name: str) -> list[str]:
        return ['"' + _without_login(word).replace('"', '\\"') + '"' for word in self._unchecked.get(name, ())]


def _given(words: list[str], parser: Parser) -> Iterator[_Given]:
    """The flags of a command with their values; MODEL is the word before them."""
    actions = parser._option_string_actions
    at, has_model = 0, False
    while at < len(words):
        word, at = words[at], at + 1
        if not _is_flag(word):
            action = None if has_model else actions.get("--model")
            yield _Given(word if action is None else "MODEL", action, [word])
            has_model = True
            continue
        flag, equals, value = (word, "", "") if word in actions else word.partition("=")
        action = actions.get(flag)
        end = at
        if equals:
            values = [value]
        else:
            most = 0 if action is not None and action.nargs == 0 else 1 if action is None or not action.nargs else None
            while end < len(words) and not _is_flag(words[end]) and (most is None or end - at < most):
                end += 1
            values, at = words[at:end], end
        yield _Given(flag, action, values)


def _is_hidden(name: str, value: str) -> bool:
    """Whether the value of a variable may be a secret: every unknown variable, and addresses with a login."""
    is_known = name in _KNOWN_VARIABLES and _SECRET_NAME.search(name) is None
    return not is_known or _LOGIN.search(value) is not None


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] in _DASHES and not _NUMBER.fullmatch(word)


def _configs(values: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    given = dict(values)
    sources: dict[str, Source] = dict.fromkeys(given, "flag")
    return config_from_values(EngineConfig, given, sources), config_from_values(ServerConfig, given, sources)


def _is_legal(values: Mapping[str, Any]) -> bool:
    """Whether the values are legal by themselves. If they are, an error lies in their combination."""
    try:
        _configs(values)
    except ConfigError:
        return False
    return True


def _model_here(config: EngineConfig) -> tuple[str, ModelConfig] | None:
    """The name and the facts of a model whose files are on this machine; None: they are not.

    Raises ConfigError for files that cannot be read.
    """
    name = config.model
    if name is None and config.gguf_file is None:
        return find_model(config, None, weights=False)[1:]
    if any(local_path(path).exists() for path in (config.gguf_file, name, (name or "").partition(":")[0]) if path):
        return find_model(config, None, weights=False)[1:]
    if name is None or config.gguf_file is not None:
        return None
    try:
        local_folder(name)
    except ConfigError:
        return None  # it is no hub id either: guides write <model>
    file = cached_file(name, "config.json", config.revision, config.download_dir) if ":" not in name else None
    if file is None:
        return None
    any_architecture = config.model_impl in ("auto", "transformers")
    return name, load_model_config(file.parent, config.hf_overrides, any_architecture=any_architecture)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables that Quire reads, while the settings are tried."""
    names = [variable.name for variable in envs.VARIABLES if variable.name in variables]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: variables[name] for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _word(value: Any) -> str:
    """A word in the form that a shell reads; control characters are spelled out."""
    return shlex.quote(printable(_without_login(str(value))).replace("\n", "\\n"))


def _without_login(text: str) -> str:
    """A text without the users and passwords in its addresses."""
    return _LOGIN.sub(f"{_HIDDEN}@", text)
