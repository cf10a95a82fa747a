"""`quire quantize`: a model folder in floating point becomes one in a standard format, layer by layer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.checkpoint_writer import calibration
from quire.checkpoint_writer.layerwise import EMBEDDING, LayerLinear, Layerwise
from quire.checkpoint_writer.methods import Layer, Method, Weights, method
from quire.checkpoint_writer.output import Output
from quire.config import EngineConfig
from quire.entry.launch import find_model
from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer
from quire.hf_config.quantization import OUTPUT
from quire.kernels import cpu
from quire.layer_spec.attention import Latent
from quire.loader.safetensors import Checkpoint, open_checkpoint
from quire.messages import Progress
from quire.model_config import DTYPE_BYTES, ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

Say = Callable[[str], None]  # tells people what is being done
Tick = Callable[[int, int], None]  # newly finished shards, all shards


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's choices.

    Attributes:
        model: None: the demo model.
        calibration: the file of the calibration text; None: the model writes it.
    """

    model: str | None
    to: str
    out: str
    group_size: int = 128
    act_order: bool = False
    calibration: str | None = None
    calibration_windows: int = 64
    calibration_length: int = 512
    seed: int = 0
    num_threads: int | None = None


def download(options: Options, progress: Progress) -> None:
    """Download the model's files, if they are not on this machine. Raises ConfigErrors."""
    find_model(EngineConfig(model=options.model), progress, weights=True)


def quantize(options: Options, say: Say, tick: Tick, *, use_tqdm: bool) -> Output:
    """Write the checkpoint, or finish one that an interrupted run has begun. Raises QuireErrors."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
        if cpu.available():
            cpu.set_num_threads(options.num_threads)
    folder, _, config = find_model(EngineConfig(model=options.model), None, weights=True)
    dtype: torch.dtype = getattr(torch, config.dtype if config.dtype in DTYPE_BYTES else "bfloat16")
    chosen = method(options.to, options.group_size, options.act_order, dtype)
    _check_model(config, options.to, chosen)
    layerwise = Layerwise(config, dtype, min(options.calibration_length, config.max_model_len))
    for layer in range(config.num_layers):
        for linear in layerwise.linears(layer):
            _check_sizes(linear, chosen)
    checkpoint = open_checkpoint(folder)
    source = Source(checkpoint, layerwise)
    num_shards = config.num_layers + 1
    output = Output(Path(options.out), num_shards, _settings(options, checkpoint, chosen))
    num_finished = output.num_finished()
    if num_finished:
        say(f"continues after {num_finished} of {num_shards} shards")
        tick(num_finished, num_shards)
    residuals: list[Tensor] = []
    if chosen.needs_calibration and num_finished < config.num_layers:
        if num_finished:
            residuals = output.residuals(num_finished)
        else:
            windows = _windows(options, folder, layerwise.num_tokens, use_tqdm)
            residuals = layerwise.embed(source.embedding(), windows)
    if not num_finished:
        output.begin()
    for layer in range(num_finished, config.num_layers):
        weights = source.layer(layer)
        linears = layerwise.linears(layer)
        inputs = {}
        if chosen.needs_calibration:
            count = _counter(say, f"layer {layer + 1}: inputs", len(residuals))
            inputs = layerwise.observe(layer, weights, residuals, count)
            say(f"layer {layer + 1}: rounding")
        spec = config.layers[layer].kv_spec
        head_dim = 0 if spec is None else spec.head_dim_v
        quantized = chosen.quantize(Layer(weights, linears, layerwise.norms(layer), inputs, head_dim))
        if chosen.needs_calibration:
            layerwise.run(
                layer, quantized.values, residuals, _counter(say, f"layer {layer + 1}: outputs", len(residuals))
            )
        prefix = source.prefixes[layer]
        last = layer == config.num_layers - 1
        output.finish_shard(
            layer, {prefix + name: tensor for name, tensor in quantized.written.items()}, [] if last else residuals
        )
        tick(1, num_shards)
    if num_finished <= config.num_layers:
        output.finish_shard(config.num_layers, source.others(), [])
        tick(1, num_shards)
    original = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    output.complete(folder, original | {"quantization_config": chosen.description(source.ignored())})
    return output


class Source:
    """The tensors of the checkpoint by layer."""

    def __init__(self, checkpoint: Checkpoint, layerwise: Layerwise) -> None:
        self._checkpoint, self._layerwise = checkpoint, layerwise
        self._names: dict[int, dict[str, str]] = {}  # layer -> checkpoint name -> name inside the layer
        self._others: list[str] = []
        self._embedding = ""
        self.prefixes: dict[int, str] = {}  # layer -> prefix of its names in the checkpoint
        for name in checkpoint.names:
            own = layerwise.names.own_name(name)
            if own is not None and (match := _LAYER.fullmatch(own)):
                layer, inner = int(match[1]), match[2]
                self._names.setdefault(layer, {})[name] = inner
                self.prefixes[layer] = name.removesuffix(inner)
                continue
            if layerwise.names.is_of_all_experts(name):
                raise ConfigError(
                    "The checkpoint holds all experts of a layer in one tensor, which this command does not take apart",
                    value=name,
                    fix="Serve the original with --quantization int8, int4 or fp8",
                    param="model",
                )
            self._others.append(name)
            if own == EMBEDDING:
                self._embedding = name

    def layer(self, layer: int) -> Weights:
        """The weights of one layer by their names inside it."""
        names = self._names[layer]
        return {names[name]: tensor for name, tensor in self._checkpoint.some(names)}

    def embedding(self) -> Tensor:
        ((_, tensor),) = self._checkpoint.some([self._embedding])
        return tensor

    def others(self) -> Weights:
        """The tensors outside the layers: embeddings, the last norm, the output projection, and unused tensors."""
        return dict(self._checkpoint.some(self._others))

    def ignored(self) -> list[str]:
        """The modules that a reader could mistake for quantized linear layers."""
        modules = [name.removesuffix(".weight") for name in self._others if name.endswith(".weight")]
        outside = {OUTPUT, *(m for m in modules if not m.endswith(("norm", "embed_tokens")))}
        kept = [prefix + name for layer, prefix in self.prefixes.items() for name in self._layerwise.kept(layer)]
        return [*sorted(outside), *kept]


def _check_model(config: ModelConfig, to: str, chosen: Method) -> None:
    if config.quantized is not None:
        raise ConfigError(
            "The model is quantized already", value=config.quantized.method, fix="Take the original", param="model"
        )
    if not config.is_native:
        raise ConfigError(f"{config.architecture} has no native implementation, which quantizing needs", param="model")
    is_latent = any(isinstance(layer.attention, Latent) for layer in config.layers)
    if chosen.needs_calibration and (is_latent or config.experts()):
        raise ConfigError(
            f"{config.architecture} has {'latent attention' if is_latent else 'experts'}, which cannot be calibrated",
            value=to,
            expected="int4, int8 or fp8",
            param="to",
        )


def _check_sizes(linear: LayerLinear, chosen: Method) -> None:
    unit_N, unit_K = chosen.needs
    if linear.in_features % unit_K or any(size % unit_N for size in linear.sizes):
        raise ConfigError(
            f"{', '.join(linear.names)} cannot be stored in this format",
            value=f"{list(linear.sizes)} x {linear.in_features}",
            expected=f"out-features in multiples of {unit_N}, in-features of {unit_K}",
            fix="Choose another --group-size, or --to int8 or fp8",
            param="group_size",
        )


def _settings(options: Options, checkpoint: Checkpoint, chosen: Method) -> dict[str, Any]:
    """The settings that must be equal before an interrupted run can continue."""
    settings = asdict(options)
    del settings["out"], settings["num_threads"]
    headers = repr([(path.name, entries) for path, entries in checkpoint.files.items()])
    settings["model"] = hashlib.sha256(headers.encode()).hexdigest()
    if not chosen.needs_calibration:
        for name in ("calibration", "calibration_windows", "calibration_length", "seed"):
            del settings[name]
    elif options.calibration is not None and Path(options.calibration).is_file():
        settings["calibration"] = hashlib.sha256(Path(options.calibration).read_bytes()).hexdigest()
    return settings


def _windows(options: Options, folder: Path, num_tokens: int, use_tqdm: bool) -> calibration.Windows:
    if options.calibration is None:
        return calibration.generated(
            folder,
            options.calibration_windows,
            num_tokens,
            options.seed,
            num_threads=options.num_threads,
            use_tqdm=use_tqdm,
        )
    tokenizer = Tokenizer.from_folder(folder)
    return calibration.from_file(options.calibration, tokenizer, options.calibration_windows, num_tokens)


def _counter(say: Say, what: str, total: int) -> Callable[[int], None]:
    done = 0

    def count(windows: int) -> None:
        nonlocal done
        done += windows
        say(f"{what}, window {done} of {total}")

    return count
