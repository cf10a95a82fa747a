"""How many tokens per second to expect, from the two steps that every start measures: what the first screen says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.metrics.stopwatch import Lap, busy_machine
from quire.model_config import ModelConfig
from quire.settings import Record, Setting


def expectation(
    max_num_seqs: int, model: ModelConfig, steps: Sequence[Lap], num_tokens: int, prompt: Lap
) -> Mapping[str, Setting]:
    """The two expectations by name, with their numbers, and how much of that time others had the cores.

    A step of one token reads all weights; what further requests add to it is arithmetic, at the pace of a prompt, of
    which only the last token goes through the output layer. What attention reads of long contexts is left out.

    Args:
        steps: with one token each.
        num_tokens, prompt: a step with a prompt of so many tokens.
    """
    best = min(steps, key=lambda step: step.seconds)
    fastest, prompt_seconds, count = best.seconds, prompt.seconds, max_num_seqs
    record, blocks = Record(), model.num_block_parameters()
    output_factor = 1 + model.vocab_size * model.hidden_size / blocks
    more = prompt_seconds / num_tokens * output_factor
    record.put(
        "expected_tokens_per_second",
        _rounded(1 / fastest),
        "measured",
        f"1 / {1e3 * fastest:.2f} ms, the fastest of {len(steps)} steps with one token each",
    )
    record.put(
        "expected_total_tokens_per_second",
        _rounded(count / (fastest + (count - 1) * more)),
        "formula",
        f"max_num_seqs {count} / ({1e3 * fastest:.2f} ms for one token + {count - 1} x {1e3 * more:.3f} ms: a prompt "
        f"of {num_tokens} tokens took {1e3 * prompt_seconds:.1f} ms, x {output_factor:.2f} for the output layer); "
        "short contexts",
    )
    waited = max(best.waited, prompt.waited)
    record.put("expectation_waited_share", round(waited, 2), "measured", busy_machine(waited) or "an idle machine")
    return record


def _rounded(rate: float) -> float:
    """To three digits: more would promise too much."""
    return float(f"{rate:.3g}")
