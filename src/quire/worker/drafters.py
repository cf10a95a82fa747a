"""Makes the drafter of a worker from the model that drafts."""

from __future__ import annotations

from quire.distributed.group import Group
from quire.life_cycle import WorkerSettings
from quire.models.decoder import Decoder
from quire.models.head import Head
from quire.models.registry import CausalLM
from quire.worker.accelerator import Device
from quire.worker.captured_steps import CapturedSteps
from quire.worker.draft_draws import DraftDraws
from quire.worker.draft_model import DraftModel
from quire.worker.drafter import Drafter
from quire.worker.head_drafter import HeadDrafter
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import PagedCache
from quire.worker.target_streams import TargetStreams


def streams_for(target: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> TargetStreams | None:
    """Let the target keep the residual streams that a head reads; None: no head reads any of this stage.

    The forward pass of the target changes with this call. So call it before a pass is captured.

    Args:
        drafter: the drafter of this rank. The drafter of a stage before the last one is on other ranks.
    """
    stage = target.config.stage
    layers = drafter.head.streams if isinstance(drafter, Head) else () if stage is None else stage.streams
    if not layers:
        return None
    assert isinstance(target, Decoder), "drafter_settings refuses that"
    return TargetStreams(target, layers, settings.most_tokens)


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
    """The drafter for the model `model`, with the limits and the method of the settings.

    Args:
        streams: the result of `streams_for`.
        group: the ranks that share the target.
    """
    drafter = settings.drafter
    assert drafter is not None
    draws = DraftDraws(inputs, device, is_greedy=drafter.is_greedy, group=group)
    given, max_tokens = (cache, inputs, draws, captured), settings.max_num_batched_tokens
    if isinstance(model, Head) and streams is not None:
        kept = drafter.positions_kept
        return HeadDrafter(model, streams, *given, max_tokens=max_tokens, num_kept=kept, runs_ahead=device.runs_ahead)
    return DraftModel(model, *given, max_tokens=max_tokens, max_drafts=drafter.max_drafts)
