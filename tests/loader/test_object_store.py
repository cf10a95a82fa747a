"""A model in an object store equals the one in a folder; a bad network gives the same bytes or an error with a name."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save

from quire.errors import ConfigError, QuireError, WeightsError
from quire.loader import gguf_headers, object_store
from quire.loader.gguf_choice import find_gguf
from quire.loader.hub import resolve_model, resolve_tokenizer_files
from quire.loader.object_store import MANIFEST, mirrors
from quire.loader.safetensors import open_checkpoint
from tests.e2e.certificates import make
from tests.loader.local_store import SECRET, Fault, Store

URL = "s3://models/small model"
WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.bias": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
    "c.weight": torch.randn(70, 50, generator=torch.Generator().manual_seed(0)).to(torch.float16),
    "d.none": torch.empty(0, 4),
    "e.scalar": torch.tensor(42, dtype=torch.int64),
}
FILE = "small model/model.safetensors"


@pytest.fixture(params=["signed", "signed over TLS", "library"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are read: by signed URLs, or by the client library alone."""
    if request.param == "library":
        monkeypatch.setenv("AWS_PROXY_EXCLUDES", "*")
    return str(request.param)


@pytest.fixture
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pems: tuple[Path, Path]
) -> Iterator[Store]:
    has_tls = "way" in request.fixturenames and request.getfixturevalue("way") == "signed over TLS"
    monkeypatch.setenv("SSL_CERT_FILE", str(pems[0]))
    files = {"config.json": b"{}", "tokenizer.json": b"[]", "other.bin": b"x", "onnx/model.json": b"x"}
    objects = {f"small model/{name}": data for name, data in files.items()} | {FILE: save(WEIGHTS)}
    with Store(objects, pems if has_tls else None) as store:
        for name, value in store.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "PIECE_BYTES", 1000)
        monkeypatch.setattr(object_store, "LEAST_PIECE_BYTES", 100)
        monkeypatch.setattr(object_store, "FIRST_BYTES", 100)
        monkeypatch.setattr(gguf_headers, "FIRST_BYTES", 100)
        monkeypatch.setattr(object_store, "WAITS", (0.0, 0.0))
        quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}
        monkeypatch.setattr(object_store, "RETRIES", object_store.RETRIES | {"backoff": quick})
        object_store._store.cache_clear()
        yield store
        for thread in threading.enumerate():  # a left reader would make a client for the next test
            if thread.name.startswith("objects"):
                thread.join()
        object_store._store.cache_clear()


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(folder).tensors())


def check(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


def once(name: str) -> Fault:
    return lambda number: name if number == 2 else None  # two requests read the header


def always(name: str) -> Fault:
    return lambda number: name if number >= 2 else None


def test_weights_are_streamed_and_never_on_the_disk(store: Store) -> None:
    folder = resolve_model(URL)
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST,
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").stat().st_size == len(store.objects[FILE])
    assert folder.parent == mirrors()
    num_reads = len(store.reads)
    check(read(folder))
    spans = [each for key, each in store.reads[num_reads:] if key == FILE]
    assert len(spans) > 3, "by ranges"
    check(dict(open_checkpoint(folder).some(WEIGHTS)))
    assert (folder / "model.safetensors").read_bytes() != store.objects[FILE], "the file still has its hole"


def test_the_progress_of_weights_that_are_streamed(store: Store, way: str) -> None:
    said: list[float] = []
    found = open_checkpoint(resolve_model(URL)).tensors(lambda phase, fraction, text: said.append(fraction))
    check(dict(found))
    assert len(said) == len(WEIGHTS)
    assert said == sorted(said)
    assert said[-1] == 1.0


def test_little_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for size, expected in ((0, 1 << 20), (600 << 20, 3_932_160), (5 << 30, 8 << 20)):
        assert object_store.piece_bytes(size) == expected
        assert object_store.NUM_READERS * expected <= max(0.1 * size, 16 << 20)


def test_a_mirror_is_used_again_until_the_folder_changes(store: Store) -> None:
    folder = resolve_model(URL)
    store.reads.clear()
    assert resolve_model(URL + "/") == folder
    assert not store.reads
    store.objects["small model/config.json"] = b'{"new": 1}'
    assert json.loads((resolve_model(URL) / "config.json").read_text()) == {"new": 1}


def test_a_copy_is_kept_where_one_is_wanted(store: Store, tmp_path: Path) -> None:
    said: list[float] = []
    folder = resolve_model(URL, download_dir=str(tmp_path / "models"), progress=lambda *each: said.append(each[1]))
    assert (folder / "model.safetensors").read_bytes() == store.objects[FILE]
    assert said == sorted(said)
    assert said[-1] == 1.0
    store.reads.clear()
    check(read(folder))
    assert not store.reads


def test_a_download_continues_with_the_next_file(store: Store, tmp_path: Path) -> None:
    store.faults[FILE] = lambda number: "changed"
    with pytest.raises(WeightsError):
        resolve_model(URL, download_dir=str(tmp_path))
    store.reads.clear()
    store.faults.clear()
    resolve_model(URL, download_dir=str(tmp_path))
    assert {key for key, _ in store.reads} == {FILE, "small model/tokenizer.json"}


def test_only_a_tokenizer(store: Store) -> None:
    assert (resolve_tokenizer_files(URL) / "tokenizer.json").read_bytes() == b"[]"
    assert FILE not in {key for key, _ in store.reads}


@pytest.mark.parametrize("fault", ["503", "cut", "short", "endless"])
def test_a_passing_fault_is_not_noticed(store: Store, way: str, fault: str) -> None:
    store.faults[FILE] = once(fault)
    check(read(resolve_model(URL)))
    assert bool(store.signed) == (way != "library")


@pytest.mark.parametrize("fault", ["403", "redirect", "range"])
def test_the_library_reads_what_a_signed_url_does_not_give(store: Store, fault: str) -> None:
    folder = resolve_model(URL)
    store.signed_fault = fault
    check(read(folder))
    assert len(store.signed) >= 8
    assert all(store.reads.count(each) == 2 for each in store.signed)


def test_the_library_goes_on_where_a_signed_answer_was_cut(store: Store) -> None:
    folder = resolve_model(URL)
    store.signed_fault = "cut"
    check(read(folder))
    assert len(store.signed) >= 8
    assert all(store.reads.count(each) == 1 for each in store.signed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("https_proxy", "http://127.0.0.1:1"),
        ("AWS_PROXY_EXCLUDES", "*"),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_ALLOW_INVALID_CERTIFICATES", "true"),
    ],
)
def test_settings_of_the_library_are_followed(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    check(read(resolve_model(URL)))
    assert not store.signed


def test_a_signed_url_leads_to_its_store(store: Store, way: str) -> None:
    (found,) = [each for each in object_store.list_objects(URL) if each.name == "model.safetensors"]
    if way == "library":
        with pytest.raises(NotImplementedError):
            found.signed_url(60)
    else:
        assert found.signed_url(60).startswith(f"{store.url}/models/small%20model/model.safetensors?")
    assert store.url.startswith("https://" if way == "signed over TLS" else "http://")


@pytest.mark.parametrize("way", ["signed over TLS"], indirect=True)
def test_a_certificate_that_nobody_trusts_is_refused(
    store: Store, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(make(tmp_path, "another", is_authority=False)[0]))
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_model(URL)
    assert not store.reads


def test_a_copy_is_read_by_signed_urls(store: Store, way: str, tmp_path: Path) -> None:
    folder = resolve_model(URL, download_dir=str(tmp_path / "models"))
    assert (folder / "model.safetensors").read_bytes() == store.objects[FILE]
    assert {key for key, _ in store.signed} == ({FILE} if way != "library" else set()), "one request needs none"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("503", "503 Service Unavailable"),
        ("cut", "cannot be read"),
        ("short", "cannot be read"),
        ("endless", "more bytes than asked for"),
        ("changed", "changed while it was being read"),
        ("another", "changed while it was being read"),
    ],
)
def test_a_lasting_fault_names_the_object(store: Store, way: str, fault: str, said: str) -> None:
    folder = resolve_model(URL)
    store.faults[FILE] = always(fault)
    with pytest.raises(QuireError, match=said) as error:
        read(folder)
    assert f"{URL}/model.safetensors" in error.value.message
    assert SECRET not in error.value.message


def test_another_version_is_not_mixed_with_the_first(store: Store) -> None:
    folder = resolve_model(URL)
    store.objects[FILE] = save({name: tensor + 1 for name, tensor in WEIGHTS.items()})
    with pytest.raises(WeightsError, match="changed"):
        read(folder)


def test_damaged_bytes_are_found_by_their_hash(store: Store) -> None:
    store.faults["small model/config.json"] = lambda number: "damaged"
    with pytest.raises(WeightsError, match=r"config\.json was read twice, and the bytes were different"):
        resolve_model(URL)


def test_an_etag_that_is_no_hash_is_none(store: Store) -> None:
    store.etags["small model/config.json"] = "0" * 32  # as of an encrypted object
    assert (resolve_model(URL) / "config.json").read_bytes() == b"{}"


def test_no_access_and_no_folder(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    with pytest.raises(ConfigError, match="no files in this folder"):
        resolve_model("s3://models/missing")
    store.is_open = False
    with pytest.raises(ConfigError, match="gives no access") as error:
        resolve_model(URL)
    assert SECRET not in error.value.message + caplog.text


@pytest.mark.parametrize(
    "name", ["s3://", "s3://key:word@models/x", "s3://models/x?sig=y", "s3://models/../x", "s3://a//b"]
)
def test_illegal_urls(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="no folder of an object store") as error:
        resolve_model(name)
    assert "word" not in error.value.message.partition("Expected")[0]
    assert "sig" not in error.value.message


def test_secrets_are_cut_out_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "very-secret-key")
    text = object_store._without_secrets("GET https://x/y?sv=1&sig=abc failed with very-secret-key\nDebug: more")
    assert text == "GET https://x/y?... failed with ..."


def test_a_foreign_folder_cannot_name_objects(store: Store, tmp_path: Path) -> None:
    folder = resolve_model(URL)
    other = tmp_path / "downloaded"
    folder.rename(other)
    store.reads.clear()
    with pytest.raises(WeightsError, match="not in this user's cache"):
        read(other)
    assert not store.reads


def test_a_store_without_etags(store: Store) -> None:
    """The time of writing tells versions apart."""
    store.has_etags = False
    first = resolve_model(URL)
    check(read(first))
    assert resolve_model(URL) == first
    store.modified = "2026-01-02T00:00:00.000Z"
    assert resolve_model(URL) != first


def test_gguf(store: Store, tmp_path: Path) -> None:
    values = np.arange(8192, dtype=np.float32).reshape(64, 128)
    for kind in ("Q8_0", "F32"):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tensor("output.weight", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        store.objects[f"ggufs/model-{kind}.gguf"] = (tmp_path / "model.gguf").read_bytes()
    for name, file in (
        ("s3://models/ggufs:f32", None),
        ("s3://models/ggufs/model-F32.gguf", None),
        ("s3://models/ggufs", "model-F32.gguf"),
    ):
        for weights in (True, False):
            found = find_gguf(name, file, weights=weights)
            assert found is not None
            assert found.name == "model-F32.gguf"
            assert found.stat().st_size == len(store.objects["ggufs/model-F32.gguf"])
            assert found.stat().st_blocks * 512 < 8192
    with pytest.raises(ConfigError, match="Q4_K_M"):
        find_gguf("s3://models/ggufs:Q4_K_M", None)
    with pytest.raises(ConfigError, match="Two GGUF files are named"):
        find_gguf("s3://models/ggufs/model-F32.gguf", "model-Q8_0.gguf")
