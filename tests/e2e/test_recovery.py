"""`quire serve` whose engine is killed, stopped, hangs, breaks or finds no memory, beside streams that must not change.

The engine is sabotaged by files (sabotaged_engine.py), and light: it has no model. Tests that need a model have the
real engine, and test_serve.py shows the death of a real one. A hang holds requests before their first token, so the
fault of the engine meets all of them.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import demo
from tests.e2e import reference
from tests.e2e.sabotaged_engine import DEADLY, LONG_PROMPT, LONG_SECONDS, UNSCHEDULABLE
from tests.e2e.serving import SMALL, START_SECONDS, Program, Serve
from tests.nursery import LightPopen, TorchPopen

COMPLETIONS = "/v1/completions"
NORMAL: tuple[dict[str, Any], ...] = tuple(
    {"max_tokens": 12, "ignore_eos": True} | body
    for body in (
        {"prompt": reference.TEXTS[0], "temperature": 0},
        {"prompt": reference.TEXTS[1], "temperature": 1, "seed": 7},
        {"prompt": reference.TEXTS[2], "temperature": 0, "n": 2},
        {"prompt": reference.TEXTS[2], "temperature": 0.8, "seed": 1, "logprobs": 2},
    )
)
LONG = {"prompt": "Hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
TOKENS = "vllm:generation_tokens_total/"
REASONS = {
    "kill": "crash",
    "break": "crash",
    "stop": "silent",
    "hang": "stuck",
    "hang with the lock": "silent",
}


class SabotagedServe(Serve):
    """`patience`: seconds without a sign or a step after which an engine counts as failed; `engine`: which one."""

    def __init__(
        self, folder: Path, *flags: str, max_failures: int = 100, patience: float = 1.0, engine: str = "light"
    ) -> None:
        how = (Path(__file__).with_name("sabotaged_serve.py"), folder, engine, max_failures, patience)
        program = Program(tuple(map(str, how)), LightPopen if engine == "light" else TorchPopen)
        # A prompt is one step, on every CPU: the default budget depends on the CPU.
        one_step = ("--max-shared-prefill-tokens", "0", "--max-num-batched-tokens", "256")
        super().__init__(*SMALL, *one_step, *flags, program=program)
        self.folder = folder

    def order(self, order: str) -> None:
        """For the next step of the engine."""
        for name in ("acting", "survived", "go"):
            (self.folder / name).unlink(missing_ok=True)
        scratch = self.folder / "scratch"
        scratch.write_text(order)
        scratch.rename(self.folder / "order")

    def wait_until_acting(self) -> None:
        self.wait_for((self.folder / "acting").exists, "the order to be obeyed")

    def wait_healthy(self) -> None:
        self.wait_for(lambda: self.get("/health").status_code == 200, "recovery", START_SECONDS)

    def text(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of an answer that is given whole."""
        response = httpx.post(self.url + COMPLETIONS, json=body, timeout=60)
        assert response.status_code == 200, response.text
        choices: list[dict[str, Any]] = response.json()["choices"]
        return choices

    def events(self, body: dict[str, Any], on_text: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """The events of a streamed answer, which must end with [DONE]."""
        events = []
        with httpx.stream("POST", self.url + COMPLETIONS, json=body | {"stream": True}, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in filter(None, response.iter_lines()):
                events.append(line.removeprefix("data: "))
                on_text()
        assert events[-1] == "[DONE]", "the stream was cut"
        return [json.loads(event) for event in events[:-1]]

    def streamed(self, body: dict[str, Any], on_text: Callable[[], None] = lambda: None) -> list[str]:
        """The texts of a streamed answer."""
        texts: dict[int, str] = {}
        for event in self.events(body, on_text):
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[index] for index in sorted(texts)]

    def counts(self) -> dict[str, float]:
        """The samples of /metrics that count failures and tokens, as name/reason."""
        return {
            f"{sample.name}/{sample.labels.get('reason') or sample.labels.get('finished_reason') or ''}": sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name.startswith(
                ("quire_engine", "quire_requests", "vllm:request_success", "vllm:generation_tokens_total")
            )
        }

    @contextmanager
    def counting(self, expected: dict[str, float]) -> Iterator[None]:
        """The counts during the block; every sample that is not named stays the same."""
        before = self.counts()
        yield
        after = self.counts()
        found = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        found.pop(TOKENS, None)
        assert found == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SabotagedServe]:
    with SabotagedServe(tmp_path_factory.mktemp("orders")) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def undisturbed(server: SabotagedServe) -> list[list[str]]:
    return [[choice["text"] for choice in server.text(body)] for body in NORMAL]


@pytest.fixture(scope="module")
def undisturbed_long(server: SabotagedServe) -> list[str]:
    return [choice["text"] for choice in server.text(LONG)]


class Began:
    """A streamed answer in a thread; a part of it has come."""

    def __init__(self, server: SabotagedServe, pool: ThreadPoolExecutor) -> None:
        has_text = threading.Event()
        self.text = pool.submit(server.streamed, LONG, has_text.set)
        assert has_text.wait(20)
        assert not self.text.done()


@pytest.mark.parametrize("how", REASONS)
def test_recovery(server: SabotagedServe, undisturbed: list[list[str]], undisturbed_long: list[str], how: str) -> None:
    """Four streams without a token yet and one with tokens go on as if nothing had been."""
    counted = {
        f"quire_engine_restarts_total/{REASONS[how]}": 1.0,
        "quire_requests_retried_total/": 5.0,
        "vllm:request_success_total/length": 6.0,
    }
    statuses: dict[str, list[int]] = {"/livez": [], "/readyz": [], "/health": []}
    with server.counting(counted), ThreadPoolExecutor() as pool:
        engine = server.engine
        began = Began(server, pool)
        server.order("hang" if how in ("kill", "stop") else how)
        server.wait_until_acting()
        normal = [pool.submit(server.streamed, body) for body in NORMAL]
        server.wait_for(lambda: server.get("/load").json()["server_load"] == 5, "the streams to arrive")
        if how == "kill":
            engine.kill()
        if how == "stop":
            engine.suspend()
        if how == "break":
            (server.folder / "go").touch()
        noticed = False
        started = time.monotonic()
        while not (noticed and statuses["/health"][-1] == statuses["/readyz"][-1] == 200):
            assert time.monotonic() < started + START_SECONDS, server.log
            for path, seen in statuses.items():
                response = server.get(path)
                seen.append(response.status_code)
                if path != "/livez" and response.status_code == 503 and not noticed:
                    noticed = True
                    assert time.monotonic() - started < 5, "noticed late: the limits of this server are a second"
                    assert response.json()["error"]["code"] in ("not_ready", "engine_dead")
            time.sleep(0.01)
        assert [future.result(60) for future in normal] == undisturbed
        assert began.text.result(60) == undisturbed_long
    assert set(statuses["/livez"]) == {200}
    assert set(statuses["/health"]) <= {200, 503}
    assert set(statuses["/readyz"]) <= {200, 503}
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the old engine was left behind"
    assert server.process.poll() is None


@pytest.mark.parametrize("num_tokens", [UNSCHEDULABLE, DEADLY], ids=["cannot be scheduled", "kills at once"])
def test_a_request_that_ends_every_engine_ends_alone(
    server: SabotagedServe, undisturbed_long: list[str], num_tokens: int
) -> None:
    """It does so while it waits, or before anything that the engine says has left the process by itself."""
    counted = {
        "quire_engine_restarts_total/crash": 3.0,
        "quire_requests_lost_total/retried": 1.0,
        "quire_requests_retried_total/": 5.0,
        "vllm:request_success_total/error": 1.0,
        "vllm:request_success_total/length": 1.0,
    }
    with server.counting(counted), ThreadPoolExecutor() as pool:
        began = Began(server, pool)
        body = {"prompt": [5] * num_tokens, "max_tokens": 4}
        response = httpx.post(server.url + COMPLETIONS, json=body, timeout=20)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_restarted")
        assert began.text.result(60) == undisturbed_long


def test_an_idle_engine_that_is_stopped(server: SabotagedServe, undisturbed: list[list[str]]) -> None:
    with server.counting({"quire_engine_restarts_total/silent": 1.0, "vllm:request_success_total/length": 5.0}):
        server.engine.suspend()
        server.wait_for(lambda: server.get("/readyz").status_code == 503, "the silence to be noticed", 5)
        response = server.get("/health")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert response.json()["phase"]
        assert response.headers["retry-after"]
        refused = httpx.post(server.url + COMPLETIONS, json=NORMAL[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) > 0
        server.wait_healthy()
        assert [server.streamed(body) for body in NORMAL] == undisturbed


def test_a_server_that_is_suspended_itself_does_not_blame_the_engine(server: SabotagedServe) -> None:
    """Ctrl-Z in the terminal stops both processes, and `fg` lets them go on."""
    both = (server.engine, psutil.Process(server.process.pid))
    with server.counting({"vllm:request_success_total/length": 1.0}):
        for process in both:
            process.suspend()
        time.sleep(1.5)  # longer than this server's limits
        for process in reversed(both):
            process.resume()
            time.sleep(0.1)
        assert server.text(NORMAL[0])
        assert server.get("/health").status_code == 200
    assert server.engine.pid == both[0].pid


def test_a_long_prefill_is_healthy(server: SabotagedServe) -> None:
    """A step that takes longer than the limit of short ones, and was predicted to."""
    prompt = [5] * LONG_PROMPT
    with server.counting({"vllm:request_success_total/length": 1.0}), ThreadPoolExecutor() as pool:
        started = time.monotonic()
        answer = pool.submit(server.text, {"prompt": prompt, "max_tokens": 1, "ignore_eos": True})
        while not answer.done():
            assert server.get("/health").status_code == server.get("/readyz").status_code == 200
            time.sleep(0.01)
        assert answer.result()
        assert time.monotonic() - started > LONG_SECONDS > 1.0, "the step was not long"


def test_answers_that_are_given_whole_survive(server: SabotagedServe) -> None:
    """They go on after the tokens that had come: the same answers, also of forks and beams."""
    # long enough not to have ended before the order to hang arrives
    bodies: list[dict[str, Any]] = [
        {"prompt": "Hello", "max_tokens": 200, "temperature": 1, "n": 3, "ignore_eos": True, "seed": 5},
        {"prompt": "Hello", "max_tokens": 200, "temperature": 1, "ignore_eos": True, "logprobs": 2, "seed": 9},
        {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "n": 3, "use_beam_search": True},
        {"prompt": ["Hello", "json"], "max_tokens": 12, "temperature": 0, "ignore_eos": True},
    ]
    expected = [server.text(body) for body in bodies]
    num_tokens_of_all = None
    for num_tokens_before in (0, 40):
        before = server.counts()
        with ThreadPoolExecutor() as pool:
            if num_tokens_before == 0:
                server.order("hang")
            answers = [pool.submit(server.text, body) for body in bodies]
            if num_tokens_before > 0:
                wanted = before[TOKENS] + num_tokens_before
                server.wait_for(lambda wanted=wanted: server.counts()[TOKENS] >= wanted, "tokens")  # type: ignore[misc]
                server.order("hang")
            server.wait_until_acting()
            time.sleep(0.1)  # for messages on their way, like the next round of the beams
            assert not all(answer.done() for answer in answers), "all answers had ended before"
            server.engine.kill()
            assert [answer.result(60) for answer in answers] == expected
        after = server.counts()
        assert after["quire_engine_restarts_total/crash"] == before["quire_engine_restarts_total/crash"] + 1
        assert after["quire_requests_lost_total/retried"] == before["quire_requests_lost_total/retried"]
        num_tokens = after[TOKENS] - before[TOKENS]
        assert num_tokens_of_all in (None, num_tokens), "some tokens count twice"
        num_tokens_of_all = num_tokens


def test_moved_limits_outlive_the_engine(server: SabotagedServe, undisturbed_long: list[str]) -> None:
    most = server.get("/v1/config").json()["settings"]["max_num_seqs"]["value"]
    moved = httpx.post(server.url + "/v1/config", json={"max_num_seqs": 2})
    assert moved.status_code == 200, moved.text
    server.engine.kill()
    server.wait_for(lambda: server.get("/readyz").status_code == 503, "the end to be noticed", 5)
    server.wait_healthy()
    setting = server.get("/v1/config").json()["settings"]["max_num_seqs"]
    assert (setting["value"], setting["source"]) == (2, "live")
    with ThreadPoolExecutor() as pool:
        streams = [Began(server, pool) for _ in range(2)]
        waiting = pool.submit(server.text, NORMAL[0])
        server.wait_for(lambda: "vllm:num_requests_waiting{" in server.get("/metrics").text, "metrics")
        server.wait_for(
            lambda: any(
                line.startswith("vllm:num_requests_waiting{") and line.endswith(" 1.0")
                for line in server.get("/metrics").text.splitlines()
            ),
            "the third request to wait",
        )
        server.engine.kill()
        for stream in streams:
            assert stream.text.result(60) == undisturbed_long
        assert waiting.result(60)
    assert httpx.post(server.url + "/v1/config", json={"max_num_seqs": most}).status_code == 200


@pytest.fixture
def patient_server(tmp_path: Path) -> Iterator[SabotagedServe]:
    """Nothing hangs in it: on a busy machine an engine that waits for a core must not count as silent."""
    with SabotagedServe(tmp_path, patience=60.0, engine="model") as server:
        yield server


@pytest.mark.slow
def test_ranks_that_hang_are_named(tmp_path: Path) -> None:
    """The log and /health name the rank, its place, its work, and the setting. The answers still come."""
    limit = r"rank waits 600 s for another one \(--distributed-timeout-seconds\)"
    with SabotagedServe(tmp_path, "-tp", "2", patience=3.0, engine="ranks") as server, ThreadPoolExecutor() as pool:
        expected = server.text(NORMAL[0])
        for how, what in (
            (
                "hang",
                r"The engine has not finished a step for too long: Rank 1 of 2 \(process {rank} on .+\) has not begun "
                rf"step \d+\. A step may take 3 s .+, and a {limit}",
            ),
            (
                "stop",
                r"The engine process gives no sign of life: Rank 0 of 2 \(process {engine} on .+\) has sent nothing "
                "for 3 s, in a step",
            ),
        ):
            engine = server.engine
            (rank,) = (child for child in engine.children() if child.name() != "nursery")
            server.order("hang")
            answer = pool.submit(server.text, NORMAL[0])
            server.wait_until_acting()
            if how == "stop":
                engine.suspend()
            began = time.monotonic()
            server.wait_for(lambda: "failure" in server.get("/health").json(), "the failure to be told")
            assert time.monotonic() - began < 3.0 + 5.0
            failure = server.get("/health").json()["failure"]
            assert re.match(what.format(rank=rank.pid, engine=engine.pid), failure), failure
            server.wait_for(lambda failure=failure: failure in server.log, "the log")  # type: ignore[misc]
            assert answer.result(60) == expected
            server.wait_healthy()
            assert "failure" not in server.get("/health").json()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_engine_at_its_own_limit(tmp_path: Path) -> None:
    flags = ("-tp", "2", "--distributed-timeout-seconds", "1")
    with SabotagedServe(tmp_path, *flags, patience=60.0, engine="ranks") as server, ThreadPoolExecutor() as pool:
        expected = server.text(NORMAL[0])
        server.order("hang")
        answer = pool.submit(server.text, NORMAL[0])
        server.wait_until_acting()
        began = time.monotonic()
        server.wait_for(lambda: "failure" in server.get("/health").json(), "the failure to be told")
        assert time.monotonic() - began < 1.0 + 5.0
        what = (
            r"Rank 0 cannot go on with a step: rank 1 did not come within 1 s \(--distributed-timeout-seconds\)\. "
            r"Rank 1 \(process \d+ on .+\) has not begun step \d+"
        )
        assert re.match(what, server.get("/health").json()["failure"])
        assert answer.result(60) == expected


def test_no_memory_at_any_allocation(patient_server: SabotagedServe) -> None:
    """The k-th allocation of a step fails, for every k: one request may end, with 503; the engine stays."""
    server = patient_server
    bodies = [body | {"max_tokens": 3} for body in NORMAL]
    undisturbed = [[choice["text"] for choice in server.text(body)] for body in bodies]
    engine, num_failed, k = server.engine.pid, 0, 0
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=server.url, timeout=20) as client:
        while not (server.folder / "survived").exists():
            k += 1
            assert k < 2000
            server.order(f"allocation {k}")
            answers = [pool.submit(client.post, COMPLETIONS, json=body) for body in bodies]
            failed = 0
            for answer, texts in zip(answers, undisturbed, strict=True):
                response = answer.result(60)
                if response.status_code == 200:
                    assert [choice["text"] for choice in response.json()["choices"]] == texts, k
                else:
                    failed += 1
                    assert response.status_code == 503, response.text
                    assert response.json()["error"]["code"] == "out_of_memory"
                    assert "allocate" not in response.text
            assert failed <= 1, f"allocation {k} ended {failed} requests"
            num_failed += failed
            assert client.get("/health").status_code == 200
    assert num_failed > 50, "hardly an allocation failed"
    assert server.engine.pid == engine, "the engine did not survive"


@pytest.mark.parametrize("poison", [pytest.param("hang", marks=pytest.mark.slow), "kill"])
def test_it_gives_up(tmp_path: Path, poison: str) -> None:
    """An engine that fails again and again ends the server, with 1 for a service manager to see."""
    with SabotagedServe(tmp_path, max_failures=2) as server, ThreadPoolExecutor() as pool:
        statuses = []
        for _ in range(2):
            server.order("hang")
            answer = pool.submit(httpx.post, server.url + COMPLETIONS, json=NORMAL[0], timeout=60)
            server.wait_until_acting()
            if poison == "kill":
                server.engine.kill()
            statuses.append(answer.result(60).status_code)
        assert statuses == [200, 503]
        assert server.wait_exit() == 1
        assert "The engine failed 2 times" in server.log
        assert ("SIGKILL" if poison == "kill" else "has not finished a step") in server.log
        assert "Traceback" not in server.log


def test_an_engine_that_never_served_is_not_started_again(tmp_path: Path) -> None:
    server = SabotagedServe(tmp_path)
    server._waits = False
    server.order("hang")  # before its first token
    with server:
        server.wait_until_acting()
        server.engine.send_signal(signal.SIGKILL)
        assert server.wait_exit() == 1
        assert "SIGKILL" in server.log


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_in_flight_vanish_when_the_engine_restarts(tmp_path: Path, method: str) -> None:
    """The engine is killed in a step that verifies drafts. The stream goes on, and later requests have drafts again."""
    settings = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    settings |= {"model": str(demo.path("draft"))} if method == "draft_model" else {}
    text = "What does len() do? It returns the number of items of an object. " * 3
    body = {"prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def num_drafts() -> float:
        (samples,) = re.findall(
            r"^vllm:spec_decode_num_drafts_total(?:{.*})? (\S+)$", server.get("/metrics").text, re.M
        )
        return float(samples)

    with SabotagedServe(tmp_path, "-sc", json.dumps(settings), engine="model", patience=60) as server:
        (first,), long, known = server.text(body), server.streamed(LONG), num_drafts()
        assert known > 0
        with ThreadPoolExecutor() as pool:
            began = Began(server, pool)
            server.wait_for(lambda: num_drafts() > known, "drafts of the stream")
            server.order("hang")
            server.wait_until_acting()
            server.engine.kill()
            assert began.text.result(60) == long
        known = num_drafts()
        assert server.text(body) == [first]
        assert num_drafts() > known
        assert server.stop() == 0
