"""Starts the parts that all entry points share: model files, the front end's parts, the engine process and its
client.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import quire.demo
from quire import extension
from quire.config import EngineConfig, ServerConfig
from quire.demo import DEMO_MODEL_NAME
from quire.entry.spawn import EngineInterpreter, how_it_ended, spawn_engine
from quire.errors import ConfigError, InvalidRequestError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.chat_template import check_template_kwargs
from quire.frontend.client import ProcessClient
from quire.frontend.engine_link import UnixLink
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.input_processor import InputProcessor, ModelLimits, sampling_defaults
from quire.frontend.output_processor import OutputProcessor, draft_metrics
from quire.frontend.replica import Replica
from quire.frontend.stats import EngineMetrics
from quire.frontend.supervisor import RecoveryLimits, start_seconds
from quire.frontend.tokenizer import Tokenizer, check_same_vocabulary
from quire.frontend.tokenizer_files import (
    chat_template_text,
    load_chat_templates,
    load_config,
    load_generation_config,
)
from quire.frontend.tracing import check_installed, request_tracer
from quire.gguf.file import is_gguf
from quire.loader.drafter import load_drafter_config
from quire.loader.gguf_choice import find_gguf
from quire.loader.hub import local_path, resolve_model, resolve_tokenizer_files
from quire.loader.object_store import is_stored, mirror
from quire.loader.safetensors_headers import read_headers
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.modules import LoraModule, parse_module
from quire.lora.paths import TENSORS_NAME
from quire.messages import EngineLaunch, Progress, UnixSockets, UseTokenizer
from quire.model_config import ModelConfig, load_model_config
from quire.planning import devices
from quire.speculative_config import BY_WORKER, SpeculativeConfig

if TYPE_CHECKING:
    from quire.engine.ray_replicas import RayReplicas
    from quire.entry.ray_replica import RayReplica

MAX_SOCKET_PARENT_BYTES = 80  # 107 bytes name a Unix socket, and ours is /quire-12345678/output in it


@dataclass(frozen=True)
class FrontEndParts:
    """The API side's facts about a model before its engine is ready."""

    model_folder: Path
    model_name: str
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor


def find_model(config: EngineConfig, progress: Progress | None, *, weights: bool) -> tuple[Path, str, ModelConfig]:
    """The model's folder or GGUF file, name and facts; missing files are downloaded, weights only on request.

    The drafter's files are found in the same way. The model's facts include the drafter's facts. Raises ConfigErrors.
    """
    any_architecture = config.model_impl in ("auto", "transformers")
    source = (config.revision, config.download_dir, config.hf_token, progress)
    if (file := find_gguf(config.model, config.gguf_file, *source, weights=weights)) is not None:
        folder, name, model = file, config.model or file.name, load_model_config(file, config.hf_overrides)
    else:
        if config.model is None:
            folder, name = quire.demo.path("target"), DEMO_MODEL_NAME
        else:
            name = config.model
            folder = resolve_model(name, *source, weights=weights)
        model = load_model_config(folder, config.hf_overrides, any_architecture=any_architecture)
    speculation = config.speculative_config
    if speculation is not None and speculation.method in BY_WORKER:
        drafter = _find_drafter(speculation, folder, config, progress, weights=weights)
        model = replace(model, drafter=load_drafter_config(drafter, speculation, model))
    return folder, name, model


def _find_drafter(
    speculation: SpeculativeConfig, target: Path, config: EngineConfig, progress: Progress | None, *, weights: bool
) -> Path:
    """The folder or GGUF file of the drafter that was asked for; layers of the model itself are in its own folder."""
    if speculation.method == "mtp":
        return target
    assert speculation.model is not None, "speculative_config refuses that"
    source = (speculation.revision, config.download_dir, config.hf_token, progress)
    file = None if speculation.method == "eagle3" else find_gguf(speculation.model, None, *source, weights=weights)
    return file or resolve_model(speculation.model, *source, weights=weights)


def open_model(config: EngineConfig, progress: Progress) -> FrontEndParts:
    """Find (or download) the model's files and read what the front end needs. Loads no weights. Raises ConfigErrors."""
    extension.wished_isa()  # this error and the next come before the download
    check_installed(config)
    folder, name, model_config = find_model(config, progress, weights=config.load_format != "dummy")
    if config.load_format in ("auto", "safetensors") and folder.is_dir():
        read_headers(folder)  # errors come before an engine is started
    tokenizer = None if config.skip_tokenizer_init else read_tokenizer(config, folder)
    if tokenizer is not None and model_config.drafter is not None and model_config.drafter.head is None:
        check_same_vocabulary(tokenizer, Tokenizer.from_folder(model_config.drafter.model, config.tokenizer_mode))
    return FrontEndParts(folder, name, model_config, tokenizer, _input_processor(config, model_config, tokenizer))


def read_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    """The tokenizer of the model in a folder or GGUF file, or the tokenizer that --tokenizer names. Raises
    ConfigErrors.
    """
    source = folder if config.tokenizer is None else _tokenizer_files(config.tokenizer, config)
    return Tokenizer.from_folder(source, config.tokenizer_mode)


def _tokenizer_files(name: str, config: EngineConfig) -> Path:
    """The folder or GGUF file that `--tokenizer` means."""
    if is_gguf(path := local_path(name, "tokenizer")):
        return path
    return resolve_tokenizer_files(name, config.tokenizer_revision, config.download_dir, config.hf_token)


def _input_processor(config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None) -> InputProcessor:
    generation = {}
    is_auto = config.generation_config == "auto"
    if config.generation_config != "vllm" and not (is_auto and is_gguf(Path(model_config.model))):
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


def default_template_kwargs(config: ServerConfig) -> dict[str, Any]:
    """The operator's arguments of the chat template. Raises ConfigError if they would make it refuse every chat."""
    param = "default_chat_template_kwargs"
    try:
        return check_template_kwargs(config.default_chat_template_kwargs or {}, param)
    except InvalidRequestError as error:
        raise ConfigError(
            error.what,
            value=error.value,
            expected=error.expected,
            fix="Correct --default-chat-template-kwargs",
            param=param,
        ) from None


def find_chat_template(config: EngineConfig, server: ServerConfig, folder: Path) -> str:
    """The source of the chat templates of a model in a folder or GGUF file; "": there is none. Raises ConfigErrors."""
    source = folder if config.tokenizer is None else _tokenizer_files(config.tokenizer, config)
    if config.skip_tokenizer_init:
        templates: Mapping[str, str] = {}
    elif is_gguf(source):
        templates = read_gguf_tokenizer(source).chat_templates
    else:
        templates = load_chat_templates(source, load_config(source))
    return chat_template_text(templates, read_chat_template(server.chat_template))


def read_chat_template(given: str | None) -> str | None:
    """The text of the file that `given` names, or `given` itself if it is a template or the name of a template."""
    if given is None or "{" in given or "\n" in given:
        return given
    path = Path(given)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if path.suffix in (".jinja", ".jinja2", ".txt") or "/" in given:
        raise ConfigError(
            "The chat template file does not exist", value=given, fix="Check the path", param="chat_template"
        )
    return given


def _socket_parent() -> str:
    """The user's folder for temporary files, unless the names of sockets in it were longer than the system takes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= MAX_SOCKET_PARENT_BYTES else "/tmp"


class EngineProcessHandle:
    """One engine process at a time, and the private folder of its sockets.

    Args:
        interpreter: becomes the first process; without it one is started.
        engine_index: the index that the messages of the processes carry.
        free_memory_bytes: see EngineLaunch.
        tokenizer: the vocabulary of constraints; None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_folder: Path,
        interpreter: EngineInterpreter | None = None,
        engine_index: int = 0,
        drafter_folder: Path | None = None,
        free_memory_bytes: int | None = None,
        tokenizer: UseTokenizer | None = None,
    ) -> None:
        self._free_memory_bytes, self._tokenizer = free_memory_bytes, tokenizer
        self._config, self._model_folder, self._engine_index = config, str(model_folder), engine_index
        self._drafter_folder = None if drafter_folder is None else str(drafter_folder)
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._waiting = interpreter
        self._process: EngineInterpreter | None = None
        self._was_killed = False  # whether this object has killed the last process

    def launch(self) -> ProcessClient:
        """Start a process, which begins to load at once; the one before must have ended. Raises OSError."""
        self._remove_sockets()
        # mkdtemp makes the folder 0700: only this user can reach the sockets in it.
        self._sockets = tempfile.TemporaryDirectory(prefix="quire-", dir=_socket_parent())
        sockets = UnixSockets(f"ipc://{self._sockets.name}/input", f"ipc://{self._sockets.name}/output")
        client = ProcessClient(UnixLink(sockets), self.is_alive, self._engine_index, self._tokenizer)
        try:
            is_first = self._process is None
            launch = (self._config, self._model_folder, sockets, self._engine_index, is_first, self._drafter_folder)
            self._start(EngineLaunch(*launch, self._free_memory_bytes, self._tokenizer is not None))
        except OSError:
            client.close()
            raise
        return client

    def _start(self, launch: EngineLaunch) -> None:
        self._process, self._waiting = self._waiting or spawn_engine(self._config), None
        self._was_killed = False
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the engine that this process has ended.
        with suppress(BrokenPipeError):  # it has ended already: the client notices
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")

    @property
    def socket_folder(self) -> Path | None:
        """The folder with the sockets of the last process; None: there is no folder."""
        return Path(self._sockets.name) if self._sockets is not None else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def describe_end(self) -> str | None:
        """A text for people about the end of the process; None: it runs, or it left by itself or on request."""
        code = self._process.poll() if self._process is not None else None
        return None if code is None or self._was_killed else how_it_ended(code)

    def kill(self) -> None:
        """End the process at once, even one that is stopped, and wait until it is gone with its memory."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self._was_killed = True
            process.kill()
            process.wait()
        self._close_input(process)

    def tell_to_stop(self) -> None:
        """Close the pipe, so the process ends as if this one had ended."""
        if self._process is not None:
            self._close_input(self._process)

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the process to end, kill it after `timeout` seconds, and remove its sockets. May be called again."""
        self.tell_to_stop()
        process = self._process
        if process is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        self._remove_sockets()

    @staticmethod
    def _close_input(process: EngineInterpreter) -> None:
        """Close the pipe to the engine. The engine takes this as the end of this process."""
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.cleanup()


class EngineProcesses:
    """The processes of all replicas, by their index.

    Args:
        places: the places of the replicas that Ray places.
    """

    def __init__(self, handles: Sequence[EngineProcessHandle | RayReplica], places: RayReplicas | None) -> None:
        self.handles, self._places = handles, places

    def describe_ends(self) -> str | None:
        """A text for people about processes that ended; None: all run, or they left by themselves or on request."""
        ends = (handle.describe_end() for handle in self.handles)
        return " ".join(end for end in ends if end is not None) or None

    def stop(self) -> None:
        """Ask all processes to end, kill those that do not, and remove their sockets. May be called again."""
        for handle in self.handles:
            handle.tell_to_stop()  # they end side by side
        for handle in self.handles:
            handle.stop()
        if self._places is not None:
            self._places.close()


def _fetched(module: LoraModule, config: EngineConfig) -> LoraModule:
    """The adapter with a folder on this machine. Raises ConfigError if it cannot be read from its object store."""
    if not is_stored(module.path):
        return module
    folder = mirror(module.path, (CONFIG_NAME, TENSORS_NAME), download_dir=config.download_dir, with_holes=False)
    return replace(module, path=str(folder))


def _engine_processes(
    config: EngineConfig,
    parts: FrontEndParts,
    interpreters: Sequence[EngineInterpreter],
    tokenizer: UseTokenizer | None,
) -> EngineProcesses:
    """The processes of all replicas; none is started yet. Raises ConfigError if Ray has no room for the replicas."""
    count = config.num_replicas
    if config.has_ray_replicas:
        from quire.engine.ray_replicas import RayReplicas  # no other start needs them
        from quire.entry.ray_replica import RayReplica

        places = RayReplicas(config)
        facts = (config, parts.model_folder, places)
        return EngineProcesses([RayReplica(*facts, index, tokenizer) for index in range(count)], places)
    first: Sequence[EngineInterpreter | None] = interpreters or [None] * count
    more = (parts.model_config.drafter_folder, devices.free_memory_bytes() if count > 1 else None, tokenizer)
    handles = [
        EngineProcessHandle(config, parts.model_folder, interpreter, index, *more)
        for index, interpreter in enumerate(first)
    ]
    return EngineProcesses(handles, None)


def start_async_engine(
    config: EngineConfig,
    parts: FrontEndParts,
    metrics: Sequence[EngineMetrics] | None = None,
    recovery: RecoveryLimits | None = None,
    interpreters: Sequence[EngineInterpreter] = (),
    *,
    has_constraints: bool = True,
) -> tuple[AsyncEngine, EngineProcesses]:
    """An engine process for each replica, which begins to load at once, and their front end, which the caller starts.

    Args:
        metrics: the metrics of each replica.
        interpreters: an interpreter for each replica. They become the first processes.
        recovery: says when a process counts as failed, and how often it is started again.
        has_constraints: whether requests may have constraints. Then the engines make tables for them before they are
            ready.
    """
    modules = [_fetched(parse_module(word), config) for word in config.lora_modules] if config.enable_lora else None
    tracer = request_tracer(config, parts.model_name)
    recovery = recovery or RecoveryLimits(start_seconds=start_seconds())
    tokenizer = parts.input_processor.use_tokenizer() if has_constraints and parts.tokenizer is not None else None
    processes, replicas = _engine_processes(config, parts, interpreters, tokenizer), list[Replica]()
    try:
        for index, handle in enumerate(processes.handles):
            own_metrics = None if metrics is None else metrics[index]
            outputs = OutputProcessor(
                parts.tokenizer, own_metrics, new_draft_metrics=draft_metrics(config), tracer=tracer
            )
            replicas.append(Replica(handle.launch(), outputs, index=index, starter=handle, recovery=recovery))
    except BaseException:
        for replica in replicas:
            replica.client.close()
        processes.stop()
        raise
    return AsyncEngine(replicas, parts.input_processor, modules=modules, tracer=tracer), processes
