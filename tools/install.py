"""Installs Quire into the virtual environment whose interpreter runs this file: what `make run` and `make test` call.

It chooses the build of torch first, because package indexes serve the CUDA build, several gigabytes, to machines that
have no use for it. It says in one line what will be downloaded and how large that is. Standard library only: nothing
is installed yet when it runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
TORCH_VERSION = "2.13.0"
# PyTorch's own index of CPU builds: https://pytorch.org/get-started/locally/
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_TO_ANSWER = 2.0


def has_nvidia_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def answers(url: str, seconds: float = SECONDS_TO_ANSWER) -> bool:
    """Whether `url` answers with success within `seconds`, name resolution included."""
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=seconds):
                answered.set()
        except (OSError, ValueError):
            pass

    # Not joined: the resolver of names knows no time limit.
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(seconds)


def torch_arguments(wish: str, *, system: str, has_gpu: bool, cpu_index_answers: bool) -> tuple[list[str], str]:
    """pip's arguments for torch, and why they were chosen.

    wish: what the user asks for (TORCH=...), in pip's words; empty for the choice made here.
    system: platform.system(); only on Linux do package indexes hold a CUDA build under the plain name.
    """
    if wish:
        return shlex.split(wish), "chosen by TORCH"
    plain = [f"torch=={TORCH_VERSION}"]
    if system != "Linux":
        return plain, f"the build for {system}"
    if has_gpu:
        return plain, "this machine has an NVIDIA GPU"
    if not cpu_index_answers:
        return (
            plain,
            f"no NVIDIA GPU, but PyTorch's index of CPU builds did not answer within {SECONDS_TO_ANSWER:.0f} s",
        )
    return [f"torch=={TORCH_VERSION}+cpu", "--extra-index-url", CPU_INDEX], "the CPU build: no NVIDIA GPU here"


def pip(arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Runs pip with its progress visible; ends this process with pip's code if it fails."""
    done = subprocess.run([sys.executable, "-m", "pip", "install", *arguments], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def planned_urls(arguments: Sequence[str]) -> list[str]:
    """Addresses of what `pip install` would bring for these arguments; pip reads metadata alone for it where it can."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip(["--quiet", "--dry-run", "--report", str(report), *arguments])
        return [item["download_info"]["url"] for item in json.loads(report.read_text())["install"]]


def size_of(url: str) -> int | None:
    """Bytes of the file at a `file:` or `https:` address; None if nobody says."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS_TO_ANSWER) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def told_size(sizes: Sequence[int | None]) -> str:
    """'3 packages, 1.2 GB', with "at least" where a size is not known."""
    known = sum(size or 0 for size in sizes)
    number = f"{known / 1e9:.1f} GB" if known >= 1e9 else f"{max(known / 1e6, 0.1):.1f} MB"
    packages = f"{len(sizes)} package{'s' if len(sizes) != 1 else ''}"
    return f"{packages}, {'at least ' if None in sizes else ''}{number}"


def install(arguments: Sequence[str], what: str) -> None:
    """Says in one line what is brought and how large it is, then installs it. Nothing happens if all of it is there."""
    urls = planned_urls(arguments)
    if not urls:
        return
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(size_of, urls))
    print(f"Installing {what}: {told_size(sizes)}", flush=True)
    pip(arguments)


def install_torch(wish: str) -> None:
    """Installs torch, unless one is there and none is asked for."""
    if not wish:
        try:
            print(f"torch {importlib.metadata.version('torch')} is installed. TORCH=... installs another.", flush=True)
            return
        except importlib.metadata.PackageNotFoundError:
            pass
    system = platform.system()
    has_gpu = has_nvidia_gpu()
    ask = not wish and system == "Linux" and not has_gpu
    arguments, why = torch_arguments(
        wish, system=system, has_gpu=has_gpu, cpu_index_answers=ask and answers(f"{CPU_INDEX}/torch/")
    )
    install(arguments, f"{arguments[0]} ({why}; TORCH=... chooses another)")


def extra_requirements(name: str) -> list[str]:
    """What the extra `name` of pyproject.toml lists, with the extras that it includes."""
    found = []
    for requirement in project()["optional-dependencies"][name]:
        included = requirement.removeprefix("quire[").removesuffix("]") if requirement.startswith("quire[") else None
        found += extra_requirements(included) if included else [requirement]
    return found


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    import tomllib  # of Python 3.11, which main() has checked

    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def install_quire() -> None:
    """Quire itself from this folder, editable, with the compiled kernels where a C++ compiler is there."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    environment = dict(os.environ)
    if shutil.which(compiler):
        print("Compiling the CPU kernels: some minutes. pip shows nothing while it compiles.", flush=True)
    else:
        print(
            f"No C++ compiler found ({compiler}): installing without the compiled kernels. Everything runs on plain "
            "torch, several times slower. Install g++ 12 or clang 15 and run 'make setup' again for full speed.",
            flush=True,
        )
        environment["QUIRE_BUILD_KERNELS"] = "0"
    pip(["--editable", "."], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="", help="what pip shall install as torch, instead of the choice made here")
    parser.add_argument("--extra", help="install what this extra of pyproject.toml lists, and not Quire itself")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever `python3` is runs this file
        sys.exit(
            f"Quire needs Python 3.11 or later, and this is {platform.python_version()}. "
            "Remove the folder .venv and name another one: make PYTHON=python3.11 ..."
        )
    if options.extra:
        install(extra_requirements(options.extra), f"what '{options.extra}' needs")
        return
    pip(["--quiet", "--upgrade", "pip"])
    install_torch(options.torch)
    install_quire()


if __name__ == "__main__":
    main()
