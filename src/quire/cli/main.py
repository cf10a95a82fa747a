"""`quire`: parse the command line and hand over to the subcommand. Little is imported before Ctrl-C is answered."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import TYPE_CHECKING

from quire.entry.interrupt import INTERRUPTED
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.cli.flags import Parser

# The advice for errors of the system, by their number.
_REFUSALS = {
    errno.ENOMEM: ("more memory", "Raise `ulimit -v`, or end other programs"),
    errno.EMFILE: ("to open more files", "Raise `ulimit -n`"),
    errno.ENFILE: ("to open more files", "End other programs"),
    errno.EAGAIN: ("more processes or threads", "Raise `ulimit -u`, or end other programs"),
    errno.ENOSPC: ("to write more", "Make room on the disk"),
}


def build_parser() -> Parser:
    from quire import __version__
    from quire.cli import (
        bench,
        chat,
        collect_env,
        complete,
        explain,
        plan,
        quality,
        quantize,
        run_batch,
        serve,
        simulate,
    )
    from quire.cli.flags import Parser

    parser = Parser(
        prog="quire", description="Fast LLM inference and serving that needs no tuning.", allow_abbrev=False
    )
    parser.add_argument("-v", "--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (serve, chat, complete, run_batch, bench, simulate, plan, explain, quality, quantize, collect_env):
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # scripts start background processes in this way
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        args = build_parser().parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except QuireError as error:
        _say_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    except Exception as error:
        if _is_interrupted(error):
            return _interrupted()
        if (refusal := _refusal(error)) is None:
            raise
        if _is_full_stream(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        _say_error(refusal)
        return 1


def _open_closed_streams() -> None:
    """Open standard streams that were closed (`>&-`), as in some daemons. Otherwise a socket would take the number of
    one, and get what others write there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 (until the end)


def _interrupted() -> int:
    from quire import logs

    if sys.stderr.isatty():
        print(file=sys.stderr)  # the terminal has written ^C
    logs.say("interrupted")
    return INTERRUPTED


def _say_error(error: QuireError) -> None:
    import logging

    from quire import logs

    logs.say(error.message, logging.ERROR, code=error.code)


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error. During an import it becomes an error of the imported library."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_full_stream(error: Exception) -> bool:
    """Whether a write to a full non-blocking stream failed. Its error number is also that of a refused process."""
    return isinstance(error, BlockingIOError) and hasattr(error, "characters_written")


def _refusal(error: Exception) -> QuireError | None:
    """The error about a resource that the system refused; None: it is another error, perhaps a defect of Quire."""
    if _is_full_stream(error):
        return QuireError("Standard output is full and does not wait", fix="Write to a file, or to a pipe that blocks")
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno if isinstance(error, OSError) else None
    if number not in _REFUSALS:
        return None
    what, fix = _REFUSALS[number]
    return QuireError(f"The system refuses {what}", fix=fix)


if __name__ == "__main__":
    sys.exit(main())
