"""A chat with one model: answers go to standard output, and commands begin with a slash."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing

from quire import logs
from quire.chat.conversation import DEFAULT, PARAMETERS, SYSTEM, Conversation
from quire.chat.model import ChatModel
from quire.chat.typed import QUOTES, ReadLine, Typed, read_typed
from quire.compat.names import nearest
from quire.errors import ContextLengthError, EngineDeadError, EngineRestartedError, QuireError
from quire.screen.terminal import without_controls, write_answer

LEAVE = "Ctrl-D leaves."
HELP = f"""\
  /set              shows the parameters of the answers
  /set NAME VALUE   sets one; VALUE {DEFAULT} removes the setting
  /set {SYSTEM} TEXT  says how the model should answer
  /clear            forgets the conversation
  /bye              leaves, like Ctrl-D

Ctrl-C stops an answer. Several lines are one message between {QUOTES} and {QUOTES}, or
with a backslash at the end of each but the last."""


class Session:
    """One conversation with one model."""

    def __init__(self, model: ChatModel, conversation: Conversation) -> None:
        self._model, self._conversation = model, conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/set": self._set,
            "/clear": self._clear,
        }

    def ask(self, question: str) -> None:
        """Print the answer as it comes. The conversation keeps it, even if only a part came.

        Raises QuireError or KeyboardInterrupt, after the printed part is kept.
        """
        answer, reason = "", None
        try:
            with closing(
                self._model.answer(self._conversation.asked(question), self._conversation.parameters)
            ) as pieces:
                for piece in pieces:
                    answer += piece.text
                    write_answer(piece.text)
                    reason = piece.finish_reason or reason
        finally:
            if answer:
                self._conversation.add(question, answer)
            if not answer.endswith("\n"):
                _print("")
        if reason == "length":
            logs.say("the answer is cut off: it has reached max_tokens or the end of the context")

    def talk(self, read_line: ReadLine) -> None:
        """Answer each message until the input ends or /bye is typed."""
        _print(f"{self._model.name}: /help lists the commands. {LEAVE}")
        while (typed := self._next(read_line)) is not None:
            try:
                if typed.is_command:
                    if typed.text.strip() == "/bye":
                        return
                    self._obey(typed.text)
                elif typed.text.strip():
                    self.ask(typed.text)
            except KeyboardInterrupt:
                pass  # the answer has been stopped
            except EngineRestartedError as error:
                _complain(error.message)
            except EngineDeadError:
                raise
            except ContextLengthError as error:
                _complain(f"{error.message} /clear forgets the conversation.")
            except QuireError as error:
                _complain(error.message)

    def _next(self, read_line: ReadLine) -> Typed | None:
        """The next message or command; None at the end of the input."""
        while True:
            try:
                return read_typed(read_line)
            except EOFError:
                _print("")
                return None
            except KeyboardInterrupt:
                _print(f"\n{LEAVE}")

    def _obey(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        if (command := self._commands.get(name)) is None:
            near = nearest(name, self._commands)
            hint = f"Did you mean {near}?" if near else "/help lists the commands."
            _complain(f"There is no command {name}. {hint} A message that begins with a slash goes between {QUOTES}.")
        else:
            command(argument.strip())

    def _help(self, argument: str) -> None:
        _print(HELP)

    def _clear(self, argument: str) -> None:
        self._conversation.turns.clear()
        _print("The conversation is forgotten; parameters and system prompt stay.")

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        known = (*PARAMETERS, SYSTEM)
        if value or (name and name not in known):
            self._conversation.set(name, value.strip())
        for shown in (name,) if name else known:
            self._show(shown)

    def _show(self, name: str) -> None:
        """Print one line about a parameter or the system prompt."""
        if name == SYSTEM:
            _print(f"  {name:<19} {self._conversation.system or 'none'}")
            return
        is_set = name in self._conversation.parameters
        value = (self._conversation.parameters if is_set else self._model.defaults).get(name, DEFAULT)
        shown = f"{'none' if value is None else value}{' (set)' * is_set}"
        _print(f"  {name:<19} {shown:<12} {PARAMETERS[name]}")


def _print(line: str) -> None:
    write_answer(line, end="\n")


def _complain(message: str) -> None:
    logs.say(without_controls(message), logging.ERROR)
