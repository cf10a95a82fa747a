"""Calibration text: windows of token ids from a file, or from the model's own writing."""

from __future__ import annotations

import json
import random
from pathlib import Path

from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer

Windows = list[list[int]]


def from_file(path: str, tokenizer: Tokenizer, num_windows: int, num_tokens: int) -> Windows:
    """Windows of `num_tokens` tokens, spread evenly over a UTF-8 file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The calibration text cannot be read: {error}", expected="a UTF-8 text file", param="calibration"
        ) from error
    token_ids = tokenizer.encode(text)
    if len(token_ids) < num_tokens:
        raise ConfigError(
            "The calibration text is too short",
            value=f"{len(token_ids)} tokens",
            expected=f"{num_tokens} or more",
            fix="Take a longer text, or lower --calibration-length",
            param="calibration",
        )
    count = min(num_windows, len(token_ids) // num_tokens)
    last = len(token_ids) - num_tokens
    starts = [round(i * last / max(count - 1, 1)) for i in range(count)]
    return [token_ids[start : start + num_tokens] for start in starts]


def generated(
    folder: Path, num_windows: int, num_tokens: int, seed: int, *, num_threads: int | None, use_tqdm: bool
) -> Windows:
    """Texts that the model writes at temperature 1, which resemble its training data (LLM-QAT, arXiv 2305.17888).

    Each text begins with the model's token for the begin of a text, or with a random token if it has none.
    """
    from quire.entry.llm import LLM
    from quire.sampling_params import SamplingParams

    llm = LLM(str(folder), max_model_len=num_tokens, seed=seed, num_threads=num_threads, generation_config="vllm")
    rng = random.Random(seed)
    begin = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("bos_token_id")
    vocab_size = llm.model_config.vocab_size
    firsts = [begin if isinstance(begin, int) else rng.randrange(vocab_size) for _ in range(num_windows)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=num_tokens - 1, ignore_eos=True, seed=seed + i, detokenize=False)
        for i in range(num_windows)
    ]
    outputs = llm.generate([[first] for first in firsts], params, use_tqdm=use_tqdm)
    return [[first, *output.outputs[0].token_ids] for first, output in zip(firsts, outputs, strict=True)]
