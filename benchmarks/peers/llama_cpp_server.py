"""A server of llama.cpp, for the scripts of this folder that ask it."""

from __future__ import annotations

import atexit
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

START_SECONDS = 300


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until GET /health of a server answers. Ends this script if its process ends, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None or time.monotonic() > deadline:
                command = shlex.join(map(str, process.args))  # type: ignore[arg-type]
                sys.exit(f"{command}: not ready, exit code {process.poll()}")
            time.sleep(0.5)


class LlamaCppServer:
    """A process of llama-server, which ends with the script. The constructor returns when it is ready.

    Args:
        binary: path of llama-server.
        model: path of a GGUF file.
        num_slots: the most requests at once.
        context: the most tokens of a request.
        threads: threads that compute.
        options: further options of llama-server.
    """

    def __init__(self, binary: str, model: str, num_slots: int, context: int, threads: int, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [binary, "--model", model, "--port", str(port), "--threads", str(threads), *options]
        command += ["--parallel", str(num_slots), "--ctx-size", str(context * num_slots)]
        self._url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(process.terminate)
        wait_until_ready(self._url, process)

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to a body of POST /completion, without its prefix cache.

        Raises:
            urllib.error.HTTPError: the server refuses the request.
        """
        body = json.dumps({"cache_prompt": False, **asked}).encode()
        request = urllib.request.Request(f"{self._url}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def complete_greedily(self, prompt: list[int], num_tokens: int, **options: Any) -> None:
        """Compute exactly `num_tokens` of the most probable tokens behind a prompt of token ids."""
        asked = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True, **options}
        found = self.complete(asked)["tokens_predicted"]
        assert found == num_tokens, f"{found} tokens, {num_tokens} asked for"
