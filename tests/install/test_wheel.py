"""`make wheel`: a wheel that needs no compiler and no source tree. It answers a question in an empty environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools" / "wheel.py")
ASK = """
import json, sys
from quire import LLM, SamplingParams, _C
answer = LLM(max_model_len=128, kv_cache_memory_bytes=1 << 22).chat(
    [{"role": "user", "content": "What does len do?"}], SamplingParams(max_tokens=16, temperature=0), use_tqdm=False
)[0].outputs[0].text
print(json.dumps([answer, _C.__file__, _C.isas()]))
"""

pytestmark = pytest.mark.slow


def test_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == quire.__version__


def _ask(python: Path | str, where: Path) -> list[object]:
    words = [str(python), "-c", ASK]
    result = subprocess.run(words, cwd=where, capture_output=True, text=True, check=True, timeout=120)
    answer: list[object] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a C++ compiler")
def test_a_wheel_answers_outside_the_source_tree(tmp_path: Path) -> None:
    for module in ("auditwheel", "wheel"):
        pytest.importorskip(module, reason="in the extra `wheel`")
    subprocess.run([sys.executable, TOOL, "--dest", str(tmp_path)], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel.name == f"quire-{quire.__version__}-{tag}-{tag}-manylinux_2_28_x86_64.whl"
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"quire-{quire.__version__}.dist-info"
    assert {
        f"{metadata}/licenses/{name}" for name in ("LICENSE", "licenses/nanobind.txt", "licenses/robin-map.txt")
    } <= set(names)
    bill = json.loads(zipfile.ZipFile(wheel).read(f"{metadata}/sboms/quire.cdx.json"))
    assert {"nanobind", "robin-map", "marked", "torch"} <= {part["name"] for part in bill["components"]}

    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    # Dependencies come from this environment, without Quire itself: the wheel's own folder comes first.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "empty")}))
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    answer, extension, isas = _ask(python, tmp_path)
    assert str(extension).startswith(str(own))
    here, _, isas_here = _ask(sys.executable, ROOT)
    assert (answer, isas) == (here, isas_here)
    version = subprocess.run([str(python.parent / "quire"), "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"quire {quire.__version__}\n"


@pytest.mark.timeout(600)
def test_a_wheel_without_kernels_fits_every_machine(tmp_path: Path) -> None:
    pytest.importorskip("wheel", reason="in the extra `wheel`")
    subprocess.run(
        [sys.executable, TOOL, "--pure", "--dest", str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert [path.name for path in tmp_path.glob("*.whl")] == [f"quire-{quire.__version__}-py3-none-any.whl"]
