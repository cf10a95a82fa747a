"""`quire serve --enable-lora` as real processes, with an engine that has no model: names, failures, a new engine."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve, quire

RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """Folders named sql and fin."""
    for name in ("sql", "fin"):
        write(tmp_path / name, name)
    return tmp_path


def write(folder: Path, content: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)


def flags(adapters: Path, *more: str) -> list[str]:
    modules = [f"{name}={adapters / name}" for name in ("sql", "fin")]
    return [*SMALL, *SHORT, "--enable-lora", "--lora-modules", *modules, *more]


def text_of(server: Serve, model: str) -> str:
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_adapters_come_and_go_and_survive_the_engine(adapters: Path) -> None:
    more = flags(adapters, "--lora-dir", str(adapters), "--max-cpu-loras", "8")
    with Serve(*more, environment=RUNTIME, program=LIGHT) as server:
        assert "adapters  sql · fin · 8 in a step · 8 in memory" in server.log
        base = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
        before = {model: text_of(server, model) for model in (base, "sql", "fin")}
        assert len(set(before.values())) == 3
        body = {"lora_name": "copy", "lora_path": "sql"}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=20).status_code == 200
        assert text_of(server, "copy") == before["sql"], "the content decides"
        server.engine.kill()
        server.wait_for(lambda: "the engine is ready again" in server.log, "another engine")
        assert {model: text_of(server, model) for model in before} == before
        write(adapters / "fin", "other weights")
        assert (
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "sql"}, timeout=20).status_code == 200
        )
        assert text_of(server, "copy") == before["sql"]
        body = {"lora_name": "fin", "lora_path": "fin", "load_inplace": True}  # type: ignore[dict-item]
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=20).status_code == 200
        assert text_of(server, "fin") not in before.values()
        assert 'quire_lora_loads_total{engine="0"' in httpx.get(f"{server.url}/metrics", timeout=10).text


def test_files_that_changed_before_they_are_read_again(adapters: Path) -> None:
    """One place in memory: fin has taken the place of sql."""
    with Serve(*flags(adapters, "--max-loras", "1"), program=LIGHT) as server:
        text_of(server, "fin")
        write(adapters / "sql", "other weights")
        body = {"model": "sql", "prompt": "Hello"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "adapter_changed"
        assert text_of(server, "fin")


@pytest.mark.parametrize("path", ["missing", "~nobody-has-this-name/x"])
def test_an_adapter_of_the_start_that_is_missing_ends_it(adapters: Path, path: str) -> None:
    module = f"x={path if path.startswith('~') else adapters / path}"
    ended = quire("serve", "--port", "0", *SMALL, *SHORT, "--enable-lora", "--lora-modules", module, program=LIGHT)
    assert ended.returncode == 2
    assert "There is no adapter at this path" in ended.stderr


def test_the_metrics_protocol_of_the_gateways_inference_extension(adapters: Path) -> None:
    """The metrics that its endpoint picker reads from a model server, in vLLM's names, with their types and labels.

    https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol.
    """
    with Serve(*flags(adapters, "--max-loras", "2"), program=LIGHT) as server:
        text_of(server, "sql")
        text = httpx.get(f"{server.url}/metrics", timeout=10).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = found[name].samples
        assert found[name].type == "gauge"
        assert 0 <= sample.value <= 1
    (sample,) = found["vllm:lora_requests_info"].samples
    assert abs(sample.value - time.time()) < 60, "the newest sample counts"
    assert sample.labels["max_lora"] == "2"
    assert sample.labels.keys() >= {"running_lora_adapters", "waiting_lora_adapters"}
    (sample,) = found["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert all(int(sample.labels[name]) > 0 for name in ("block_size", "num_gpu_blocks"))
