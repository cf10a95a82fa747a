"""The script of docs/parallel.md for Slurm, as it stands there. The commands of Slurm are stand-ins on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import quire.demo
from tests.e2e import reference
from tests.e2e.serving import SMALL, Program, Serve
from tests.e2e.test_replicas import post
from tests.engine.test_nodes import ADDRESS, KEY, free_port

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
RUN = "import os, sys; os.setsid(); os.execvp('bash', ['bash', '-euc', os.environ['SCRIPT']])"
SCONTROL = f"""#!/bin/bash
[ "$*" = "show hostname node[1-2]" ] && printf '%s\\n' {ADDRESS} node2
"""
# It runs the same command once for each node, and tells each run its number.
SRUN = """#!/bin/bash
[ "$1 $2 $3 $4" = "--nodes 2 --ntasks-per-node 1" ] || exit 1
SLURM_PROCID=1 "${@:5}" &
SLURM_PROCID=0 "${@:5}" &
wait
"""
QUIRE = """#!/bin/bash
[ "$1 $2" = "serve MODEL" ] && exec {python} -m quire serve {model} "${{@:3}}" --port 0 --master-port {port} {small}
"""


def script() -> str:
    """The only block behind the sentence that announces it."""
    found = PAGE.read_text().partition("With Slurm, this is one script:\n\n```\n")[2].partition("```")[0]
    assert "srun" in found
    return found


@pytest.mark.slow
def test_two_nodes_of_a_job(tmp_path: Path) -> None:
    model, small = quire.demo.path("target"), " ".join(SMALL)
    command = QUIRE.format(python=sys.executable, model=model, port=free_port(), small=small)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("quire", command)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "QUIRE_CLUSTER_KEY": KEY, "SCRIPT": script()}
    job["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    with Serve(environment=job, program=Program(("-c", RUN), subprocess.Popen)) as server:
        nodes = psutil.Process(server.process.pid).children(recursive=True)
        try:
            asked = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
            (choice,) = post(server, "/v1/completions", asked).json()["choices"]
            assert choice["text"] == reference.tokenizer().decode(reference.greedy("Hello", 8))
            assert "--headless" in str([node.cmdline() for node in nodes])
        finally:
            os.killpg(server.process.pid, signal.SIGTERM)
            assert not psutil.wait_procs(nodes, 20)[1]
