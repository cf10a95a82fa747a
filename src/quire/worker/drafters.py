"""The drafter of a worker, from the model that drafts."""

from __future__ import annotations

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
    """What a head reads of its target, which keeps it from now on: before a pass is captured. None: no head drafts."""
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
) -> Drafter:
    """With the limits and the way to draft of the settings, which have a drafter."""
    drafter = settings.drafter
    assert drafter is not None
    max_tokens, is_greedy = settings.max_num_batched_tokens, drafter.is_greedy
    if isinstance(model, Head) and streams is not None:
        kept = drafter.positions_kept
        return HeadDrafter(
            model, streams, cache, inputs, device, captured, max_tokens=max_tokens, num_kept=kept, is_greedy=is_greedy
        )
    limits = {"max_tokens": max_tokens, "max_drafts": drafter.max_drafts}
    return DraftModel(model, cache, inputs, device, captured, **limits, is_greedy=is_greedy)
