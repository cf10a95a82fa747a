"""The installs of `make run` and `make test`: the build of torch, the notice before a download, and nothing more."""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import install

ROOT = Path(__file__).parents[2]


class _Pip:
    """Stands in for pip: its arguments, and the packages that it would bring."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.asked: list[list[str]] = []

    def run(self, arguments: list[str], environment: dict[str, str] | None = None) -> None:
        self.asked.append(list(arguments))

    def plan(self, arguments: list[str]) -> list[str]:
        return self.urls


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Pip:
    wheel = tmp_path / "a wheel.whl"
    wheel.write_bytes(bytes(2_500_000))
    pip = _Pip([wheel.as_uri()])
    monkeypatch.setattr(install, "pip", pip.run)
    monkeypatch.setattr(install, "planned_urls", pip.plan)
    return pip


@pytest.fixture
def address() -> Iterator[str]:
    """A server on this machine: /size has 3,000,000 bytes, /slow never answers, /missing is not there."""
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/slow":
                released.wait(30)
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("Content-Length", "0" if self.command == "GET" else "3000000")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    released.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("wish", "system", "has_gpu", "index", "arguments", "why"),
    [
        ("", "Linux", False, True, ["torch==2.13.0+cpu", "--extra-index-url", install.CPU_INDEX], "no NVIDIA GPU here"),
        ("", "Linux", False, False, ["torch==2.13.0"], "did not answer within 2 s"),
        ("", "Linux", True, True, ["torch==2.13.0"], "has an NVIDIA GPU"),
        ("", "Darwin", False, True, ["torch==2.13.0"], "the build for Darwin"),
        ("torch==2.12.0 --no-deps", "Linux", True, True, ["torch==2.12.0", "--no-deps"], "chosen by TORCH"),
        ("'./my wheels/torch.whl'", "Linux", False, False, ["./my wheels/torch.whl"], "chosen by TORCH"),
    ],
)
def test_torch_build(wish: str, system: str, has_gpu: bool, index: bool, arguments: list[str], why: str) -> None:
    chosen, reason = install.torch_arguments(wish, system=system, has_gpu=has_gpu, cpu_index_answers=index)
    assert chosen == arguments
    assert why in reason


def test_index_answers_or_does_not(address: str) -> None:
    assert install.answers(f"{address}/size")
    assert not install.answers(f"{address}/missing")
    assert not install.answers(f"{address}/slow", seconds=0.2)
    assert not install.answers("http://127.0.0.1:9/torch/")


def test_sizes(address: str, tmp_path: Path) -> None:
    wheel = tmp_path / "a wheel.whl"
    wheel.write_bytes(bytes(1_200_000))
    sizes = [install.size_of(url) for url in (f"{address}/size", wheel.as_uri(), f"{address}/missing")]
    assert sizes == [3_000_000, 1_200_000, None]
    assert install.told_size(sizes[:2]) == "2 packages, 4.2 MB"
    assert install.told_size(sizes) == "3 packages, at least 4.2 MB"
    assert install.told_size([2_600_000_000]) == "1 package, 2.6 GB"


def test_size_is_said_before_the_download(
    fake_pip: _Pip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said_before: list[str] = []

    def run(arguments: list[str], environment: dict[str, str] | None = None) -> None:
        said_before.append(capsys.readouterr().out)
        assert "--quiet" not in arguments, "the download's progress is hidden"

    monkeypatch.setattr(install, "pip", run)
    install.install_torch("torch==2.12.0")
    assert said_before == ["Installing torch==2.12.0 (chosen by TORCH; TORCH=... chooses another): 1 package, 2.5 MB\n"]


def test_installed_torch_stays(fake_pip: _Pip, capsys: pytest.CaptureFixture[str]) -> None:
    install.install_torch("")
    assert "is installed. TORCH=... installs another." in capsys.readouterr().out
    assert not fake_pip.asked


def test_no_compiler(fake_pip: _Pip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environments: list[dict[str, str] | None] = []
    monkeypatch.setattr(install, "pip", lambda arguments, environment: environments.append(environment))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    install.install_quire()
    assert "No C++ compiler found (no-such-compiler)" in capsys.readouterr().out
    assert environments[0] is not None
    assert environments[0]["QUIRE_BUILD_KERNELS"] == "0"


def test_running_needs_no_tools() -> None:
    """`make run` installs Quire and its dependencies; packages for tests and checks are in the extras."""

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}

    dependencies = names(install.project()["dependencies"])
    tools = names(install.extra_requirements("dev"))
    assert "torch" in dependencies
    assert not dependencies & tools
    assert {"pytest", "triton", "transformers", "ruff"} <= tools
    assert "quire" not in tools


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_tools_for_tests_alone() -> None:
    def commands(target: str) -> str:
        done = subprocess.run(
            ["make", "-n", "-B", target, "TORCH=torch==2.12.0"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    run, test = commands("run"), commands("test")
    assert 'tools/install.py --torch "torch==2.12.0"' in run
    assert "--extra" not in run
    assert "--extra test" in test
    assert "--extra dev" not in test


def test_pip_itself_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a wheel in a folder in place of an index."""
    wheel = tmp_path / "quire_nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        folder = "quire_nothing-1.0.dist-info"
        archive.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: quire-nothing\nVersion: 1.0\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    urls = install.planned_urls(["quire-nothing", "--no-index", "--find-links", str(tmp_path)])
    assert urls == [wheel.as_uri()]
    assert install.planned_urls([f"pytest=={pytest.__version__}", "--no-index"]) == []


def test_old_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    monkeypatch.setattr(sys, "argv", ["install.py"])
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or later.*make PYTHON="):
        install.main()
