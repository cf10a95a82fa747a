"""A chat template that never ends, explodes or formats without bounds ends its own request and nobody else's."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from quire.errors import ConfigError
from quire.frontend import render_pool
from quire.frontend.echo_client import EchoClient
from quire.frontend.render_pool import RenderPool
from quire.frontend.render_process import Render, Templates, send
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
    with RunningServer(client, chat_template=TEMPLATE, max_render_seconds=0.5) as server:
        yield server
        server.wait_for_idle()


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_hostile_templates_end_their_own_request(hostile, path):
    """Beside streams and other chats, all of which get what they get alone."""
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
        for what in HOSTILE:
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
    """Those that wait behind them are served when they have been killed; no process is left over."""
    statuses: list[int] = []

    def ask(content: str) -> None:
        statuses.append(hostile.chat(messages=say(content), max_tokens=1).status_code)

    threads = [threading.Thread(target=ask, args=("loop",)) for _ in range(render_pool.MAX_PROCESSES + 2)]
    threads.append(threading.Thread(target=ask, args=("calm",)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(statuses) == [200] + [400] * (render_pool.MAX_PROCESSES + 2)
    assert len(renderers()) <= render_pool.MAX_PROCESSES


def renderers() -> list[psutil.Process]:
    """The render processes of this process."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "quire.frontend.render_process" in child.cmdline()]


def test_a_client_that_leaves_does_not_mix_up_answers():
    async def run() -> None:
        pool = RenderPool({"default": "{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}"}, {})
        try:
            for round_ in range(3):
                leaving = asyncio.create_task(pool.render(Render(say(f"left {round_}"))))
                await asyncio.sleep(0.01)
                leaving.cancel()
                assert await pool.render(Render(say(f"stayed {round_}"))) == f"stayed {round_}"
        finally:
            pool.close()

    asyncio.run(run())


def test_a_killed_process_is_replaced():
    async def run() -> None:
        pool = RenderPool({"default": "{{ messages[0].content }}"}, {})
        try:
            process = pool._idle._queue[0]._process
            process.kill()
            process.wait()
            assert await pool.render(Render(say("b"))) == "b"
            assert await pool.render(Render(say("é😀" * 100_000))) == "é😀" * 100_000
        finally:
            pool.close()

    asyncio.run(run())


def test_a_server_that_is_gone_is_no_error():
    """Nobody sees a traceback of a process whose server was interrupted while it started."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "quire.frontend.render_process"]
    with theirs, subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE) as process:
        theirs.close()
        send(ours, Templates({"default": "{{ 1 }}"}, {}, None, "The model", 1.0))
        ours.close()
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_a_template_that_does_not_compile_in_time(monkeypatch):
    monkeypatch.setattr(render_pool, "START_SECONDS", 0.001)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        RenderPool({"default": "x"}, {})


def test_processes_end_with_the_server():
    before = renderers()
    with RunningServer() as server:
        assert server.chat().status_code == 200
        (mine,) = set(renderers()) - set(before)
    assert not mine.is_running()
