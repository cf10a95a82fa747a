"""Chooses the replica for a request: the one with the least work left, in seconds that the cost model predicts.

Least-work-left is the policy of Harchol-Balter, Crovella and Murta, "On choosing a task assignment policy for a
distributed server system" (Journal of Parallel and Distributed Computing 59, 1999). The work of a replica is

    P + A * step(min(R, S), K) * max(R / S, 1)

- P: seconds to compute the prompts that were sent to it and are not computed yet, as Admission counts them.
- R: its continuations without an end, and one more for the new request. S: the places in its batch.
- K: tokens of context that a step of its answers reads: the context of its last step, and the prompts in P.
- step(rows, tokens): the predicted seconds of a step with one token of each answer (Pace.answer_step).
- A: the steps that recent answers took, the mean over all replicas.

A and the step times are the same for all replicas, which have the same model and settings. Otherwise a difference by
chance between their recent answers or their calibrations would weigh more than a request. A replica that is slower than
the others ends its requests later, so it has more of them left.

The prompt of the new request is left out, because it takes the same time everywhere. Everything is a count or a sum
that the replica keeps anyway: a choice takes time in proportion to the replicas, not to the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.messages import Pace


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work that is left for a replica.

    Args:
        prompt_seconds: the time of prompts that are not computed yet.
        num_rows: the number of continuations that have not ended.
        num_places: the number of continuations that may run at the same time.
        num_kv_tokens: the tokens of context that a step of all running answers reads.
    """

    prompt_seconds: float
    num_rows: int
    num_places: int
    num_kv_tokens: float


def work_seconds(backlog: Backlog, pace: Pace, answer_steps: float) -> float:
    """The predicted seconds of a replica's work with one more request: see the module's text."""
    num_rows = backlog.num_rows + 1
    step = pace.answer_step(min(num_rows, backlog.num_places), backlog.num_kv_tokens)
    return backlog.prompt_seconds + answer_steps * step * max(num_rows / backlog.num_places, 1.0)
