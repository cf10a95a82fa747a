"""Two machines with a network between them: namespaces of Linux. The network can be cut without a word.

Each machine has its own network, loopback interface, host name, /etc/hosts, /dev/shm and folder of caches. Processes
and files are those of this machine, so a test reads a server's Unix socket. Nothing has a name in the system: all ends
with the tests' process, even if it is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

NAMES, ADDRESSES = ("machine-0", "machine-1"), ("10.77.0.1", "10.77.0.2")
NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
NOBODY = "02:00:00:00:00:77"  # the hardware address of no machine
PROGRAMS = ("ip", "nsenter", "setpriv", "tc", "unshare")
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))  # a user's PATH may lack them
# It makes a machine, waits for the end of its input, and then ends.
KEEPER = (
    "mount -t tmpfs none /dev/shm; mount --bind $1 /etc/hosts; hostname $0; ip link set lo up; echo ready; exec cat"
)


class Machine:
    """One machine of two.

    Attributes:
        name: its host name.
        address: its address in the network.
        hosts: its /etc/hosts. Both names stand for their addresses.
        environment: of its processes.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = NAMES[number], ADDRESSES[number]
        self.hosts = folder / f"hosts-of-{self.name}"
        known = {"localhost": "127.0.0.1", **dict(zip(NAMES, ADDRESSES, strict=True))}
        self.hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        caches = {name: str(folder / self.name) for name in ("HF_HOME", "QUIRE_CACHE_DIR", "XDG_CACHE_HOME")}
        self.environment = os.environ | caches | {"PATH": SYSTEM_PATH}
        words = ["unshare", *NAMESPACES, "sh", "-ec", KEEPER, self.name, str(self.hosts)]
        self._keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment)
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n"
        self.pid = self._keeper.pid
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")

    def popen(self, command: Sequence[str], *, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Start a process on this machine. It is killed when the thread ends that has started it."""
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={os.getcwd()}"]
        words = [*enter, "setpriv", "--pdeathsig=KILL", *command]
        return subprocess.Popen(words, env=(env or {}) | self.environment, **options)

    def run(self, *command: str) -> None:
        """Run a command on this machine."""
        with self.popen(command, stdout=subprocess.DEVNULL) as process:
            assert process.wait(10) == 0, command

    def processes(self) -> list[psutil.Process]:
        """The processes of this machine."""
        found = []
        for process in psutil.process_iter():
            if process.pid != self.pid:
                try:
                    is_here = os.readlink(f"/proc/{process.pid}/ns/net") == self._network
                except OSError:
                    continue
                if is_here:
                    found.append(process)
        return found

    def close(self) -> None:
        """End all its processes, and the machine."""
        for process in (left := self.processes()):
            process.kill()
        psutil.wait_procs(left, 10)
        self._keeper.communicate()


class Network:
    """Two machines, and the cable between them."""

    def __init__(self, machines: tuple[Machine, Machine]) -> None:
        self.machines = machines
        ends = [["eth0", "netns", str(machine.pid)] for machine in machines]
        words = ["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]]
        subprocess.run(words, env=machines[0].environment, check=True)
        for machine in machines:
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")

    def cut(self) -> float:
        """Let all packets vanish. Both ends of the cable seem to be in order. Returns the time."""
        for machine in self.machines:
            machine.run("tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole")
        return time.monotonic()

    def mend(self) -> None:
        """Undo `cut`."""
        for machine in self.machines:
            machine.run("tc", "qdisc", "del", "dev", "eth0", "root")

    def divert(self) -> float:
        """Let all packets go to a machine that is not there. Unlike `cut`, the sender's system sees them leave.

        Returns the time.
        """
        for machine, address in zip(self.machines, reversed(ADDRESSES), strict=True):
            machine.run("ip", "neighbour", "replace", address, "lladdr", NOBODY, "nud", "permanent", "dev", "eth0")
        return time.monotonic()

    def lead(self) -> None:
        """Undo `divert`."""
        for machine, address in zip(self.machines, reversed(ADDRESSES), strict=True):
            machine.run("ip", "neighbour", "del", address, "dev", "eth0")

    def unplug(self) -> float:
        """Pull the cable out of machine 1. Returns the time."""
        self.machines[1].run("ip", "link", "set", "eth0", "down")
        return time.monotonic()

    def plug(self) -> None:
        """Undo `unplug`."""
        self.machines[1].run("ip", "link", "set", "eth0", "up")


@contextmanager
def two_machines(folder: Path) -> Iterator[Network]:
    """Skipped where namespaces may not be made. `folder`: for the machines' caches."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]:
        pytest.skip(f"a network of namespaces needs {', '.join(missing)}")
    if subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let the tests make network namespaces")
    with ExitStack() as made:
        machines = []
        for number in range(2):
            machines.append(Machine(number, folder))
            made.callback(machines[-1].close)
        yield Network((machines[0], machines[1]))
