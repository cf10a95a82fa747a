"""A chat template that never ends, explodes or formats without bounds ends its own request and no other."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from quire.errors import ConfigError, InvalidRequestError, RendererLostError
from quire.frontend import bounded_pool
from quire.frontend.bounded_process import send
from quire.frontend.echo_client import EchoClient
from quire.frontend.render_pool import RenderPool
from quire.frontend.render_process import Render, Templates
from tests.server.serving import RunningServer
from tests.server.test_errors import error_of

# Harmless until the last message says which part to run, so that calm requests can be sent to the same server.
TEMPLATE = """{%- set what = messages[-1].content -%}
{%- if what == 'loop' -%}{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif what == 'slow call' -%}{{ (('a' * 4000000) | list | sort | join) ~ ('ab' * 8000000) | wordwrap(1) }}
{%- elif what == 'width' -%}{{ '%*d' % (messages | length * 9000000000, 1) }}
{%- elif what == 'format' -%}{{ '{:>{w}}'.format('x', w=messages | length * 9000000000) }}
{%- elif what == 'center' -%}{{ 'x' | center(messages | length * 9000000000) }}
{%- elif what == 'ljust' -%}{{ 'x'.ljust(messages | length * 9000000000) }}
{%- elif what == 'join' -%}{{ range(99999) | join('x' * 15000000) }}
{%- elif what == 'double' -%}
{%- set ns = namespace(x='x' * 1000) -%}{%- for i in range(40) -%}{%- set ns.x = ns.x ~ ns.x -%}{%- endfor -%}{{ ns.x }}
{%- elif what == 'recursion' -%}{%- macro m() -%}{{ m() }}{%- endmacro -%}{{ m() }}
{%- elif what == 'secrets' -%}{{ '{0.__class__.__mro__}'.format(messages) }}
{%- elif what == 'map' -%}{{ messages | map(attribute='__class__') | list | string | length * (1 // 0) }}
{%- else -%}{{ what }}{%- endif -%}"""
HOSTILE = (
    *("loop", "slow call", "width", "format", "center", "ljust", "join", "double", "recursion", "secrets", "map"),
)


@pytest.fixture(scope="module")
def hostile():
    client = EchoClient(None, step_seconds=0.002, max_model_len=2048)
    with RunningServer(client, chat_template=TEMPLATE, max_render_seconds=0.25) as server:
        yield server
        server.wait_for_idle()


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "templates"),
    [
        ("/v1/chat/completions", HOSTILE),
        ("/tokenize", ("loop", "recursion", "secrets")),  # the same pool renders for it
        pytest.param("/tokenize", HOSTILE, marks=pytest.mark.slow),
    ],
)
def test_hostile_templates_end_their_own_request(hostile, path, templates):
    """Streams and other chats run beside them, and get the same as alone."""
    alone = stream(hostile)
    texts: list[str] = []
    is_over = threading.Event()

    def keep_chatting() -> None:
        while not is_over.is_set():
            texts.append(stream(hostile))

    threads = [threading.Thread(target=keep_chatting) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for what in templates:
            response = hostile.http.post(path, json={"messages": say(what)})
            error = error_of(response, 400)
            assert error["code"] == "invalid_value", (what, error)
            assert "chat template" in error["message"], (what, error)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(texts) >= 4
    assert set(texts) == {alone}
    assert hostile.http.get("/health").status_code == 200
    assert hostile.chat(messages=say("calm"), max_tokens=3).status_code == 200


def stream(server: RunningServer) -> str:
    """The text of a streamed chat."""
    events = server.events("/v1/chat/completions", messages=say("calm"), max_tokens=30, ignore_eos=True)
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def test_more_endless_templates_than_processes(hostile):
    """Chats that wait behind them are served when they have been killed; no process is left over."""
    statuses: list[int] = []

    def ask(content: str) -> None:
        statuses.append(hostile.chat(messages=say(content), max_tokens=1).status_code)

    threads = [threading.Thread(target=ask, args=("loop",)) for _ in range(bounded_pool.MAX_PROCESSES + 2)]
    threads.append(threading.Thread(target=ask, args=("calm",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == [200] + [400] * (bounded_pool.MAX_PROCESSES + 2)
    assert len(renderers()) <= bounded_pool.MAX_PROCESSES


def renderers() -> list[psutil.Process]:
    """The render processes of this process."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "quire.frontend.render_process".endswith(child.name())]


def test_a_client_that_leaves_does_not_mix_up_answers():
    async def run() -> None:
        pool = RenderPool({"default": "{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}"}, {})
        try:
            for round_ in range(3):
                leaving = asyncio.create_task(pool.render(Render(say(f"left {round_}"))))
                await asyncio.sleep(0.01)
                leaving.cancel()
                assert await pool.render(Render(say(f"stayed {round_}"))) == f"stayed {round_}"
        finally:
            pool.close()

    asyncio.run(run())


def in_pool(template: str, use: Callable[[RenderPool, int], Awaitable[None]], **options: Any) -> None:
    """Runs `use` with a pool and the process id of its first process."""

    async def run() -> None:
        pool = RenderPool({"default": template}, {}, **options)
        try:
            await use(pool, pool._idle._queue[0]._process.pid)
        finally:
            pool.close()

    asyncio.run(run())


def test_a_killed_process_is_replaced():
    async def use(pool: RenderPool, pid: int) -> None:
        process = pool._idle._queue[0]._process
        process.kill()
        process.wait()
        assert await pool.render(Render(say("b"))) == "b"
        assert await pool.render(Render(say("é😀" * 100_000))) == "é😀" * 100_000

    in_pool("{{ messages[0].content }}", use)


def ended_under_a_chat(number: signal.Signals) -> str:
    """The text of a chat whose process is ended by a signal once it has been given the chat."""
    texts = []

    async def use(pool: RenderPool, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        chat = asyncio.create_task(pool.render(Render(say("b"))))
        await asyncio.sleep(0.05)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        texts.append(await chat)

    in_pool("{{ messages[0].content }}", use)
    return texts[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_process_ended_from_outside_is_not_the_clients_fault(number):
    """As the system does when memory runs out: the chat is rendered again, and the client does not notice."""
    assert ended_under_a_chat(number) == "b"


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGSEGV])
def test_a_process_ended_by_its_template_is(number):
    with pytest.raises(InvalidRequestError, match="The chat template"):
        ended_under_a_chat(number)


def test_a_stopped_process_is_replaced(monkeypatch):
    monkeypatch.setattr(bounded_pool, "LOOK_SECONDS", 0.2)

    async def use(pool: RenderPool, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        assert await pool.render(Render(say("b"))) == "b"
        assert not psutil.pid_exists(pid)

    in_pool("{{ messages[0].content }}", use)


def test_a_starved_process_is_waited_for():
    """It is out of the processor for much longer than it may use it, as on a machine with too much to do."""

    async def use(pool: RenderPool, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        chat = asyncio.create_task(pool.render(Render(say("b"))))
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        assert await chat == "b"
        assert pool._idle._queue[0]._process.pid == pid

    in_pool("{{ messages[0].content }}", use, max_seconds=0.2)


def test_processes_that_all_die_are_the_servers_fault():
    with RunningServer(chat_template="{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}") as server:
        assert server.chat(max_tokens=1).status_code == 200
        is_over = threading.Event()

        def kill_all() -> None:
            while not is_over.wait(0.01):
                with suppress(psutil.NoSuchProcess):  # one that ended by itself meanwhile
                    for process in renderers():
                        process.kill()

        thread = threading.Thread(target=kill_all)
        thread.start()
        try:
            response = server.chat(max_tokens=1)
        finally:
            is_over.set()
            thread.join()
        assert error_of(response, 503)["code"] == "renderer_lost"
        assert int(response.headers["retry-after"]) > 0
        assert server.chat(max_tokens=1).status_code == 200


SMALL = """from quire.frontend import bounded_process, render_process
bounded_process.MAX_MEMORY_BYTES = 2**28
render_process.main()"""


def test_messages_that_fill_the_memory_are_the_clients_fault(monkeypatch):
    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return Popen([sys.executable, "-c", SMALL], **options)

    Popen = subprocess.Popen
    monkeypatch.setattr(bounded_pool.subprocess, "Popen", popen)

    async def use(pool: RenderPool, pid: int) -> None:
        with pytest.raises(InvalidRequestError, match="needed more memory"):
            await pool.render(Render([{"role": "user", "content": "a", "rest": [[]] * 2_000_000}]))

    in_pool("{{ messages[0].content }}", use)


def test_a_server_that_is_gone_is_no_error():
    """A process whose server was interrupted while it started prints no traceback."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "quire.frontend.render_process"]
    with theirs, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as process:
        theirs.close()
        send(ours, Templates({"default": "{{ 1 }}"}, {}, None, "The model", 1.0))
        ours.close()
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_a_template_that_does_not_compile_in_time():
    with pytest.raises(ConfigError, match="more processor time than it may have while it was compiled"):
        RenderPool({"default": "{{ 'ab' | center(3000000) | wordwrap(1) | length }}"}, {}, max_seconds=0.2)


def test_a_process_that_dies_at_the_start(monkeypatch):
    """The error does not blame the template, which was not read."""
    monkeypatch.setattr(bounded_pool, "send", lambda connection, templates: renderers()[0].kill())
    with pytest.raises(RendererLostError, match="ended or stood still"):
        RenderPool({"default": "x"}, {})


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(RendererLostError, match="No such file"):
        RenderPool({"default": "x"}, {})


def test_processes_end_with_the_server():
    before = renderers()
    with RunningServer() as server:
        assert server.chat().status_code == 200
        (mine,) = set(renderers()) - set(before)
    assert not mine.is_running()
