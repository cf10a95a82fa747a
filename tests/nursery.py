"""Starts programs of Python as forks of processes that have imported their modules already, which is most of a start.

A nursery is such a process. It forks on order and knows nothing about its children's work. A child belongs to the
process that ordered it: it has the descriptors, variables, folder, session, group and CPUs that subprocess.Popen was
asked for, and the program runs as `__main__`. It has a nursery of its own for the processes that it starts itself, as
`quire serve` starts its engines. Two kinds of programs are started as users start them: those that read a variable
while they are imported (Popen sees to it), and those whose interpreter's start is tested (the test sees to it).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict

ROOT = Path(__file__).parents[1]
# They limit their own memory, in which torch would not have room.
BOUNDED = ("quire.frontend.render_process", "quire.frontend.grammar_process")
# The imports of the API process and the commands, and of an engine without a model.
LIGHT = (
    "tests.one_parser",
    "quire.cli.serve",
    "quire.cli.chat",
    "quire.cli.explain",
    "quire.entry.serve",
    "quire.entry.async_llm",
    "quire.engine.process",
    "quire.engine.deterministic",
    "quire.engine.bring_up",
    *BOUNDED,
)
# And what one with a model does. This nursery is a child of the other one.
WITH_TORCH = ("quire.engine.start", "quire.engine.ranks", "quire.engine.rank_orders", "quire.entry.llm")
# Variables that are read while these are imported. Who has others than the nursery starts as an interpreter.
READ_BY_LIGHT = re.compile("PYTHON|LD_")
READ_WITH_TORCH = re.compile("PYTHON|LD_|OMP_|MKL_|TRITON|QUIRE_(ISA|FORCE_REFERENCE|NUM_THREADS)")
NAME = b"nursery"  # of a nursery among processes

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MAX_ORDER_BYTES, _MAX_DESCRIPTORS = 1 << 17, 64
_ADOPTION_SECONDS = 10.0
_FIRST_FREE = 100  # descriptors from here on are nobody's, unless a child was given some
_libc = ctypes.CDLL(None)
_Popen, _INTERPRETER = subprocess.Popen, sys.executable  # whatever tests put in their places
# A process that waits for a child adopts orphans of others meanwhile. A nursery may be a child of another one.
_is_ordering = threading.RLock()


def words_of(module: str) -> tuple[str, str]:
    """The words after `python -P` that run a module of the tests. With -P, `-m` does not look in the working folder."""
    run = f"runpy.run_module({module!r}, run_name='__main__')"
    return "-c", f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); {run}"


class Order(TypedDict):
    """The descriptors come beside it, in the order of `numbers`."""

    arguments: list[str]  # of the interpreter
    environment: dict[str, str]
    folder: str
    numbers: list[int]
    parent: int
    has_session: bool
    group: int  # -1: its parent's
    cpus: list[int]  # on which it may run


class Nursery:
    """Of whoever orders.

    Args:
        modules: what a process imports that is started at the first order.
        variables: names of variables that the imports depend on.
        channel: leads to a process that is there, with the imports of this one.
        popen: starts the process; of another nursery, it has the imports of that one.
    """

    def __init__(
        self,
        modules: Sequence[str],
        variables: re.Pattern[str],
        channel: socket.socket | None = None,
        popen: type[subprocess.Popen[Any]] = _Popen,
    ) -> None:
        self._modules, self._variables, self._channel, self._popen = modules, variables, channel, popen
        self._environment = dict(os.environ)

    def starts_alike(self, environment: Mapping[str, str]) -> bool:
        """Whether the imports here would be the same with these variables."""
        names = filter(self._variables.match, {**environment, **self._environment})
        return all(environment.get(name) == self._environment.get(name) for name in names)

    def fork(self, order: Order, descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process."""
        with _is_ordering:
            channel = self._channel = self._channel or self._start()
            ours, theirs = os.pipe()
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                try:
                    socket.send_fds(channel, [json.dumps(order).encode()], [*descriptors, theirs])
                finally:
                    os.close(theirs)
                # It ends when the child runs, and also when the child was killed before.
                with open(ours, "rb") as answer:
                    if not (number := answer.read()):
                        raise OSError("the nursery has ended")
                return int(number)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [_INTERPRETER, __file__, str(theirs.fileno())]
            process = self._popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=ROOT, env=self._environment
            )
        ours.send(" ".join(self._modules).encode())
        atexit.register(process.wait)
        atexit.register(ours.close)  # first, and the process ends
        return ours


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen, whose children come from a nursery if they are programs of this interpreter."""

    nursery: Nursery

    @staticmethod
    def is_served(module: str | None) -> bool:
        """Whether the nursery has children of this module, or, for None, of a script."""
        return module not in BOUNDED

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
    ) -> None:
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, has_session, group = rest
        environment = os.environ if env is None else env
        arguments = [] if isinstance(args, (str, bytes)) else list(map(os.fsdecode, args))
        is_served = arguments[:1] == [_INTERPRETER] and not (preexec_fn or shell or executable)
        if is_served:
            kind, *words = arguments[1 + (arguments[1] == "-P") :]
            is_served = (kind in ("-m", "-c") or kind[0] != "-") and self.is_served(words[0] if kind == "-m" else None)
        if not (is_served and self.nursery.starts_alike(environment)):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
            )
            return
        standard = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        order = Order(
            arguments=arguments[1:],
            environment=dict(environment),
            folder=os.fspath(cwd or os.getcwd()),
            numbers=[0, 1, 2, *pass_fds],
            parent=os.getpid(),
            has_session=has_session,
            group=group,
            cpus=sorted(os.sched_getaffinity(0)),
        )
        self.pid = self.nursery.fork(order, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class LightPopen(Popen):
    nursery = Nursery(LIGHT, READ_BY_LIGHT)

    @staticmethod
    def is_served(module: str | None) -> bool:
        return True


class TorchPopen(Popen):
    nursery = Nursery(WITH_TORCH, READ_WITH_TORCH, popen=LightPopen)


class BoundedPopen(Popen):
    """For processes that run templates and grammars. Everything else is started as an interpreter."""

    nursery = LightPopen.nursery

    @staticmethod
    def is_served(module: str | None) -> bool:
        return module in BOUNDED


def serve(channel: socket.socket) -> tuple[Order, list[int]]:
    """Fork children until the orderer is gone. Returns in each child, with its order.

    The last descriptor is a pipe on which the orderer gets the process id. The child closes it when it runs.
    """
    _libc.prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _MAX_ORDER_BYTES, _MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        # A child whose parent ends is adopted by the nearest of its ancestors that wishes it, who is the orderer.
        middle = os.fork()
        if middle == 0:
            if (child := os.fork()) > 0:
                os.write(descriptors[-1], str(child).encode())
                os._exit(0)
            channel.close()
            return json.loads(data), descriptors
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def run(order: Order, descriptors: list[int]) -> NoReturn:
    """Become the ordered program, and report it by closing the last descriptor."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != order["parent"]:
        if time.monotonic() > deadline:  # the orderer has ended
            os._exit(1)
        time.sleep(0.0002)
    arguments = order["arguments"]
    words = [word for word in arguments[:3] if word != "-P"]
    name = words[1] if words[0] == "-m" else Path(words[0]).stem
    _libc.prctl(_PR_SET_NAME, name.encode()[-15:], 0, 0, 0)  # the kernel keeps 15 bytes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    os.sched_setaffinity(0, order["cpus"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    if order["has_session"]:
        os.setsid()
    elif order["group"] >= 0:
        os.setpgid(0, order["group"])
    free = max(_FIRST_FREE, *order["numbers"]) + 1
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    *high, answer = high
    for number, descriptor in zip(order["numbers"], high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["has_session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_standard_streams()
    if name not in (*BOUNDED, NAME.decode()):
        _make_own_nursery(answer, free)
    os.close(answer)
    _end(_run_main(arguments))


def _open_standard_streams() -> None:
    """As the interpreter opens them at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(  # noqa: SIM115
            number,
            "w" if number else "r",
            buffering=1 if name == "stderr" or os.isatty(number) else -1,
            errors="backslashreplace" if name == "stderr" else None,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _make_own_nursery(answer: int, free: int) -> None:
    """For the processes that this program starts. It has to be made while there is one thread.

    Args:
        answer: a descriptor that is not the nursery's.
        free: see _high.
    """
    ours, theirs = (_high(end, free) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    if os.fork() == 0:
        os.close(answer)
        ours.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, free)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        order, descriptors = serve(theirs)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run(order, descriptors)
    theirs.close()
    kind = TorchPopen if "torch" in sys.modules else LightPopen
    subprocess.Popen = type("Popen", (kind,), {"nursery": Nursery((), READ_WITH_TORCH, ours)})  # type: ignore[misc]


def _high(low: socket.socket, free: int) -> socket.socket:
    """The same with a number that no program counts on: from `free` on descriptors are nobody's."""
    with low:
        return socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, free))


def _run_main(arguments: list[str]) -> int:
    """Run the program -> its exit code."""
    is_safe = arguments[0] == "-P"
    kind, *words = arguments[is_safe:]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if kind == "-m":
            spec = importlib.util.find_spec(words[0])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{words[0]}.__main__")
            assert spec is not None, words[0]
            folder, code = os.getcwd(), spec.loader.get_code(spec.name)  # type: ignore[union-attr]
            main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
            sys.argv = [str(spec.origin), *words[1:]]
        elif kind == "-c":
            folder, code, sys.argv = "", compile(words[0], "<string>", "exec"), ["-c", *words[1:]]
        else:
            folder, code = str(Path(kind).parent), compile(Path(kind).read_bytes(), kind, "exec")
            main.__file__, sys.argv = kind, [kind, *words]
        if not is_safe:
            sys.path.insert(0, folder)
        exec(code, vars(main))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but without unloading its modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def main() -> None:
    sys.path[0] = str(ROOT)
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # see quire.engine.process
    for module in channel.recv(_MAX_ORDER_BYTES).decode().split():
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    del sys.path[0]
    order, descriptors = serve(channel)
    run(order, descriptors)


if __name__ == "__main__":
    main()
