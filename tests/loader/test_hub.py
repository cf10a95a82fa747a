"""Names become folders: local paths, downloads from a small local hub, the cache without a network, clear errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire.errors import ConfigError, ModelConfigError
from quire.loader.hub import resolve_model, resolve_tokenizer_files
from tests.loader.local_hub import Hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 300_000,
    "consolidated.safetensors": b"second copy",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
    "modeling_evil.py": b"open('canary', 'w')",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"third copy",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(FILES) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(model_folder(tmp_path / "mine"))) == tmp_path / "mine"


def test_a_relative_folder_that_looks_like_a_hub_id_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")


def test_download_takes_only_what_is_read_and_reports_progress(hub: Hub, tmp_path: Path) -> None:
    reports: list[tuple[str, float, str]] = []
    folder = resolve_model("small/model", download_dir=str(tmp_path), progress=lambda *report: reports.append(report))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert files == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert not any(".bin" in path or ".py" in path or ".pt" in path for path in hub.paths)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert reports
    assert {phase for phase, _, _ in reports} == {"download"}
    assert all(0 <= fraction <= 1 for _, fraction, _ in reports)
    assert reports[-1][1] == 1.0


def test_without_weights_none_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    folder = resolve_model("small/model", download_dir=str(tmp_path), weights=False)
    assert (folder / "config.json").is_file()
    assert not (folder / "model.safetensors").exists()


def test_a_downloaded_model_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model("small/model", download_dir=str(tmp_path))
    go_offline(monkeypatch)
    hub.paths.clear()
    assert resolve_model("small/model", download_dir=str(tmp_path)) == first
    assert not hub.paths


def test_a_second_start_downloads_no_file_again(hub: Hub, tmp_path: Path) -> None:
    resolve_model("small/model", download_dir=str(tmp_path))
    hub.paths.clear()
    resolve_model("small/model", download_dir=str(tmp_path))
    assert not [path for path in hub.paths if path.startswith("GET") and "/resolve/" in path]


def test_tokenizer_files_only(hub: Hub, tmp_path: Path) -> None:
    folder = resolve_tokenizer_files("small/model", download_dir=str(tmp_path))
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "model.safetensors").exists()


def failure(name: str, **arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, **arguments)
    return str(caught.value)


def test_unknown_hub_id(hub: Hub, tmp_path: Path) -> None:
    assert "No folder and no model on the hub" in failure("nobody/nothing", download_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-06b", "Qwn/Qwen3-0.6B"])
def test_a_name_like_one_in_the_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error names it, whether the hub can be asked or not, and gives the form of a hub id."""
    for cached in ("models--Qwen--Qwen3-0.6B", "models--google--gemma-3-1b-it", "datasets--x--qwen3", "models--gpt2"):
        (tmp_path / cached).mkdir()
    for _ in range(2):
        message = failure(name, download_dir=str(tmp_path))
        assert "owner/name" in message
        assert message.lower().endswith("did you mean qwen/qwen3-0.6b?")
        go_offline(monkeypatch)


def test_a_right_name_beside_a_like_one(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network a name cannot be checked, so the error also says how to get the model."""
    (tmp_path / "models--Qwen--Qwen3-0.6B-Base").mkdir()
    go_offline(monkeypatch)
    message = failure("Qwen/Qwen3-0.6B", download_dir=str(tmp_path))
    assert "`hf download Qwen/Qwen3-0.6B`" in message
    assert message.endswith("Or did you mean Qwen/Qwen3-0.6B-Base?")


def test_the_name_of_the_demo_model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        message = failure("quire-demo", download_dir=str(tmp_path))
        assert message.endswith("`quire serve` without a model serves the bundled demo model.")
        go_offline(monkeypatch)


def test_unknown_revision(hub: Hub, tmp_path: Path) -> None:
    assert "no such revision" in failure("small/model", revision="v9", download_dir=str(tmp_path))


def test_gated_model(hub: Hub, tmp_path: Path) -> None:
    message = failure("small/gated", download_dir=str(tmp_path))
    assert "gated" in message
    assert "HF_TOKEN" in message


def test_offline_and_not_cached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch)
    message = failure("small/model", download_dir=str(tmp_path))
    assert "not completely in the cache" in message
    assert not hub.paths


def test_hub_that_does_not_answer(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "hub cannot be reached" in failure("small/model", download_dir=str(tmp_path))


def test_a_token_is_never_in_the_message(hub: Hub, tmp_path: Path) -> None:
    assert "hf_secret" not in failure("small/gated", token="hf_secret", download_dir=str(tmp_path))


@pytest.mark.parametrize("missing", ["qwen3-0.6", "qwen3-06b"])
def test_a_mistyped_folder_names_the_nearest(tmp_path: Path, missing: str) -> None:
    model_folder(tmp_path / "qwen3-0.6b")
    message = failure(str(tmp_path / missing))
    assert "No such folder" in message
    assert str(tmp_path / "qwen3-0.6b") in message


def test_a_mistyped_relative_folder_names_the_nearest(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "models" / "small")
    monkeypatch.chdir(tmp_path)
    assert "Did you mean models/small?" in failure("models/smal", download_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name", ["", "a\0b", "../x", "/no/such/folder", "~/no-such-folder", "a/b/c", "a b", "org/..", "x/"]
)
def test_an_illegal_name_never_reaches_the_hub(hub: Hub, name: str) -> None:
    failure(name)
    assert not hub.paths


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "The model is a file" in failure(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("weights/config.json", "weights"),
        ("adapter_config.json", "--lora-modules"),
        ("x.gguf", "GGUF"),
        ("a.txt", "a.txt"),
    ],
)
def test_a_folder_without_config(tmp_path: Path, file: str, advice: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with pytest.raises(ModelConfigError, match=r"has no config\.json") as caught:
        resolve_model(str(tmp_path))
    assert advice in str(caught.value)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No tokenizer files"):
        resolve_tokenizer_files(str(model_folder(tmp_path)))


def test_hub_does_not_import_torch() -> None:
    code = "import quire.loader.hub, sys; assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
