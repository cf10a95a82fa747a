"""The scripts of benchmarks/peers that ask llama.cpp's server, each beside a small program in the server's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"
SERVER = """#!{python}
import json, socketserver, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
print(json.dumps(sys.argv[1:]), file=open("{log}", "a"), flush=True)

class Server(BaseHTTPRequestHandler):
    num_asked = 0

    def answer(self, status, found):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def do_GET(self):
        Server.num_asked += 1
        self.answer(503 if Server.num_asked == 1 else 200, {{}})  # it loads

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(self.path, json.dumps(asked), file=open("{log}", "a"), flush=True)
        self.answer(200, {{"tokens_predicted": {predicted} or asked["n_predict"], "content": "x", "stop_type": "eos"}})

    def log_message(self, *args):
        pass

ThreadingHTTPServer.server_bind = socketserver.TCPServer.server_bind  # without a look-up of the host's name
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Server).serve_forever()
"""
QUESTIONS: dict[str, dict[str, Any]] = {
    "adapting.py": {"prompts": [[5, 6], [7]], "adapters": ["b", None], "num_tokens": 3},
    "constraining.py": {"prompts": ["x", "y"], "schemas": [None, {"type": "null"}], "num_tokens": 3},
    "speculating.py": {"prompts": [[5, 6], [7]], "num_tokens": 3},
}


def _run(script: str, folder: Path, predicted: int = 0) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script on two prompts. Returns its process and the lines of the server's log.

    Args:
        predicted: the tokens of each answer; 0: as many as the request asks for.
    """
    server, log = folder / "llama-server", folder / "log"
    server.write_text(SERVER.format(python=sys.executable, log=log, predicted=predicted))
    server.chmod(0o755)
    for name in ("a", "b"):
        (folder / "adapters" / name).mkdir(parents=True)
    given = [str(folder / "adapters")] if script == "adapting.py" else ["--requests", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "llama-server", str(server), "MODEL.gguf", *given, "--threads", "1"],
        input=json.dumps(QUESTIONS[script]) + "\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,  # the sibling module is found beside the script, from any folder
    )
    return done, log.read_text().splitlines()


@pytest.mark.parametrize("script", QUESTIONS)
def test_a_script_starts_the_server_and_asks_it(script: str, tmp_path: Path) -> None:
    done, log = _run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    assert answer["seconds"] > 0
    command = json.loads(log[0])
    assert [command[command.index(option) + 1] for option in ("--model", "--parallel", "--ctx-size", "--threads")] == [
        "MODEL.gguf",
        "2",
        "2048",
        "1",
    ]
    bodies = [json.loads(line.removeprefix("/completion ")) for line in log[1:]]
    asked = [body for body in bodies if body["n_predict"] == 3]
    assert [body["prompt"] for body in sorted(asked, key=str)] == sorted(QUESTIONS[script]["prompts"], key=str)
    assert all(body["cache_prompt"] is False and body["ignore_eos"] and body["temperature"] == 0 for body in asked)
    if script == "adapting.py":
        assert sorted(str(body["lora"]) for body in asked) == ["[]", "[{'id': 1, 'scale': 1.0}]"]
    if script == "constraining.py":
        assert [body["json_schema"] for body in asked if "json_schema" in body] == [{"type": "null"}]


@pytest.mark.parametrize("script", QUESTIONS)
def test_a_script_refuses_an_answer_of_another_length(script: str, tmp_path: Path) -> None:
    done, _ = _run(script, tmp_path, predicted=2)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr
    assert "ready" not in done.stdout


OPENAI_SERVER = """
import json, socketserver, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.do_GET()
        usage = {"usage": {"completion_tokens": int(sys.argv[2]) or asked["max_tokens"]}}
        for event in ({"choices": []}, usage):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
        print(self.path, json.dumps(asked), flush=True)

HTTPServer.server_bind = socketserver.TCPServer.server_bind  # without a look-up of the host's name
HTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


@pytest.mark.parametrize("num_answered", [0, 2])
def test_a_server_of_the_openai_api_is_asked_over_http(num_answered: int, tmp_path: Path) -> None:
    """An answer of another length ends the script."""
    (tmp_path / "server.py").write_text(OPENAI_SERVER)
    command = f"{sys.executable} {tmp_path / 'server.py'} {{port}} {num_answered}"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "speculating.py"), "serve", command, "--requests", "2"],
        input=json.dumps(QUESTIONS["speculating.py"]) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if num_answered:
        assert done.returncode != 0
        assert "2 tokens, 4 asked for" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["seconds"] > 0
    asked = [json.loads(line.split(" ", 1)[1]) for line in done.stderr.splitlines() if line.startswith("/v1/comp")]
    of_question = [each for each in asked if each["max_tokens"] == 3]
    assert sorted((each["prompt"] for each in of_question), key=str) == sorted([[5, 6], [7]], key=str)
    assert all(each["ignore_eos"] and each["temperature"] == 0 and each["stream"] for each in asked)
