"""`quire collect-env`: the facts for a bug report, and no secret."""

from __future__ import annotations

import pytest

from quire import __version__, extension
from quire.cli import collect_env
from quire.cli.main import main


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "do-not-show")
    monkeypatch.setenv("HF_TOKEN", "do-not-show")
    monkeypatch.setenv("QUIRE_SOME_SECRET", "do-not-show")
    monkeypatch.setenv("QUIRE_NUM_THREADS", "1")
    assert main(["collect-env"]) == 0
    output = capsys.readouterr().out
    for title in ("Software", "Machine", "Kernels", "Disk", "Environment variables"):
        assert f"{title}\n" in output
    lines = dict(line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  "))
    assert lines["quire"].strip() == __version__
    assert lines["QUIRE_NUM_THREADS"] == "1"
    assert lines["VLLM_API_KEY"] == lines["HF_TOKEN"] == lines["QUIRE_SOME_SECRET"] == "set"
    assert "do-not-show" not in output
    for word in ("processor", "memory", "torch", "model"):
        assert word in lines


def test_why_the_kernels_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "C", None)
    monkeypatch.setattr(extension, "WHY_NOT", "installed without a C++ compiler")
    assert "not built: installed without a C++ compiler; everything runs on plain torch" in collect_env.report()
    assert extension.chosen_isa() == "torch"


def test_kernels_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if extension.C is None:
        pytest.skip("the kernels are not built")
    monkeypatch.setenv("QUIRE_FORCE_REFERENCE", "1")
    assert "not used: QUIRE_FORCE_REFERENCE is set" in collect_env.report()


def test_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    others = ("HF_", "PYTHON", "OMP_", "MKL_", "CUDA_", "NO_COLOR", "FORCE_COLOR", "TERM", "NOTIFY_SOCKET")
    for name in list(os.environ):
        if name.startswith(("VLLM_", "QUIRE_", *others)):
            monkeypatch.delenv(name)
    assert collect_env.report().splitlines()[-1].split() == ["none", "is", "set"]
