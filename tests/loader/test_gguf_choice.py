"""Which file `--model` and `--gguf-file` mean: in folders, on a small local hub, without a network; clear errors."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

import quire.demo
from quire.cli.main import main
from quire.errors import ConfigError, WeightsError
from quire.gguf.file import is_gguf, open_gguf
from quire.loader import gguf_choice, gguf_headers
from quire.loader.gguf_choice import find_gguf
from quire.loader.hub import resolve_model
from quire.model_config import load_model_config
from tests.gguf.raw import F32_TENSOR, U16, Raw, number, pair, tensor
from tests.gguf.writing import write_gguf
from tests.loader.local_hub import BUFFER_BYTES, Hub

GGUF = b"GGUF" + bytes(20)
NAMES = (
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.q8_0.gguf",
    "model-F16.gguf",
    "model-BF16.gguf",
    "mmproj-model-F16.gguf",
    "README.md",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_bytes(GGUF)
    for part in (1, 2):
        (tmp_path / "big").mkdir(exist_ok=True)
        (tmp_path / "big" / f"model-Q6_K-{part:05}-of-00002.gguf").write_bytes(GGUF)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q4_k_s", "model-Q4_K_S.gguf"),
        ("Q8_0", "model.q8_0.gguf"),
        ("F16", "model-F16.gguf"),
        ("bf16", "model-BF16.gguf"),
        ("Q6_K", "big/model-Q6_K-00001-of-00002.gguf"),
    ],
)
def test_a_type_behind_a_folder(wanted: str, name: str, folder: Path) -> None:
    assert find_gguf(f"{folder}:{wanted}", None) == folder / name


def failure(model: str | None, gguf_file: str | None = None, **arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find_gguf(model, gguf_file, **arguments)
    return caught.value


def test_a_type_that_is_not_there_lists_those_that_are(folder: Path) -> None:
    message = failure(f"{folder}:Q5_K_M").message
    assert "no GGUF model of type Q5_K_M" in message
    assert "BF16, F16, Q4_K_M, Q4_K_S, Q6_K, q8_0" in message
    assert "no GGUF model of type Q4_K" in failure(f"{folder}:Q4_K").message


def test_a_folder_with_several_models(folder: Path) -> None:
    assert f"{folder}:Q4_K_M" in failure(str(folder)).message


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").write_bytes(GGUF)
    assert find_gguf(str(tmp_path), None) == tmp_path / "only.gguf"


def test_a_folder_of_a_checkpoint_stays_one(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert find_gguf(str(folder), None) is None
    assert find_gguf(f"{folder}:Q8_0", None) == folder / "model.q8_0.gguf"


def test_two_models_of_one_type(folder: Path) -> None:
    (folder / "other-Q4_K_M.gguf").write_bytes(GGUF)
    message = failure(f"{folder}:Q4_K_M").message
    assert "several GGUF models of type Q4_K_M" in message
    assert "--gguf-file model-Q4_K_M.gguf" in message


def test_files_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model-F16.gguf"
    assert find_gguf(str(path), None) == path
    assert find_gguf(None, str(path)) == path
    assert find_gguf(str(folder), "model-F16.gguf") == path
    assert find_gguf("some/hub-id", str(path)) == path, "a path needs no repository"
    assert find_gguf(str(path.rename(folder / "no-suffix")), None) == folder / "no-suffix", "the suffix does not matter"


def test_files_that_are_none(folder: Path) -> None:
    (folder / "text.gguf").write_text("text")
    assert "is not a GGUF file" in failure(str(folder / "text.gguf")).message
    assert "is not a GGUF file" in failure(None, str(folder / "text.gguf")).message
    assert "no such file" in failure(None, str(folder / "nothing.gguf")).message
    assert "model-F16.gguf" in failure(str(folder), "nothing.gguf").message


@pytest.mark.parametrize("model", [None, "", "org/model", "org/model:latest", "./missing:Q4_K_M_x y"])
def test_names_that_mean_no_gguf(model: str | None) -> None:
    assert find_gguf(model, None) is None


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "No such folder" in failure(f"{tmp_path}/none:Q4_K_M").message


@pytest.mark.parametrize("name", ["~nosuchuser/x.gguf", "~nosuchuser/x:Q4_K_M", "x" * 300, "x" * 300 + ":Q4_K_M"])
def test_paths_that_cannot_be_looked_for(name: str) -> None:
    assert "cannot be checked" in failure(name).message
    assert "cannot be checked" in failure(None, name).message
    with pytest.raises(ConfigError, match="cannot be checked"):
        resolve_model(name)


@pytest.mark.parametrize("refused", ["open", "is_file"])
def test_a_file_that_cannot_be_read(refused: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model-F16.gguf"

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, refused, refuse)
    for read in (is_gguf, open_gguf):
        with pytest.raises(WeightsError, match="cannot be read: Permission denied"):
            read(path)


def test_a_folder_without_config_names_the_way() -> None:
    with pytest.raises(ConfigError, match="No such folder"):
        resolve_model("./none")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    split = {f"big/model-Q6_K-{part:05}-of-00002.gguf": GGUF for part in (1, 2)}
    with Hub(dict.fromkeys(NAMES, GGUF) | split) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.gguf")}


@pytest.mark.parametrize("wanted", ["Q4_K_M", "q4_k_m"])
def test_only_the_wanted_file_is_downloaded(wanted: str, hub: Hub, tmp_path: Path) -> None:
    reports: list[tuple[str, float, str]] = []
    path = find_gguf(
        f"small/model:{wanted}", None, download_dir=str(tmp_path), progress=lambda *report: reports.append(report)
    )
    assert path is not None
    assert path.read_bytes() == GGUF
    assert files_below(tmp_path) == {"model-Q4_K_M.gguf"}
    assert reports[-1][:2] == ("download", 1.0)


def test_all_parts_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    path = find_gguf("small/model:Q6_K", None, download_dir=str(tmp_path))
    assert path is not None
    assert path.name == "model-Q6_K-00001-of-00002.gguf"
    assert len(files_below(tmp_path)) == 2


def test_two_models_of_one_type_are_noticed_before_the_download(hub: Hub, tmp_path: Path) -> None:
    hub.files = {**hub.files, "other-Q4_K_M.gguf": GGUF}
    message = failure("small/model:Q4_K_M", download_dir=str(tmp_path)).message
    assert "several GGUF models of type Q4_K_M" in message
    assert not files_below(tmp_path)


def test_a_name_with_brackets(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"[a] model-Q4_0.gguf": GGUF, "a model-Q8_0.gguf": GGUF}
    path = find_gguf("small/model:Q4_0", None, download_dir=str(tmp_path))
    assert path is not None
    assert files_below(tmp_path) == {"[a] model-Q4_0.gguf"}


def test_a_hub_that_does_not_answer(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path)) == first


def test_a_file_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    path = find_gguf("small/model", "model.q8_0.gguf", download_dir=str(tmp_path))
    assert path is not None
    assert files_below(tmp_path) == {"model.q8_0.gguf"}
    other = find_gguf("small/model", "big/model-Q6_K-00002-of-00002.gguf", download_dir=str(tmp_path))
    assert other is not None
    assert len(files_below(tmp_path)) == 3


def test_a_repository_without_the_type(hub: Hub, tmp_path: Path) -> None:
    message = failure("small/model:Q2_K", download_dir=str(tmp_path)).message
    assert "BF16, F16, Q4_K_M, Q4_K_S, Q6_K, q8_0" in message
    assert "model-Q4_K_M.gguf" in failure("small/model", "nothing.gguf", download_dir=str(tmp_path)).message
    assert not files_below(tmp_path)


def test_without_a_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.paths.clear()
    assert find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path)) == first
    assert "F16" not in failure("small/model:F16", download_dir=str(tmp_path)).message.split("Expected")[1]
    assert not hub.paths


def test_a_plan_reads_the_header_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In several requests if need be; its numbers are the whole file's, and the file is not kept."""
    whole = tmp_path / "whole" / "demo-Q8_0.gguf"
    whole.parent.mkdir()
    factors = {"rope_freqs.weight": np.linspace(1.0, 4.0, 32)}
    write_gguf(whole, quire.demo.path("target"), "Q8_0", tensors=factors)
    hub.files = {whole.name: whole.read_bytes()}
    monkeypatch.setattr(gguf_headers, "FIRST_BYTES", 1000)
    words = ["plan", "--json", "--device", "cpu", "--memory", "8GiB"]
    assert main([*words, "small/model:Q8_0", "--download-dir", str(tmp_path / "cache")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    assert main([*words, str(whole)]) == 0
    (expected,) = json.loads(capsys.readouterr().out)["models"]
    assert found | {"name": ""} == expected | {"name": ""}
    assert hub.num_bytes < whole.stat().st_size / 8
    assert not files_below(tmp_path / "cache")
    header = find_gguf("small/model", whole.name, weights=False)
    assert header is not None
    assert header.stat().st_size == whole.stat().st_size
    assert replace(load_model_config(header), model="") == replace(load_model_config(whole), model="")


@pytest.mark.parametrize("name", ["demo-Q8_0-00001-of-00000.gguf", "demo-Q8_0-00001-of-99999.gguf"])
def test_counts_of_parts_that_cannot_be(name: str, hub: Hub, tmp_path: Path) -> None:
    """Such a file is downloaded and refused like any other."""
    hub.files = {name: Raw().build()}
    header = find_gguf("small/model", name, download_dir=str(tmp_path), weights=False)
    assert header is not None
    with pytest.raises(WeightsError, match="Part"):
        open_gguf(header)


def test_parts_are_spelled_as_the_first(hub: Hub, tmp_path: Path) -> None:
    names = [f"Demo-Q8_0-{number:05}-OF-00002.GGUF" for number in (1, 2)]
    hub.files = {name: Raw().build() for name in names}
    header = find_gguf("small/model", names[0], download_dir=str(tmp_path), weights=False)
    assert header is not None
    assert sorted(path.name for path in header.parent.iterdir()) == names


def test_a_header_that_cannot_be_read_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is downloaded, and a line says so."""
    hub.files = {"a-F32.gguf": Raw().build()}

    def fails(*_: object) -> Path:
        raise OSError("429 Too Many Requests")

    monkeypatch.setattr(gguf_choice, "fetch_headers", fails)
    found = find_gguf("small/model", "a-F32.gguf", download_dir=str(tmp_path), weights=False)
    assert found is not None
    assert found.is_relative_to(tmp_path)
    assert "429 Too Many Requests): the file is downloaded" in caplog.text


def test_numbers_of_the_configuration_behind_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fetched by themselves; weights are a hole."""
    tensors = [
        tensor("token_embd.weight", (1024, 16), F32_TENSOR, 0),
        tensor("rope_freqs.weight", (4,), F32_TENSOR, 1 << 16),
    ]
    hub.files = {"a-F32.gguf": Raw(tensors=tensors, data=b"\1" * ((1 << 16) + 16)).build()}
    monkeypatch.setattr(gguf_headers, "FIRST_BYTES", 500)
    header = find_gguf("small/model:F32", None, weights=False)
    assert header is not None
    file = open_gguf(header)
    assert file.read(file.tensors["rope_freqs.weight"]) == b"\1" * 16
    assert set(file.read(file.tensors["token_embd.weight"])[500:]) == {0}
    assert hub.num_bytes == 500 + 16


@pytest.mark.parametrize("first_bytes", [40, 8 << 20])
def test_a_hub_that_knows_no_ranges(first_bytes: int, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends whole files: of them as much is read as the header takes, whether or not that is known at first."""
    connect = socket.create_connection

    def connect_with_a_small_buffer(*args: Any, **kwargs: Any) -> socket.socket:
        connection = connect(*args, **kwargs)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_with_a_small_buffer)
    near, weights = b"\1" * 16, bytes(64 << 20)
    tensors = [
        tensor("rope_freqs.weight", (4,), F32_TENSOR, 0),
        tensor("token_embd.weight", (1 << 12, 1 << 12), F32_TENSOR, 32),
    ]
    whole = Raw(tensors=tensors, data=near + bytes(16) + weights).build()
    hub.files, hub.chunk_bytes, hub.knows_ranges = {"a-F32.gguf": whole}, BUFFER_BYTES, False
    monkeypatch.setattr(gguf_headers, "FIRST_BYTES", first_bytes)
    header = find_gguf("small/model:F32", None, weights=False)
    assert header is not None
    assert header.stat().st_size == len(whole)
    file = open_gguf(header)
    assert file.read(file.tensors["rope_freqs.weight"]) == near
    num_requests = sum(path.startswith("GET ") and "/resolve/" in path for path in hub.paths)
    in_buffers = 16 * BUFFER_BYTES  # at most: the system doubles both sides', and each is at work on a piece or two
    assert hub.num_bytes < num_requests * (first_bytes + in_buffers), "more is read than the header takes"


def test_numbers_behind_weights_of_a_hub_that_knows_no_ranges(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As much as a header may have is read over; behind that the file is downloaded."""
    tensors = [
        tensor("token_embd.weight", (1024, 16), F32_TENSOR, 0),
        tensor("rope_freqs.weight", (4,), F32_TENSOR, 1 << 16),
    ]
    whole = Raw(tensors=tensors, data=bytes(1 << 16) + b"\1" * 16).build()
    hub.files, hub.knows_ranges = {"a-F32.gguf": whole}, False
    monkeypatch.setattr(gguf_headers, "FIRST_BYTES", 500)
    for limit, is_kept in ((1 << 20, False), (1 << 12, True)):
        monkeypatch.setattr(gguf_headers, "MAX_HEADER_BYTES", limit)
        header = find_gguf("small/model:F32", None, download_dir=str(tmp_path), weights=False)
        assert header is not None
        file = open_gguf(header)
        assert file.read(file.tensors["rope_freqs.weight"]) == b"\1" * 16
        assert header.is_relative_to(tmp_path) == is_kept
        assert ("sends no parts of files): the file is downloaded" in caplog.text) == is_kept


def test_headers_of_all_parts(hub: Hub) -> None:
    def part(number_: int) -> bytes:
        pairs = [pair("split.no", U16, number("H", number_)), pair("split.count", U16, number("H", 2))]
        return Raw(pairs=pairs, tensors=[tensor(f"t{number_}", (4,), F32_TENSOR, 0)], data=bytes(16)).build()

    hub.files = {f"big/m-Q8_0-{i + 1:05}-of-00002.gguf": part(i) for i in range(2)}
    for model, file in (("small/model:Q8_0", None), ("small/model", "big/m-Q8_0-00002-of-00002.gguf")):
        header = find_gguf(model, file, weights=False)
        assert header is not None
        assert set(open_gguf(header).tensors) == {"t0", "t1"}


def test_what_has_been_downloaded_is_read_there(hub: Hub, tmp_path: Path) -> None:
    downloaded = find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path))
    hub.num_bytes = 0
    assert find_gguf("small/model:Q8_0", None, download_dir=str(tmp_path), weights=False) == downloaded
    assert hub.num_bytes == 0


def test_a_broken_header_is_refused_before_a_download(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"a-Q8_0.gguf": Raw(num_tensors=9, data=bytes(1 << 16)).build(), "b-Q4_0.gguf": GGUF[:12]}
    for kind in ("Q8_0", "Q4_0"):
        with pytest.raises(WeightsError):
            find_gguf(f"small/model:{kind}", None, download_dir=str(tmp_path), weights=False)
    assert not files_below(tmp_path)


def test_an_unknown_repository(hub: Hub, tmp_path: Path) -> None:
    assert "No folder and no model" in failure("nobody/nothing:Q4_0", download_dir=str(tmp_path)).message
