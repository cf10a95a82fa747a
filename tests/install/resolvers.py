"""Resolvers that ask the package index which versions Quire would be installed with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LINUX, MACOS = "x86_64-unknown-linux-gnu", "aarch64-apple-darwin"


class Resolvers:
    """Processes that choose versions for Quire with all extras, from metadata alone: nothing is downloaded."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        self._started: dict[tuple[str, str], subprocess.Popen[str]] = {}

    def start(self, torch: str, target: str) -> None:
        """Start the resolver for a version of torch and a platform."""
        constraint = Path(self._folder.name) / torch
        constraint.write_text(f"torch=={torch}\n")
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", str(PROJECT), "--no-config", "--quiet"),
            *("--all-extras", "--no-header", "--no-annotate", "--constraints", str(constraint)),
            *("--python-platform", target, "--python-version", "3.12"),
        ]
        # The oldest macOS that torch 2.13 has wheels for.
        environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
        self._started[torch, target] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def take(self, torch: str, target: str) -> subprocess.Popen[str]:
        """The resolver for this case, which is started now if it was not before."""
        if (torch, target) not in self._started:
            self.start(torch, target)
        return self._started[torch, target]

    def close(self) -> None:
        """End the resolvers whose test another process has run."""
        for resolver in self._started.values():
            if resolver.returncode is None:
                resolver.kill()
                resolver.communicate()
        self._folder.cleanup()
