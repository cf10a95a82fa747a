"""The dependencies of each extra resolve beside every torch that Quire runs on, as the package index publishes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a resolver says when the index cannot be reached.
UNREACHABLE = ("Failed to fetch", "Could not connect", "dns error", "Network connectivity is disabled")


LINUX, MACOS = "x86_64-unknown-linux-gnu", "aarch64-apple-darwin"
TRITON = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1"}  # by the torch that pins it
CASES = [*((torch, LINUX) for torch in TRITON), ("2.13.0", MACOS)]

Resolver = subprocess.Popen[str]


@pytest.fixture(scope="module")
def resolvers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Resolver]]:
    """All at once: most of the time they wait for the index."""
    started = {case: _resolver(*case, tmp_path_factory.mktemp("resolver")) for case in CASES}
    yield started
    for resolver in started.values():
        if resolver.returncode is None:  # another process ran its test
            resolver.kill()
            resolver.communicate()


def _resolver(torch: str, target: str, folder: Path) -> Resolver:
    """Chooses versions for Quire with all its extras, from metadata alone: nothing is downloaded."""
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch=={torch}\n")
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml"), "--no-config", "--quiet"),
        *("--no-header", "--no-annotate", "--all-extras", "--constraints", str(constraint)),
        *("--python-platform", target, "--python-version", "3.12"),
    ]
    # The oldest macOS that torch 2.13 has wheels for.
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _versions(resolver: Resolver) -> dict[str, str]:
    """By name. Skips without an index."""
    out, error = resolver.communicate()
    if resolver.returncode and any(words in error for words in UNREACHABLE):
        pytest.skip("the package index does not answer")
    assert not resolver.returncode, error
    return dict(line.split("==") for line in out.splitlines() if "==" in line)


@pytest.mark.parametrize("torch", TRITON)
def test_linux(torch: str, resolvers: dict[tuple[str, str], Resolver]) -> None:
    """The index has CUDA builds, each of which pins its Triton."""
    versions = _versions(resolvers[torch, LINUX])
    assert (versions["torch"], versions["triton"]) == (torch, TRITON[torch])


def test_macos(resolvers: dict[tuple[str, str], Resolver]) -> None:
    versions = _versions(resolvers["2.13.0", MACOS])
    assert versions["torch"] == "2.13.0"
    assert "triton" not in versions
