"""Workloads with a name or in a file: the options of each. Lengths of named ones are typical assumptions."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from quire.compat.names import nearest
from quire.errors import ConfigError
from quire.measure.options import DATASETS

NAMED: dict[str, dict[str, Any]] = {
    # A system prompt that all chats share, and turns of very different length.
    "chat": {
        "dataset_name": "random",
        "random_prefix_len": 200,
        "random_input_len": 300,
        "random_output_len": 250,
        "random_range_ratio": "0.8",
    },
    # Questions about one of a few long documents.
    "rag": {
        "dataset_name": "prefix_repetition",
        "prefix_repetition_num_prefixes": 20,
        "prefix_repetition_prefix_len": 1500,
        "prefix_repetition_suffix_len": 100,
        "prefix_repetition_output_len": 150,
    },
    # A long file, and a short completion in it.
    "code": {
        "dataset_name": "random",
        "random_input_len": 1200,
        "random_output_len": 60,
        "random_range_ratio": "0.5",
    },
}
LENGTHS = re.compile(r"random:([1-9]\d*)/([1-9]\d*)")


def named_workload(name: str) -> dict[str, Any]:
    """Options of Workload that `chat`, `rag`, `code`, `random:IN/OUT` or a data set stands for. Raises ConfigError."""
    if name in NAMED:
        return NAMED[name]
    if (lengths := LENGTHS.fullmatch(name)) is not None:
        num_in, num_out = map(int, lengths.groups())
        return {"dataset_name": "random", "random_input_len": num_in, "random_output_len": num_out}
    if name in DATASETS:
        return {"dataset_name": name}
    near = nearest(name, [*NAMED, *DATASETS])
    raise ConfigError(
        "Unknown workload",
        value=name,
        expected=f"{', '.join(NAMED)}, random:IN/OUT in tokens, or a data set ({', '.join(DATASETS)})",
        fix=f"Did you mean {near!r}?" if near else None,
        param="workload",
    )


def workload_of(name: str) -> dict[str, Any]:
    """Options of Workload that a name, as of `named_workload`, or a file stands for.

    A file is a timed trace, prompts as JSON lines, or ShareGPT's JSON: its first line says which. All of it is read.
    Raises ConfigError.
    """
    if not Path(name).is_file():
        return named_workload(name)
    with open(name, encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    common = {"dataset_path": name, "num_prompts": sys.maxsize, "oversample": False}
    if first.lstrip().startswith("["):
        return common | {"dataset_name": "sharegpt"}
    if isinstance(row, dict) and "input_length" in row:
        return common | {"dataset_name": "timed_trace"}
    if isinstance(row, dict) and "prompt" in row:
        return common | {"dataset_name": "custom", "custom_output_len": -1 if "output_tokens" in row else 256}
    raise ConfigError(
        f"The first line of {name} is of no workload that is known",
        expected="a list of conversations, or an object with input_length and output_length, or with prompt",
        param="workload",
    )
