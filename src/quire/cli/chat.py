"""`quire chat [MODEL] [PROMPT ...]`, also `quire run`: ask a model in the terminal, here or on a server."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from quire import envs, logs
from quire.cli.client import (
    DEFAULT_URL,
    Client,
    NoApiError,
    ServerAnswerError,
    ServerUnreachableError,
    add_client_flags,
)
from quire.cli.flags import Parser, add_config_flags
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.environment import check_environment
from quire.compat.table import as_flag
from quire.config import EngineConfig, ServerConfig
from quire.entry.interrupt import end_at_once
from quire.entry.spawn import EngineInterpreter, spawned_engines
from quire.errors import ConfigError, InvalidRequestError
from quire.option import options

if TYPE_CHECKING:
    from quire.chat.conversation import Conversation
    from quire.chat.model import ChatModel

DESCRIPTION = f"""
With MODEL the model runs here. With --url, --model-name or --api-key a server is asked. With none of these: the server
at {DEFAULT_URL} if one answers, else the bundled demo model. With PROMPT, or when standard input or output is no
terminal, it answers once: what comes from standard input, then PROMPT. /help in the chat lists its commands.
"""
PATIENCE_SECONDS = 1.0  # the wait for a server that the user has not named
SERVER_SETTINGS = ("chat_template", "default_chat_template_kwargs", "log_level", "log_format")  # a chat has them too
NOT_OF_ENGINES = ("model", "log_level", "log_format")  # settings that a chat with a server has too


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        aliases=["run"],
        help="ask a model in the terminal: one that runs here, or a server",
        description=DESCRIPTION,
        allow_abbrev=False,
        conflict_handler="resolve",  # -q is vLLM's --quantization in `serve`, and its --quick in `chat`
    )
    add_settings_flags(parser, (EngineConfig,))
    add_config_flags(parser, ServerConfig, skip=frozenset({f.name for f in options(ServerConfig)} - {*SERVER_SETTINGS}))
    parser.usage = f"{parser.prog} [MODEL] [PROMPT ...] [flags]"
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="a question: answer it, and leave")
    add_client_flags(parser)
    add = parser.add_argument
    add("--system-prompt", metavar="TEXT", help="how the model should answer")
    add("--set", metavar="NAME=VALUE", action="append", default=[], help="a parameter of the answers, as temperature=0")
    add("-q", "--quick", metavar="MESSAGE", help="as PROMPT, and standard input is not read")
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    engine, server = read_settings(parser, args)
    if server.log_level is None and not os.environ.get(envs.LOGGING_LEVEL.name):
        logs.configure("WARNING")  # notes of a server at work do not belong between question and answer
    check_environment()
    conversation = _conversation(args)
    question = _question(args)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # a character that the terminal's encoding lacks ends no chat
    from quire.chat.session import Session
    from quire.chat.typed import line_reader

    with ExitStack() as stack:
        stack.enter_context(_on_signals(_stops(), _leave))
        session = Session(_model(args, engine, server, stack), conversation)
        if question is None:
            session.talk(line_reader())
        else:
            session.ask(question)
    return 0


def _conversation(args: argparse.Namespace) -> Conversation:
    from quire.chat.conversation import Conversation

    conversation = Conversation(args.system_prompt)
    for setting in args.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError("--set has no value", value=setting, expected="NAME=VALUE, as temperature=0")
        try:
            conversation.set(name, value)
        except InvalidRequestError as error:
            raise ConfigError(error.what, value=error.value, expected=error.expected, fix=error.fix) from None
    return conversation


def _question(args: argparse.Namespace) -> str | None:
    """The only question, from the command line or the standard input; None: a person at a terminal will ask."""
    if args.quick is not None:
        return str(args.quick)
    words = " ".join(args.prompt)
    if _is_a_person(sys.stdin) and (words or _is_a_person(sys.stdout)):
        return words or None
    given = b"" if sys.stdin is None else sys.stdin.buffer.read()
    try:
        question = "\n\n".join(filter(None, (given.decode().strip("\n"), words)))
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is no text: {error}", expected="UTF-8") from None
    if not question.strip():
        raise ConfigError("There is no question", fix="Give one after MODEL, with -q, or on standard input")
    return question


def _is_a_person(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def _model(args: argparse.Namespace, engine: EngineConfig, server: ServerConfig, stack: ExitStack) -> ChatModel:
    """The model that answers: an engine of this command, or a server, by the given flags."""
    given = [
        as_flag(name)
        for config in (engine, server)
        for name, source in config.sources.items()
        if source in ("flag", "file") and name not in NOT_OF_ENGINES
    ]
    if args.url or args.model_name or args.client_key:
        return _named_server(args, engine.model, given)
    if engine.model is None and not given:
        answers = f"the server at {DEFAULT_URL} answers; with a MODEL, one would run here"
        try:
            client = Client(patience=PATIENCE_SECONDS)
        except (ServerUnreachableError, NoApiError):
            logs.say(
                f"no MODEL is given, and no server answers at {DEFAULT_URL}: the bundled demo model answers, "
                "which knows Python's standard library and nothing else"
            )
        except ServerAnswerError:
            logs.say(answers)
            raise
        else:
            logs.say(answers)
            return client
    return _engine(engine, server, stack)


def _named_server(args: argparse.Namespace, model: str | None, given: list[str]) -> Client:
    if given:
        raise ConfigError(
            f"{', '.join(given)} set up a model that this command runs itself, but a server is to answer",
            fix="Leave out either these, or --url, --model-name and --api-key",
        )
    if args.model_name and model and args.model_name != model:
        raise ConfigError(
            "Two models are named", value=[model, args.model_name], expected="one", fix="Leave --model-name out"
        )
    return Client(args.url, model=args.model_name or model, api_key=args.client_key)


def _engine(engine: EngineConfig, server: ServerConfig, stack: ExitStack) -> ChatModel:
    if engine.sources["max_num_seqs"] == "default":
        engine = replace(engine, max_num_seqs=1)  # memory for one conversation
    interpreters = stack.enter_context(spawned_engines(engine))  # first: it takes longest
    from quire.chat.engine import EngineModel
    from quire.screen.first_screen import show_missing_kernels
    from quire.screen.start_display import shown_start

    show_missing_kernels()
    with shown_start(is_quiet=engine.disable_log_stats) as progress:
        with _ends_at_once(interpreters):
            model = EngineModel(engine, server, interpreters, progress)
        return stack.enter_context(model)


@contextmanager
def _ends_at_once(interpreters: Sequence[EngineInterpreter]) -> Iterator[None]:
    """In the block, a signal ends this process and the engines at once. A clean end would wait for a download."""

    def kill() -> None:
        for interpreter in interpreters:
            interpreter.kill()

    def end(number: int, frame: FrameType | None) -> None:
        end_at_once(number, kill)

    with _on_signals([signal.SIGINT, *_stops()], end):
        yield


def _stops() -> list[signal.Signals]:
    """The signals that end a chat: SIGTERM, and a closed terminal unless the command runs under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


def _leave(number: int, frame: FrameType | None) -> None:
    """End the chat like /bye, with the exit code that shells expect after a signal."""
    sys.exit(128 + number)


@contextmanager
def _on_signals(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
