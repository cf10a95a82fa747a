"""`make test-arm`: builds the kernels for ARM64 with a cross compiler and runs their tests in QEMU's user mode, without
an ARM machine and without root. Debian and its derivatives, because ARM64's Python and libraries are Debian's packages.

The emulated CPU has every step of the ladder (csrc/include/quire/isa.h), and the tests take each in turn. Two older
CPUs prove that the steps that they lack are not chosen and not needed. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "arm64"
SYSTEM, SITE = FOLDER / "system", FOLDER / "site"
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1", "libatomic1")
# Later wheels for ARM64 in the package index are CUDA builds. It has what the extension reads tensors with.
TORCH = "torch==2.10.0"
WHEELS = ("numpy", "typing_extensions", "filelock", "sympy", "networkx", "fsspec", "jinja2")  # what torch imports
WHEELS += ("pytest", "pytest-timeout", "pytest-asyncio", "hypothesis", "msgspec", "tqdm", "tokenizers", "safetensors")
TESTS = [f"tests/kernels/test_{name}.py" for name in (
    "activation", "attention", "attention_codes", "experts", "fp8", "grouped", "latent", "linear", "lora", "norm_rope",
    "sampling",
)]  # fmt: skip
LEFT_OUT = (
    # PyTorch's profiler warns of something else, and warnings are errors.
    "tests/kernels/test_grouped.py::test_rows_copy_no_more_than_was_asked_for",
    # QEMU takes the hint for huge pages and does not pass it on.
    "tests/kernels/test_lora.py::test_an_adapter_asks_for_huge_pages",
)
# QEMU's name: the best step. PyTorch's wheels do not run on Armv8.0's CPUs (Cortex-A72).
OLDER = {"neoverse-n1": "neon_dotprod", "a64fx": "neon"}


def run(*command: str | Path, **environment: str) -> None:
    """Run a command here; a failure ends this script."""
    print("+", *command, flush=True)
    done = subprocess.run([str(word) for word in command], check=False, env=os.environ | environment, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(done.returncode)


def output(*command: str, **environment: str) -> str:
    return subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True).stdout


def fetch_system() -> None:
    """Debian's packages for ARM64, unpacked into a folder: no foreign architecture is added to this machine's."""
    state, debs = FOLDER / "apt", FOLDER / "debs"
    for folder in (state / "lists" / "partial", state / "archives" / "partial", debs):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "apt.conf").write_text(
        'APT::Architecture "arm64";\nAPT::Architectures { "arm64"; };\n'
        f'Dir::State "{state}";\nDir::State::status "{state / "status"}";\nDir::Cache "{state}";\n'
        'APT::Sandbox::User "";\n'
    )
    config = {"APT_CONFIG": str(state / "apt.conf")}
    run("apt-get", "update", "-q", **config)
    planned = output("apt-get", "install", "-q", "--no-install-recommends", "--simulate", *DEBIAN, **config)
    names = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
    subprocess.run(["apt-get", "download", "-q", *names], env=os.environ | config, cwd=debs, check=True)
    for package in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, SYSTEM], check=True)


def fetch_wheels(version: str) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", SITE, "--only-binary=:all:", *platforms]
    pip += ["--platform=manylinux2014_aarch64", "--platform=any", "--implementation=cp", f"--python-version={version}"]
    run(*pip, "--no-deps", TORCH)
    run(*pip, *WHEELS)


def build(interpreter: Path) -> None:
    include = SYSTEM / "usr" / "include"
    run(
        "cmake", "-S", ROOT, "-B", FOLDER / "extension", "-G", "Ninja",
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", f"-DCMAKE_CXX_FLAGS=-idirafter {include}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DPython_INCLUDE_DIR={include / interpreter.name}",
    )  # fmt: skip
    run("cmake", "--build", FOLDER / "extension")


def emulate(interpreter: Path, cpu: str, *arguments: str) -> None:
    """Run ARM64's Python on a CPU of QEMU."""
    run(
        "qemu-aarch64", "-cpu", cpu, "-L", SYSTEM, interpreter, *arguments,
        PYTHONPATH=os.pathsep.join(map(str, (ROOT / "src", ROOT, SITE))), PYTHONDONTWRITEBYTECODE="1",
        QUIRE_OTHER_EXTENSION=str(FOLDER / "extension"), OMP_NUM_THREADS="1",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Other arguments are pytest's, in place of the files of tests/kernels and `not slow`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments = parser.parse_known_args()[1] or ["-m", "not slow", *TESTS]
    if missing := [package for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        sys.exit(f"make test-arm needs Debian's packages {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake and ninja
    if not (SYSTEM / "usr" / "bin" / "python3").exists():
        fetch_system()
    interpreter = (SYSTEM / "usr" / "bin" / "python3").resolve()
    if not (SITE / "torch").exists():
        fetch_wheels(interpreter.name.removeprefix("python"))
    build(interpreter)
    pytest = ("-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider")
    pytest += tuple(f"--deselect={test}" for test in LEFT_OUT)
    pytest += ("-p", "tests.other_extension")
    for cpu, best in OLDER.items():
        check = (
            f"from tests import other_extension; from quire.kernels import cpu; assert cpu.isa() == '{best}', cpu.isa()"
        )
        emulate(interpreter, cpu, "-c", check)
        emulate(interpreter, cpu, *pytest, "-m", "not slow", "tests/kernels/test_grouped.py", "-k", "same_bits or rows")
    emulate(interpreter, "max", *pytest, *arguments)


if __name__ == "__main__":
    main()
