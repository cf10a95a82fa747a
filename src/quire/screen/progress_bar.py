"""The progress bar of offline generation, with vLLM's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.outputs import RequestOutput


class ProgressBar:
    """Counts finished prompts and shows the input and output tokens per second.

    Args:
        total: number of prompts.
        use_tqdm: True, or a function that is called like tqdm (a subclass, a partial).
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        from tqdm.auto import tqdm

        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, unit="prompt")
        self._num_input = self._num_output = 0

    def add(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        speed = f"input: {self._num_input / seconds:.2f} toks/s, output: {self._num_output / seconds:.2f} toks/s"
        self._bar.set_postfix_str(f"est. speed {speed}", refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
