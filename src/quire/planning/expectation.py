"""What requests of a server can expect: predictions with their intervals, for the first screen and `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from quire.cost.collectives import NO_EXCHANGES
from quire.cost.model import CostModel
from quire.metrics.stopwatch import busy_machine
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Service
from quire.planning.step_costs import decode_step
from quire.settings import Record, Resolved, Setting

EXPECTED_PROMPT = 1000  # tokens of the prompt that a time to the first token is expected for, if the model holds it


def expectation(resolved: Resolved, cost: CostModel, origin: str, waited: float) -> Mapping[str, Setting]:
    """What requests are expected to get, by name, with their numbers.

    These are the tokens per second of one request, and of `max_num_seqs` together, and the seconds to the first token
    of a prompt alone.

    Args:
        origin: the origin of the constants, for people.
        waited: share of the measured time that others had the cores.
    """
    record, limits = Record(), resolved.scheduler
    for name, count in (("expected_tokens_per_second", 1), ("expected_total_tokens_per_second", limits.max_num_seqs)):
        step = decode_step(cost, count)
        least, most = count / step.high, count / step.low
        record.put(
            name,
            float(f"{count / step.seconds:.3g}"),
            "formula",
            f"{count} / {1e3 * step.seconds:.2f} ms for a step with one token of each, in short contexts; between "
            f"{least:.3g} and {most:.3g}, bound by {step.bound}; {origin}",
        )
    prompt = max(min(EXPECTED_PROMPT, resolved.model.max_model_len - 1), 1)
    lengths = RequestLengths("one", [RequestLength(prompt, 1)])
    alone = Service(cost, NO_EXCHANGES, lengths, limits.max_num_batched_tokens, 1).at(1)
    record.put(
        "expected_ttft",
        float(f"{alone.ttft.value:.3g}"),
        "formula",
        f"seconds, for a prompt of {prompt:,} tokens alone, in steps of at most {limits.max_num_batched_tokens:,}; "
        f"between {alone.ttft.low:.3g} and {alone.ttft.high:.3g}, bound by {alone.ttft_bound}; {origin}",
    )
    record.put("expectation_waited_share", round(waited, 2), "measured", busy_machine(waited) or "an idle machine")
    return record
