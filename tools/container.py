"""Runs the instructions of deploy/Containerfile as a script, where no container builder runs.

A stage is a folder, and RUN, HEALTHCHECK and the last command run in it with chroot. The last stage runs as its USER on
a read-only root file system. The base is Debian's own python3, of debootstrap, in the place of the official image.
Needs root, debootstrap and Debian's mirror: `sudo python tools/container.py /var/tmp/quire-image`

With `--arg DEVICE=cuda` no GPU is needed: a kernel is compiled for one, and the server answers on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "Containerfile"
PACKAGES = "python3,python3-dev,python3-venv,python-is-python3,ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEY = "a-key-of-this-check"
READY_SECONDS = 180.0
QUESTION = """
import json, urllib.request
body = json.dumps({{"prompt": "Once upon a time", "max_tokens": 8}}).encode()
headers = {{"Content-Type": "application/json", "Authorization": "Bearer {key}"}}
request = urllib.request.Request("http://127.0.0.1:{port}/v1/completions", body, headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
# What a GPU would need besides its driver: a kernel for it, and the module that starts kernels.
COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.build import compile_module_from_src
from quire.kernels.triton import sampling

assert torch.version.cuda, f"torch {torch.__version__} is a build without CUDA"
types = {"logits_ptr": "*fp32", "highest_ptr": "*fp32", "token_ptr": "*i32"}
constants = {"SLICE": sampling.SLICE}
kernel = sampling._highest_kernel
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
binary = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
module = '''
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "starts_kernels"};
PyMODINIT_FUNC PyInit_starts_kernels(void) { return PyModule_Create(&definition); }
'''
compile_module_from_src(module, "starts_kernels")
print(f"torch {torch.__version__}, Triton {triton.__version__}: {len(binary)} bytes for sm_90; a module is compiled")
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, words) of each instruction of a container file."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


@dataclass
class Stage:
    """A root file system, and what the instructions have set."""

    root: Path
    environment: dict[str, str]
    binds: Sequence[str]
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    words: dict[str, str] = field(default_factory=dict)

    def command(self, command: Sequence[str], *, read_only: bool = False) -> list[str]:
        """The command line that runs a command in the stage, in mounts of its own."""
        root = shlex.quote(str(self.root))
        lines = ["set -e", f"mount --bind {root} {root}"]
        for path in self.binds:
            inside = f"{root}{shlex.quote(path)}"
            lines += [f"mkdir -p {inside}", f"mount --bind -o ro {shlex.quote(path)} {inside}"]
        lines += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        if read_only:
            lines += [
                f"mount -t tmpfs tmpfs {root}/tmp",
                f"mount --bind {root}/models {root}/models",  # a volume stays writable
                f"mount -o remount,bind,ro {root}",
            ]
        settings = [f"{name}={value}" for name, value in ({"PATH": PATH} | self.environment).items()]
        inner = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(command)}"
        shell = shlex.join(["/usr/bin/env", "-i", *settings, "bash", "-c", inner])
        lines.append(f"exec chroot --userspec={self.user} {root} {shell}")
        return ["unshare", "--mount", "bash", "-c", "\n".join(lines)]

    def run(self, text: str) -> None:
        """Run a line of a shell, which sees the stage's arguments as variables."""
        print(f"RUN {text}", flush=True)
        settings = [f"{name}={value}" for name, value in self.arguments.items()]
        subprocess.run(self.command(["env", *settings, "sh", "-c", text]), check=True)


def build(folder: Path, arguments: dict[str, str], extra: dict[str, str], binds: Sequence[str]) -> Stage:
    """Carry out all instructions; the last stage."""
    base = folder / "base"
    if not base.exists():
        part = folder / "base.part"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(part)], check=True)
        part.rename(base)
    shutil.copy("/etc/resolv.conf", base / "etc/resolv.conf")
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    of_all: dict[str, str] = {}  # arguments before the first stage: a stage sees those that it names again
    for name, words in instructions(FILE.read_text()):
        if name == "ARG":
            key, has_default, value = words.partition("=")
            known = of_all if stage is None else stage.arguments
            known[key] = arguments.get(key, value.strip('"') if has_default else of_all[key])
            continue
        if name == "FROM":
            label = words.partition(" AS ")[2] or "last"
            print(f"FROM {words.partition(' ')[0]}: {base} stands for it", flush=True)
            root = folder / label
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
            stage = stages[label] = Stage(root, dict(extra), binds)
            continue
        assert stage is not None, "FROM comes first"
        match name:
            case "RUN":
                stage.run(words)
            case "COPY":
                _copy(stage, words, stages)
            case "WORKDIR":
                stage.workdir = words
                (stage.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                for each in shlex.split(words):
                    key, _, value = each.partition("=")
                    stage.environment[key] = value.replace("$PATH", PATH)
            case "USER":
                stage.user = words
            case _:
                stage.words[name] = words
    assert stage is not None
    return stage


def _copy(stage: Stage, words: str, stages: dict[str, Stage]) -> None:
    print(f"COPY {words}", flush=True)
    source_root = ROOT
    if words.startswith("--from="):
        label, _, words = words.removeprefix("--from=").partition(" ")
        source_root = stages[label].root
    *sources, target = words.split()
    place = stage.root / (target if target.startswith("/") else f"{stage.workdir}/{target}").lstrip("/")
    for source in sources:
        from_path = source_root / source.lstrip("/")
        if from_path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--reflink=auto", f"{from_path}/.", str(place)], check=True)
        else:
            shutil.copy(from_path, place)


def serve(stage: Stage) -> None:
    """Start the image's command, wait until it is healthy, ask it once, and stop it with its signal."""
    command = json.loads(stage.words["ENTRYPOINT"]) + json.loads(stage.words["CMD"])
    health = json.loads(stage.words["HEALTHCHECK"].partition("CMD ")[2])
    ask = QUESTION.format(port=stage.words["EXPOSE"], key=KEY)
    stage.environment["VLLM_API_KEY"] = KEY
    if stage.arguments["DEVICE"] == "cuda":
        subprocess.run(stage.command(["python", "-c", COMPILE], read_only=True), check=True)
    process = subprocess.Popen(stage.command(command, read_only=True))
    try:
        deadline = time.monotonic() + READY_SECONDS
        while subprocess.run(stage.command(health), stderr=subprocess.DEVNULL, check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not become healthy")
            time.sleep(1.0)
        print("healthy", flush=True)
        subprocess.run(stage.command(["python", "-c", ask]), check=True)
        process.terminate()
        if (code := process.wait(60)) != 0:
            raise SystemExit(f"the server left with exit code {code}")
        print("stopped by SIGTERM with exit code 0")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the stages: 4 GB, 15 GB with CUDA")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="as --build-arg of builders")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="in every stage, as for pip")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="FOLDER", help="of this machine, as certificates"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    stage = build(args.folder.resolve(), _pairs(args.arg), _pairs(args.env), args.bind)
    serve(stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
