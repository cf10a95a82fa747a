"""Adapters over HTTP: names of models, vLLM's two routes with their texts, refusals, and folders of names."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.frontend.echo_client import EchoClient
from quire.messages import AddRequest, LoadAdapter
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, RunningServer

KEY = "secret"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folders of adapters; of `linked` the files lie elsewhere."""
    for name in ("sql", "fin", "outside"):
        folder = tmp_path / ("elsewhere" if name == "outside" else "roots") / name
        folder.mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file).write_text("{}")
    (tmp_path / "roots" / "linked").symlink_to(tmp_path / "elsewhere" / "outside")
    (tmp_path / "roots" / "empty").mkdir()
    return tmp_path / "roots"


@pytest.fixture
def server(root: Path) -> Iterator[RunningServer]:
    paths = {str(root / name): f"digest of {name}" for name in ("sql", "fin")}
    client = EchoClient(ANSWER, max_model_len=MAX_MODEL_LEN, adapters=paths)
    settings = {"lora_dirs": (root,), "changes_adapters": True, "api_keys": (KEY,)}
    with RunningServer(client, has_adapters=True, **settings) as running:
        yield running


def load(server: RunningServer, name: str, path: str, **fields: object) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(server: RunningServer, name: str) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_a_round(server: RunningServer, root: Path) -> None:
    answer = load(server, "sql", "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert load(server, "fin", str(root / "fin")).status_code == 200
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert list(cards) == [MODEL, "alias", "sql", "fin"]
    assert (cards["sql"]["root"], cards["sql"]["parent"]) == ("sql", MODEL)
    assert cards[MODEL]["parent"] is None
    assert server.http.get("/v1/models/fin").json()["parent"] == MODEL
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "Hi"}),
    ):
        assert server.http.post(f"/v1/{path}", json=body | {"model": "sql"}).json()["model"] == "sql"
        events = server.http.post(f"/v1/{path}", json=body | {"model": "sql", "stream": True}).text
        assert '"model":"sql"' in events
        assert server.http.post(f"/v1/{path}", json=body).json()["model"] == MODEL
    adapters = [message.adapter for message in server.client.sent if isinstance(message, AddRequest)]
    assert adapters == ["digest of sql", "digest of sql", None] * 2
    assert server.http.post("/tokenize", json={"model": "sql", "prompt": "Hi"}).status_code == 200
    answer = unload(server, "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert unload(server, "sql").status_code == 404
    gone = server.http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert gone.status_code == 404


def test_replacing(server: RunningServer) -> None:
    load(server, "sql", "sql")
    again = load(server, "sql", "fin")
    assert again.status_code == 400
    assert (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set " in again.text
    )
    assert load(server, "sql", "fin", load_inplace=True).status_code == 200
    server.http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert server.client.sent[-1].adapter == "digest of fin"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path",
    ["missing", "../roots/sql", "../elsewhere/outside", "/etc", "linked", "empty", "sql\0", "sql/../sql"],
)
def test_one_answer_for_every_path_that_is_none(server: RunningServer, path: str) -> None:
    """A client learns nothing about other folders, whether they exist or not."""
    answer = load(server, "x", path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "adapter_not_found"
    assert error["message"].startswith("There is no adapter at this path.")


def test_absolute_paths_outside_are_as_missing_ones(server: RunningServer, root: Path) -> None:
    texts = {
        load(server, "x", path).json()["error"]["message"].replace(path, "PATH")
        for path in ("/nowhere/at/all", os.fspath(Path("/etc")))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": MODEL, "lora_path": "sql"}, "The base model has this name"),
        ({"lora_name": "a b", "lora_path": "sql"}, "An adapter cannot have this name"),
        ({"lora_name": "x" * 300, "lora_path": "sql"}, "An adapter cannot have this name"),
        ({"lora_name": 1, "lora_path": "sql"}, "The body cannot be read"),
        ({"lora_name": "x", "lora_path": "sql", "is_3d_lora_weight": True}, "Adapters of experts are not read"),
    ],
)
def test_bodies_that_are_refused(server: RunningServer, body: dict[str, object], says: str) -> None:
    answer = server.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_unknown_names_and_near_ones(server: RunningServer) -> None:
    load(server, "sql-expert", "sql")
    answer = server.http.post("/v1/completions", json={"model": "sql-xpert", "prompt": "Hi"})
    assert answer.status_code == 404
    assert "Did you mean sql-expert?" in answer.json()["error"]["message"]
    assert unload(server, "").status_code == 400


def test_the_key_is_needed(server: RunningServer) -> None:
    for path in ("load", "unload"):
        body = {"lora_name": "sql", "lora_path": "sql"}
        answer = httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body, timeout=10)
        assert answer.status_code == 401


def test_without_the_operators_leave_there_are_no_routes(root: Path) -> None:
    with RunningServer(has_adapters=True, lora_dirs=(root,)) as server:
        assert load(server, "sql", "sql").status_code == 404
        assert unload(server, "sql").status_code == 404
        assert "lora" not in server.http.get("/openapi.json").text


def test_no_engine_that_computes_adapters(root: Path) -> None:
    with RunningServer(lora_dirs=(root,), changes_adapters=True) as server:
        answer = load(server, "sql", "sql")
        assert answer.status_code == 400
        assert "--enable-lora" in answer.text


def test_unknown_models_are_looked_for_in_a_folder(root: Path) -> None:
    """Several requests that come together load it once."""
    client = EchoClient(ANSWER, max_model_len=MAX_MODEL_LEN, adapters={str(root / "sql"): "digest of sql"})
    with RunningServer(client, has_adapters=True, lora_resolver_dir=root) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(server.http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"}))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.json()["model"] for answer in answers] == ["sql"] * 4
        (load,) = (message for message in client.sent if isinstance(message, LoadAdapter))
        assert load.is_awaited, "a request waits: it is read without rests"
        for name in (
            "missing",
            "linked",
            "empty",
            "./sql",
            "sql/",
            "sql/.",
            "../elsewhere/outside",
            "a\0",
            "x" * 10**4,
        ):
            answer = server.http.post("/v1/completions", json={"model": name, "prompt": "Hi"})
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.status_code == 404


def test_the_names_of_adapters_in_use_are_metrics(server: RunningServer) -> None:
    load(server, "sql", "sql")
    text = server.http.get("/metrics").text
    assert 'quire_lora_loads_total{engine="0",model_name="echo/model-1",result="ok"} 1.0' in text
    assert text.count("\nvllm:lora_requests_info{") == 1
