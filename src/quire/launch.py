"""Starts what every way in is made of: model files, the front end's parts, the engine process and its client."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import quire.demo
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.client import ProcessClient
from quire.frontend.input_processor import InputProcessor, ModelLimits, sampling_defaults
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.stats import EngineMetrics
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tokenizer_files import load_generation_config
from quire.loader.hub import resolve_model, resolve_tokenizer_files
from quire.messages import EngineLaunch, Progress
from quire.model_config import ModelConfig, load_model_config

DEMO_MODEL_NAME = "quire-demo"


@dataclass(frozen=True)
class FrontEndParts:
    """What the API side knows of a model before its engine is ready."""

    model_folder: Path
    model_name: str
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor


def find_model(config: EngineConfig, progress: Progress | None, *, weights: bool) -> tuple[Path, str, ModelConfig]:
    """The model's folder, name and facts; what is missing is downloaded, the weights only on request.

    Raises ConfigErrors.
    """
    if config.model is None:
        folder, name = quire.demo.path("target"), DEMO_MODEL_NAME
    else:
        name = config.model
        folder = resolve_model(name, config.revision, config.download_dir, config.hf_token, progress, weights=weights)
    any_architecture = config.model_impl in ("auto", "transformers")
    return folder, name, load_model_config(folder, config.hf_overrides, any_architecture=any_architecture)


def open_model(config: EngineConfig, progress: Progress) -> FrontEndParts:
    """Find (or download) the model's files and read what the front end needs. Loads no weights. Raises ConfigErrors."""
    folder, name, model_config = find_model(config, progress, weights=config.load_format != "dummy")
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer_folder = folder
        if config.tokenizer is not None:
            tokenizer_folder = resolve_tokenizer_files(
                config.tokenizer, config.tokenizer_revision, config.download_dir, config.hf_token
            )
        tokenizer = Tokenizer.from_folder(tokenizer_folder, config.tokenizer_mode)
    return FrontEndParts(folder, name, model_config, tokenizer, _input_processor(config, model_config, tokenizer))


def _input_processor(config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None) -> InputProcessor:
    generation = {}
    if config.generation_config != "vllm":
        is_auto = config.generation_config == "auto"
        generation = _generation_config(Path(model_config.model if is_auto else config.generation_config))
    return InputProcessor(
        tokenizer,
        ModelLimits(model_config.max_model_len, model_config.vocab_size, config.max_logprobs),
        defaults=sampling_defaults(generation, config.override_generation_config),
        eos_token_ids=model_config.eos_token_ids,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
    )


def _generation_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(
            "The folder of the generation config does not exist",
            value=str(folder),
            expected="auto, vllm, or a folder with generation_config.json",
            param="generation_config",
        )
    return load_generation_config(folder)


class EngineProcessHandle:
    """One engine process and the private folder of its sockets."""

    def __init__(self, config: EngineConfig, model_folder: Path) -> None:
        # mkdtemp makes the folder 0700: only this user can reach the sockets in it.
        self._sockets = tempfile.TemporaryDirectory(prefix="quire-")
        self.input_address = f"ipc://{self._sockets.name}/input"
        self.output_address = f"ipc://{self._sockets.name}/output"
        self._launch = EngineLaunch(config, str(model_folder), self.input_address, self.output_address)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. The addresses must be bound already."""
        # -P: a module of the current folder must not stand in for one of ours or of the standard library.
        command = [sys.executable, "-P", "-m", "quire.engine.process"]
        # In a group of its own, a Ctrl-C in the terminal does not reach it, not even before it can say so itself.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the engine that this process has ended.
        self._process.stdin.write(msgspec.json.encode(self._launch) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def describe_end(self) -> str | None:
        """How the process ended, for people; None while it runs and if it left by itself."""
        code = self._process.poll() if self._process is not None else None
        if code is None or code >= 0:
            return None
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"The engine process was ended by {signal.Signals(-code).name}{hint}."

    def stop(self, timeout: float = 5.0) -> None:
        """End the process, politely first, and remove its sockets. May be called again."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()  # what the engine takes as the end of this process
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._sockets.cleanup()


def start_async_engine(
    config: EngineConfig, parts: FrontEndParts, metrics: EngineMetrics | None = None
) -> tuple[AsyncEngine, EngineProcessHandle]:
    """An engine process, which begins to load at once, and its front end, which the caller starts."""
    handle = EngineProcessHandle(config, parts.model_folder)
    client = ProcessClient(handle.input_address, handle.output_address, handle.is_alive)
    handle.start()
    return AsyncEngine(client, parts.input_processor, OutputProcessor(parts.tokenizer, metrics)), handle
