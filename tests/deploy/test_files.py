"""The container file, the units and the job script: their commands exist, and flags are legal."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.cli.main import build_parser
from quire.server.auth import PUBLIC_PATHS
from tests.cli.reading import read
from tools import container
from tools.install import CPU_INDEX, TORCH_VERSION

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
    # The files that the build reads are copied: the project's own files, and files that they name.
    copied = " ".join(words for name, words in instructions if name == "COPY")
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "cmake", "csrc", "licenses", "src"} <= set(
        copied.split()
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"DEVICE": "cpu"}, f"torch=={TORCH_VERSION}+cpu --extra-index-url {CPU_INDEX}"),
        ({"DEVICE": "cuda"}, f"torch=={TORCH_VERSION}"),
        ({"DEVICE": "cuda", "TORCH": "torch --index-url mine"}, "torch --index-url mine"),
        ({"DEVICE": "tpu"}, None),
    ],
)
def test_the_torch_of_a_container(arguments: dict[str, str], wanted: str | None, tmp_path: Path) -> None:
    """The lines of the shell are run with a pip that prints its arguments."""
    pip = tmp_path / "bin/pip"
    pip.parent.mkdir()
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    (tmp_path / "python").symlink_to("/bin/true")
    lines = [words for name, words in container.instructions((DEPLOY / "Containerfile").read_text()) if name == "RUN"]
    (line,) = [each.replace("/opt/quire", str(tmp_path)) for each in lines if "${TORCH" in each]
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "TORCH": "", **arguments}
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment, check=False)
    if wanted is None:
        assert (result.returncode, result.stderr) == (2, "DEVICE is cpu or cuda, not tpu\n")
    else:
        assert result.stdout.splitlines() == [
            f"install --no-cache-dir {wanted}",
            "install --no-cache-dir .[otel,stores]",
        ]


def test_an_image_for_gpus_has_what_triton_asks_for() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    last = container.instructions("FROM" + text.rpartition("\nFROM")[2])
    (compiler,) = [words for name, words in last if name == "RUN" and "gcc" in words]
    assert compiler.startswith('if [ "${DEVICE}" = cuda ]')
    assert ("ARG", "DEVICE") in last, "an argument holds for the stage that names it"
    (settings,) = [words for name, words in last if name == "ENV"]
    assert "TRITON_CACHE_DIR=/models/" in settings, "the user has no home, and the root file system is read-only"


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


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.name)
def test_an_issue_template(path: Path) -> None:
    """GitHub shows a template that has a name and a text about it; the commands that it names exist."""
    nothing, head, body = path.read_text(encoding="utf-8").split("---\n", 2)
    assert nothing == ""
    assert yaml.safe_load(head).keys() == {"name", "about"}
    assert body.strip()
    for command in re.findall(r"`quire ([a-z-]+)", body):
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args([command, "--help"])
        assert ended.value.code == 0
