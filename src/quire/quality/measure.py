"""Runs a base and, one after another, several models over the same windows of a text, and compares them.

The base stays in memory beside one model at a time. Both compute a chunk of a window; their logits are compared over
the whole vocabulary and dropped. So nothing is written to disk (8,192 tokens of a vocabulary of 152k would be 5 GB),
and memory does not grow with the text. The price is one more pass of the base for every further model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.engine.bring_up import bring_up
from quire.entry.launch import find_model
from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer
from quire.messages import Progress
from quire.quality.divergence import Positions, compare
from quire.quality.summary import Quality, summarize
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import DeviceWorker

STEP_TOKENS = 512  # tokens of one forward pass; they limit the memory of activations

Advance = Callable[[int], None]  # the argument: positions that were done since the last call


@dataclass(frozen=True)
class Text:
    """Token ids of a text, cut into windows. Each window begins like a prompt."""

    windows: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    @property
    def num_predicted(self) -> int:
        return self.num_tokens - len(self.windows)


@dataclass(frozen=True)
class Row:
    """One compared model and its result."""

    name: str
    quality: Quality
    weight_bytes: int


def read_text(path: str, base: EngineConfig, models: Sequence[EngineConfig], context: int, max_tokens: int) -> Text:
    """The tokens of a UTF-8 file. They must be the same for all models.

    Args:
        context: the number of tokens of a window.
        max_tokens: the most tokens that are read from the file.

    Raises:
        ConfigError: the file is not text or too short, the windows are too small, or the models' tokenizers differ.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The text cannot be read: {error}", expected="a UTF-8 text file", param="text") from error
    base_folder = find_model(base, None, weights=False)[0]
    tokenizer = Tokenizer.from_folder(base_folder)
    prefix = _prefix(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for folder in {find_model(model, None, weights=False)[0] for model in models} - {base_folder}:
        other = Tokenizer.from_folder(folder)
        if _prefix(other) != prefix or other.encode(text, add_special_tokens=False) != token_ids:
            raise ConfigError(
                "The models have different tokenizers: their predictions cannot be compared token by token",
                value=[str(base_folder), str(folder)],
                fix="Compare a model with the one it was made from",
                param="against",
            )
    token_ids = token_ids[:max_tokens]
    size = context - len(prefix)
    if size < 1:
        raise ConfigError(
            "The windows have no room for text after the tokens that begin every prompt",
            value=context,
            expected=f"more than {len(prefix)} tokens",
            param="context",
        )
    pieces = [prefix + token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    windows = [piece for piece in pieces if len(piece) > 1]
    if not windows:
        raise ConfigError("The text is too short", value=len(token_ids), expected="two tokens or more", param="text")
    return Text(windows)


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before every prompt."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def is_quantized(config: EngineConfig) -> bool:
    """Whether the checkpoint itself is quantized."""
    return find_model(config, None, weights=False)[2].quantized is not None


def download(config: EngineConfig, progress: Progress) -> None:
    """Download the model's files, if they are not on this machine. Raises ConfigErrors."""
    find_model(config, progress, weights=True)


@dataclass(frozen=True)
class Loaded:
    """A loaded model."""

    runner: ModelRunner
    dtype: str


def load(config: EngineConfig, progress: Progress) -> Loaded:
    """Load a model with the weights, kernels and KV cache of a server. Raises QuireErrors."""
    *_, model_config = find_model(config, progress, weights=True)
    worker = DeviceWorker(model_config, progress)
    running = bring_up(config, model_config, (worker,), is_server=False, progress=progress)
    return Loaded(worker.runner, running.resolved.model.dtype)


def measure(
    text: Text, base: ModelRunner, named: Sequence[tuple[str, EngineConfig]], advance: Advance
) -> Iterator[Row]:
    """Compare one model after another with the base."""
    for name, config in named:
        yield _row(text, base, name, config, advance)


def _row(text: Text, base: ModelRunner, name: str, config: EngineConfig, advance: Advance) -> Row:
    """Compare one model. After the return its memory is free for the next one."""
    runner = load(config, lambda phase, fraction, detail: None).runner
    return Row(name, summarize(compare_runners(text, base, runner, advance)), runner.model.weight_bytes())


def compare_runners(
    text: Text, base: ModelRunner, model: ModelRunner, advance: Advance = lambda count: None
) -> list[Positions]:
    """The comparison of every window, at all positions except the last, which has no next token."""
    _check_vocabularies(base, model)
    windows = []
    for window in text.windows:
        next_tokens = torch.tensor(window[1:])
        parts, start = [], 0
        for base_XV, model_XV in zip(
            base.sequence_logits(window[:-1], STEP_TOKENS), model.sequence_logits(window[:-1], STEP_TOKENS), strict=True
        ):
            stop = start + len(base_XV)
            parts.append(compare(base_XV, model_XV, next_tokens[start:stop]))
            advance(stop - start)
            start = stop
        windows.append(Positions.joined(parts))
    return windows


def _check_vocabularies(base: ModelRunner, model: ModelRunner) -> None:
    sizes = [runner.model.config.vocab_size for runner in (base, model)]
    if sizes[0] != sizes[1]:
        raise ConfigError("The models have vocabularies of different sizes", value=sizes, param="against")


def as_dict(text: Text, base_name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The object for --json."""
    return {
        "base": base_name,
        "num_windows": len(text.windows),
        "num_tokens": text.num_tokens,
        "rows": [{"name": row.name, "weight_bytes": row.weight_bytes} | row.quality.as_dict() for row in rows],
    }
