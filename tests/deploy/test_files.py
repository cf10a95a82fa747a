"""The container file, the units and the job script: what they start exists, and flags are legal."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.server.auth import PUBLIC_PATHS
from tests.cli.reading import read
from tools import container

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_container_file() -> None:
    instructions = container.instructions((DEPLOY / "Containerfile").read_text())
    last = instructions[[name for name, _ in instructions].index("FROM", 2) :]  # of the image that remains
    found = dict(last)
    assert found["USER"] == "10001:10001"
    assert yaml.safe_load(found["VOLUME"]) == ["/models"]
    command = yaml.safe_load(found["ENTRYPOINT"]) + yaml.safe_load(found["CMD"])
    assert command[:2] == ["quire", "serve"]
    engine, server = read(*command[2:])
    assert (engine.model, server.host, server.port) == (None, "0.0.0.0", int(found["EXPOSE"]))
    (path,) = re.findall(rf"127\.0\.0\.1:{found['EXPOSE']}(/\w+)", found["HEALTHCHECK"])
    assert path in PUBLIC_PATHS
    for name, words in instructions:
        if name == "COPY" and "--from" not in words:
            *sources, _ = words.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []
    # What the build reads is copied: the project's own files, and what they name.
    copied = " ".join(words for name, words in instructions if name == "COPY")
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "cmake", "csrc", "licenses", "src"} <= set(
        copied.split()
    )


def _unit(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit() -> None:
    path = DEPLOY / "systemd" / "quire@.service"
    unit = _unit(path)
    words = shlex.split(unit["ExecStart"])
    assert (Path(words[0]).name, words[1:3]) == ("quire", ["serve", "--config"])
    assert unit["Type"] == "notify"
    _, server = read()
    assert int(unit["TimeoutStopSec"].removesuffix("s")) > server.shutdown_timeout + 2
    assert unit["RestartPreventExitStatus"] == "2"
    if (analyze := shutil.which("systemd-analyze")) is not None:
        result = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, check=False)
        about_it = [line for line in result.stderr.splitlines() if "quire" in line and "not executable" not in line]
        assert about_it == []


def test_the_job_script(tmp_path: Path) -> None:
    path = DEPLOY / "slurm" / "quire.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    (start,) = re.findall(r"^srun quire serve (.*)$", text, flags=re.MULTILINE)
    key_file = tmp_path / "key"
    key_file.write_text("k")
    words = shlex.split(
        start.replace("${MODEL:-}", "org/m").replace("$port", "20001").replace("$key_file", str(key_file))
    )
    engine, server = read(*words)
    assert (engine.model, server.port, server.api_key_file) == ("org/m", 20001, str(key_file))
    (seconds,) = re.findall(r"--signal=TERM@(\d+)", text)
    assert int(seconds) > server.shutdown_timeout + 2


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.rglob("*.yaml")) + sorted(DEPLOY.rglob("*.yml")), ids=lambda path: path.name
)
def test_yaml_is_yaml(path: Path) -> None:
    if "templates" not in path.parts:
        assert yaml.safe_load(path.read_text())
