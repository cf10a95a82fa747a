"""Messages across the boundary between the API process and the engine process: msgspec structs, never pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from quire.config import EngineConfig
from quire.option import ATTAINMENTS
from quire.sampling_params import SamplingParams
from quire.schedule import StepRecord, TokenLogprobs


class EngineLaunch(msgspec.Struct):
    """What the parent tells a new engine process. Addresses are ZMQ endpoints the parent has bound."""

    config: EngineConfig
    model_folder: str
    input_address: str
    output_address: str
    engine_index: int = 0
    is_first: bool = True  # no engine of this server was ready before
    drafter_folder: str | None = None


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True):
    """One prompt and one continuation, validated and resolved: the engine only checks what it alone knows.

    `request_id` is the engine's: no other request ever has it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = []  # EOS (unless ignore_eos) and the user's
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    fork_of: str | None = None
    wants_vector: bool = False  # of the prompt, and no token; max_tokens is 1
    is_retry: bool = False  # was accepted by an engine that has ended: the queue's limit does not count again


class Abort(msgspec.Struct, tag="abort"):
    """The caller left: free these requests within one step. No answer is sent for them."""

    request_ids: list[str]


Positive = Annotated[int, msgspec.Meta(ge=1)]


class SetLimits(msgspec.Struct, tag="limits", omit_defaults=True):
    """Move limits while serving; None leaves a limit as it is. Decoding refuses illegal values."""

    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    long_prefill_token_threshold: Annotated[int, msgspec.Meta(ge=0)] | None = None  # 0: no limit
    max_num_queued_reqs: Positive | None = None
    max_shared_prefill_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # 0: prompts go in order
    slo_ttft: Annotated[float, msgspec.Meta(ge=0)] | None = None  # seconds; 0: no target
    slo_itl: Annotated[float, msgspec.Meta(ge=0)] | None = None
    slo_attainment: Annotated[float, msgspec.Meta(ge=ATTAINMENTS[0], le=ATTAINMENTS[1])] | None = None


class Command(msgspec.Struct, tag="command"):
    """A rare control message: name is one of reset_prefix_cache, shutdown."""

    name: str


EngineInput = AddRequest | Abort | SetLimits | Command


_encode_logprobs = msgspec.msgpack.Encoder().encode
_decode_logprobs = msgspec.msgpack.Decoder(TokenLogprobs).decode


def pack(entry: TokenLogprobs) -> msgspec.Raw:
    """One position of RequestDelta.prompt_logprobs."""
    return msgspec.Raw(_encode_logprobs(entry))


def unpack(packed: msgspec.Raw) -> TokenLogprobs:
    """The reverse of `pack`."""
    return _decode_logprobs(packed)


class RequestDelta(msgspec.Struct, omit_defaults=True):
    """What one step added to one request. Times are durations in seconds since the engine received the request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    # All of them at once, with the first sampled token, as `pack` writes them: unpacking those of a long prompt takes
    # too long for an event loop.
    prompt_logprobs: list[msgspec.Raw] | None = None
    vector: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_seconds: float | None = None  # arrival to first scheduling; with the first delta
    error_code: str | None = None  # QuireError.code of `error`, where it is one


class _FromEngine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an engine says, and which one: its index among the engines of one front end."""

    engine_index: int = 0


class EngineOutputs(_FromEngine, tag="outputs", omit_defaults=True):
    """One message per step for all requests that changed."""

    deltas: list[RequestDelta]
    record: StepRecord | None = None


class Pace(msgspec.Struct, frozen=True):
    """How long steps are predicted to take, in seconds."""

    fastest_step: float  # of one token of one request: hardly ever less
    usual_step: float  # of the same: hardly ever more
    per_prompt_token: float  # while nobody else has a token in the step
    per_prompt_pair: float  # of a prompt's token and one before it, beside that

    def prompt_seconds(self, num_tokens: float) -> float:
        """Of a prompt alone."""
        return num_tokens * (self.per_prompt_token + num_tokens / 2 * self.per_prompt_pair)


class EngineReady(_FromEngine, tag="ready"):
    """Sent once a real token has been produced: what the front end needs to know of the loaded model."""

    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    resolved: dict[
        str, object
    ] = {}  # the resolved settings with their sources, for GET /v1/config and the first screen
    pace: Pace | None = None


# How a start reports how far it is: (phase, fraction, detail), the first three fields of EngineProgress. May be called
# from any thread.
Progress = Callable[[str, float, str], None]


class EngineProgress(_FromEngine, tag="progress"):
    """Start-up progress: phase is load (reading and packing) or warm up; fraction in 0..1."""

    phase: str
    fraction: float
    detail: str = ""
    seconds: float = 0.0  # since the phase began


class EngineBeat(_FromEngine, tag="beat"):
    """Sent every second from a thread of its own, whatever the engine does: a process that is stopped sends none."""

    predicted_seconds: float  # of the batches that are being computed; 0: none are


class EngineFailed(_FromEngine, tag="failed"):
    """The engine could not start or has ended: a message fit for the user."""

    message: str
    code: str = "engine_dead"


EngineMessage = EngineOutputs | EngineReady | EngineProgress | EngineBeat | EngineFailed
