"""`quire serve -dp 2`: two engine processes behind one API. What does not need a model runs over light engines."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.registry import METRICS
from tests.e2e import reference
from tests.e2e.serving import LIGHT, SMALL, START_SECONDS, Serve, quire
from tests.e2e.test_adapters import write

TWO = ("-dp", "2", *SMALL)
LATE_SECONDS = 1.0  # of a machine that is busy
WHOLE = {"prompt": "Hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve(*TWO, program=LIGHT, environment={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


def post(server: Serve, path: str, body: dict[str, Any], **arguments: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, **arguments)


def texts(server: Serve, count: int, body: dict[str, Any] = WHOLE, **arguments: Any) -> set[str]:
    """The different answers to `count` requests at once. All are answered."""
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda _: post(server, "/v1/completions", body, **arguments), range(count)))
    assert [answer.status_code for answer in answers] == [200] * count, [answer.text for answer in answers]
    return {answer.json()["choices"][0]["text"] for answer in answers}


def values(server: Serve, name: str, **labels: str) -> dict[str, float]:
    """The samples of a series by their engine."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def test_the_start_shows_them(server: Serve) -> None:
    assert "replicas  2 engines, each with 1 thread;" in server.log
    phases = [line.split()[0] for line in server.log.splitlines() if re.match("  (load|warm) ", line)]
    assert phases == ["load", "warm"], "their phases are one start"


def test_both_answer_alike(server: Serve) -> None:
    before = values(server, "vllm:request_success_total", finished_reason="length")
    assert len(texts(server, 8)) == 1
    after = values(server, "vllm:request_success_total", finished_reason="length")
    counts = [after[engine] - before[engine] for engine in ("0", "1")]
    assert sum(counts) == 8
    assert all(counts), "one of them had nothing to do"


def test_metrics_name_their_engine(server: Serve) -> None:
    texts(server, 4)
    of_engines = {metric.name for metric in METRICS if "engine" in metric.common}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if family.name in of_engines:
                found.setdefault(family.name, set()).add(sample.labels["engine"])
    assert found.keys() == of_engines
    assert all(engines == {"0", "1"} for engines in found.values())


def steps(server: Serve, limit: int) -> list[dict[str, Any]]:
    """The last steps of each engine."""
    return [json.loads(line) for line in server.get(f"/v1/steps?limit={limit}").text.splitlines()]


def test_every_route_is_of_both(server: Serve) -> None:
    for rank in ("0", "1"):  # each has done steps, with more requests than it may have later
        texts(server, 4, headers={"X-data-parallel-rank": rank})
    assert [server.get(path).status_code for path in ("/livez", "/readyz", "/health", "/load")] == [200] * 4
    assert server.get("/load").json() == {"server_load": 0}
    lines = steps(server, 3)
    assert [line["engine"] for line in lines] == [0, 0, 0, 1, 1, 1]
    last = {line["engine"]: line["step_id"] for line in lines}
    moved = post(server, "/v1/config", {"max_num_seqs": 3})
    assert moved.status_code == 200
    assert moved.json()["settings"]["data_parallel_size"]["value"] == 2
    info = server.get("/server_info?config_format=json").json()["vllm_config"]
    assert (info["max_num_seqs"], info["data_parallel_size"]) == (3, 2)
    texts(server, 16)
    later = [line for line in steps(server, 1000) if line["step_id"] > last[line["engine"]]]
    assert max(line["running"] for line in later) == 3
    assert post(server, "/reset_prefix_cache", {}).status_code == 200


def test_a_request_may_name_its_replica(server: Serve) -> None:
    before = values(server, "vllm:generation_tokens_total")
    for _ in range(3):
        assert post(server, "/v1/completions", WHOLE, headers={"X-data-parallel-rank": "1"}).status_code == 200
    after = values(server, "vllm:generation_tokens_total")
    assert {engine: after[engine] - before[engine] for engine in after} == {"0": 0, "1": 90}
    for wrong in ("2", "x", "-1", "9" * 10):
        answer = post(server, "/v1/completions", WHOLE, headers={"X-data-parallel-rank": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "data_parallel_rank"


def test_adapters_are_on_both(tmp_path: Path) -> None:
    """Also of a request that is moved, and on the next engine."""
    for name in ("sql", "fin"):
        write(tmp_path / name, name)
    flags = ("--enable-lora", "--lora-dir", str(tmp_path), "--lora-modules", f"sql={tmp_path / 'sql'}")
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Serve(*TWO, *flags, program=LIGHT, environment=environment) as server, ThreadPoolExecutor(9) as pool:
        load = {"lora_name": "fin", "lora_path": "fin"}
        assert post(server, "/v1/load_lora_adapter", load).status_code == 200

        def answers(name: str) -> set[str]:
            bodies = [(WHOLE | {"model": name}, {"X-data-parallel-rank": rank}) for rank in "01"]
            found = [post(server, "/v1/completions", body, headers=headers) for body, headers in bodies]
            return {each.json()["choices"][0]["text"] for each in found}

        sql, fin = answers("sql"), answers("fin")
        assert (len(sql), len(fin), sql == fin) == (1, 1, False)
        body = WHOLE | {"model": "fin", "max_tokens": 400}
        (expected,) = texts(server, 1, body)
        futures = [pool.submit(post, server, "/v1/completions", body) for _ in range(8)]
        server.wait_for(lambda: sum(values(server, "vllm:num_requests_running").values()) == 8, "all to run")
        server.engines[0].kill()
        assert {future.result().json()["choices"][0]["text"] for future in futures} == {expected}
        server.wait_for(lambda: "the engine is ready again" in server.log, "the next engine", START_SECONDS)
        assert (answers("sql"), answers("fin")) == (sql, fin)
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "fin"}).status_code == 200
        for rank in "01":
            headers = {"X-data-parallel-rank": rank}
            assert post(server, "/v1/completions", body, headers=headers).status_code == 404


def test_one_is_killed_under_load() -> None:
    """Whole answers come, and streams of the other engine do not notice."""
    body = WHOLE | {"max_tokens": 400}
    with Serve(*TWO, program=LIGHT) as server, ThreadPoolExecutor(9) as pool:
        (expected,) = texts(server, 1, body)
        futures = [pool.submit(post, server, "/v1/completions", body) for _ in range(8)]
        server.wait_for(lambda: sum(values(server, "vllm:num_requests_running").values()) == 8, "all to run")
        assert all(values(server, "vllm:num_requests_running").values())
        first, second = sorted(server.engines, key=lambda process: process.create_time())
        os.kill(first.pid, signal.SIGKILL)
        assert server.get("/health").status_code == 200
        assert {future.result().json()["choices"][0]["text"] for future in futures} == {expected}
        assert second.is_running()
        restarts = values(server, "quire_engine_restarts_total", reason="crash")
        assert sorted(restarts.values()) == [0, 1]
        server.wait_for(lambda: len(server.engines) == 2, "the next engine", START_SECONDS)
        futures = [pool.submit(post, server, "/v1/completions", body) for _ in range(8)]
        server.wait_for(lambda: sum(values(server, "vllm:num_requests_running").values()) == 8, "all to run")
        assert server.get("/load").json() == {"server_load": 8}
        assert server.stop() == 0, "both are drained"
        assert {future.result().json()["choices"][0]["text"] for future in futures} == {expected}
    assert not second.is_running()


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_of_a_model_are_those_of_one_engine(num_ranks: int) -> None:
    """Where a rank is lost, only its replica starts again."""
    prompt = reference.TEXTS[0]
    expected = reference.tokenizer().decode(reference.greedy(prompt, 12))
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    with Serve(*TWO, "-tp", str(num_ranks)) as server:
        assert texts(server, 4, body) == {expected}
        if num_ranks == 1:
            return
        rank_of(server.engines[0]).kill()
        server.wait_for(lambda: "the engine is ready again" in server.log, "the next engine", START_SECONDS)
        assert sorted(values(server, "quire_engine_restarts_total", reason="crash").values()) == [0, 1]
        assert texts(server, 4, body) == {expected}


@pytest.mark.slow
def test_a_rank_is_killed_under_load() -> None:
    """The server says so, starts the next engine, and computes the requests again."""
    body = WHOLE | {"max_tokens": 300}
    with Serve(*SMALL, "-tp", "2") as server, ThreadPoolExecutor(3) as pool:
        (expected,) = texts(server, 1, body)
        futures = [pool.submit(post, server, "/v1/completions", body) for _ in range(3)]
        server.wait_for(lambda: values(server, "vllm:num_requests_running") == {"0": 3}, "all to run")
        rank = rank_of(server.engines[0])
        killed = time.monotonic()
        rank.kill()
        server.wait_for(lambda: server.get("/health").status_code == 503, "bad health")
        assert time.monotonic() - killed < 2 + LATE_SECONDS
        assert {future.result().json()["choices"][0]["text"] for future in futures} == {expected}
        assert server.get("/health").status_code == 200
        assert re.search(rf"Rank 1 of 2 \(process {rank.pid} on .*\) was killed by SIGKILL", server.log)


def rank_of(engine: psutil.Process) -> psutil.Process:
    """The other rank of an engine of two."""
    (rank,) = (child for child in engine.children() if child.name() != "nursery")
    return rank


@pytest.mark.slow
def test_ranks_of_two_replicas_are_killed_under_load() -> None:
    """Of one replica: the other one goes on and takes its requests. Of both: bad health, until one is ready again."""
    body = WHOLE | {"max_tokens": 300}
    with Serve(*TWO, "-tp", "2") as server, ThreadPoolExecutor(8) as pool:
        (expected,) = texts(server, 1, body)

        def running() -> dict[str, float]:
            return values(server, "vllm:num_requests_running")

        def asked(count: int) -> list[Future[httpx.Response]]:
            futures = [pool.submit(post, server, "/v1/completions", body) for _ in range(count)]
            server.wait_for(lambda: sum(running().values()) == count, "all to run")
            assert all(running().values()), "one of them has nothing to do"
            return futures

        def check_answers(futures: list[Future[httpx.Response]]) -> None:
            answers = [future.result() for future in futures]
            assert [answer.status_code for answer in answers] == [200] * len(answers), [each.text for each in answers]
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected}

        def check_told(rank: int, killed: float) -> None:
            """The log names the rank, its process, its host and the signal."""
            what = rf"Rank 1 of 2 \(process {rank} on .+\) was killed by SIGKILL"
            server.wait_for(lambda: re.search(what, server.log) is not None, "the reason")
            assert time.monotonic() - killed < 2 + LATE_SECONDS

        futures = asked(6)
        first, second = server.engines
        lost, kept = rank_of(first), rank_of(second)
        killed = time.monotonic()
        lost.kill()
        check_told(lost.pid, killed)
        assert server.get("/health").status_code == 200, "the other one serves"
        check_answers(futures)
        server.wait_for(lambda: "the engine is ready again" in server.log, "the next engine", START_SECONDS)
        assert sorted(values(server, "quire_engine_restarts_total", reason="crash").values()) == [0, 1]
        assert (second.is_running(), kept.is_running()) == (True, True), "the other replica has started again too"
        assert not first.is_running()

        futures = asked(4)
        ranks = [rank_of(engine) for engine in server.engines]
        killed = time.monotonic()
        for rank in ranks:
            rank.kill()
        server.wait_for(lambda: server.get("/health").status_code == 503, "bad health")
        assert time.monotonic() - killed < 2 + LATE_SECONDS
        check_answers(futures)
        server.wait_for(lambda: server.get("/health").status_code == 200, "good health", START_SECONDS)
        restarts = values(server, "quire_engine_restarts_total", reason="crash")
        assert sorted(restarts.values()) == [1, 2]


def test_more_than_there_are_cores() -> None:
    result = quire("serve", "-dp", "4096", "--port", "0")
    assert result.returncode == 2
    assert "There are more replicas than cores, and each needs one of its own" in result.stderr
    assert "Traceback" not in result.stderr
