"""The drafter of a worker, from the model that drafts."""

from __future__ import annotations

from typing import Any

from quire.distributed.group import Group
from quire.life_cycle import WorkerSettings
from quire.models.decoder import Decoder
from quire.models.head import Head
from quire.models.registry import CausalLM
from quire.worker.accelerator import Device
from quire.worker.captured_steps import CapturedSteps
from quire.worker.draft_model import DraftModel
from quire.worker.drafter import Drafter
from quire.worker.head_drafter import HeadDrafter, TargetStreams
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import PagedCache


def streams_for(target: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> TargetStreams | None:
    """The target's hidden states that a head reads. The target keeps them from now on, so call it before a pass is
    captured. None: no head drafts.
    """
    if not isinstance(drafter, Head):
        return None
    assert isinstance(target, Decoder), "drafter_settings refuses that"
    return TargetStreams(target, drafter, settings.most_tokens)


def drafter_of(
    model: CausalLM,
    streams: TargetStreams | None,
    cache: PagedCache,
    inputs: InputBatch,
    device: Device,
    captured: CapturedSteps | None,
    settings: WorkerSettings,
    group: Group | None = None,
) -> Drafter:
    """A drafter with the limits and the way to draft of the settings, which have a drafter. `group`: shares the
    target.
    """
    drafter = settings.drafter
    assert drafter is not None
    how: dict[str, Any] = {
        "max_tokens": settings.max_num_batched_tokens,
        "is_greedy": drafter.is_greedy,
        "group": group,
    }
    if isinstance(model, Head) and streams is not None:
        return HeadDrafter(model, streams, cache, inputs, device, captured, num_kept=drafter.positions_kept, **how)
    return DraftModel(model, cache, inputs, device, captured, max_drafts=drafter.max_drafts, **how)
