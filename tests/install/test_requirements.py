"""The dependencies of each extra resolve beside every torch that Quire runs on, as the package index publishes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a resolver says when the index cannot be reached.
UNREACHABLE = ("Failed to fetch", "Could not connect", "dns error", "Network connectivity is disabled")


def _resolve(torch: str, target: str, folder: Path) -> dict[str, str]:
    """Versions by name that a resolver chooses for Quire with all its extras, from metadata alone: nothing is
    downloaded. Skips without an index."""
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch=={torch}\n")
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml"), "--no-config", "--quiet"),
        *("--no-header", "--no-annotate", "--all-extras", "--constraints", str(constraint)),
        *("--python-platform", target, "--python-version", "3.12"),
    ]
    # The oldest macOS that torch 2.13 has wheels for.
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip("the package index does not answer")
    assert not done.returncode, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


@pytest.mark.parametrize(("torch", "triton"), [("2.11.0", "3.6.0"), ("2.12.0", "3.7.0"), ("2.13.0", "3.7.1")])
def test_linux(torch: str, triton: str, tmp_path: Path) -> None:
    """The index has CUDA builds, each of which pins its Triton."""
    versions = _resolve(torch, "x86_64-unknown-linux-gnu", tmp_path)
    assert (versions["torch"], versions["triton"]) == (torch, triton)


def test_macos(tmp_path: Path) -> None:
    versions = _resolve("2.13.0", "aarch64-apple-darwin", tmp_path)
    assert versions["torch"] == "2.13.0"
    assert "triton" not in versions
