"""Checks that this commit can be released, and builds what is released: `make release`.

It refuses a working tree with changes, and versions that disagree. It runs everything: `make check`, `make test-full`,
`make wheel`, `make docs`. It neither tags nor uploads; at the end it prints what to do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = ("check", "test-full", "wheel", "docs")


def versions(root: Path) -> dict[str, str]:
    """The version that each file names."""
    chart = (root / "deploy" / "helm" / "quire" / "Chart.yaml").read_text(encoding="utf-8")
    package = (root / "src" / "quire" / "__init__.py").read_text(encoding="utf-8")
    cmake = (root / "CMakeLists.txt").read_text(encoding="utf-8")
    found = {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    }
    for name, pattern, text in (
        ("src/quire/__init__.py", r'__version__ = "(.+)"', package),
        ("CMakeLists.txt", r"project\(quire VERSION (\S+)", cmake),
        ("Chart.yaml, version", r"^version: (.+)$", chart),
        ("Chart.yaml, appVersion", r'^appVersion: "(.+)"$', chart),
    ):
        match = re.search(pattern, text, re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def problems(root: Path) -> list[str]:
    """Why this commit is not released."""
    found = []
    status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    if status.stdout:
        found.append(f"the working tree has changes:\n{status.stdout.rstrip()}")
    named = versions(root)
    if len(set(named.values())) > 1:
        found.append("versions disagree: " + ", ".join(f"{name} {version}" for name, version in named.items()))
    version = named["pyproject.toml"]
    if f"## {version}" not in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        found.append(f"CHANGELOG.md has no heading `## {version}`")
    tags = subprocess.run(["git", "tag", "--list", f"v{version}"], cwd=root, capture_output=True, text=True, check=True)
    if tags.stdout.strip():
        found.append(f"v{version} is released already")
    return found


def main(steps: Sequence[str] = STEPS) -> int:
    """The exit code: 0 if all is well."""
    if found := problems(ROOT):
        print("Not released:", *found, sep="\n- ", file=sys.stderr)
        return 1
    for step in steps:
        print(f"== make {step}", flush=True)
        if subprocess.run(["make", step], cwd=ROOT, check=False).returncode:
            print(f"Not released: make {step} failed", file=sys.stderr)
            return 1
    version = versions(ROOT)["pyproject.toml"]
    print(f"Ready. Now: git tag -s v{version} -m 'Quire {version}', push the tag, and upload dist/*.whl and build/site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
