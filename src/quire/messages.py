"""Messages across the boundary between the API process and the engine process: msgspec structs, never pickle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from quire.config import EngineConfig
from quire.lora.facts import AdapterFacts
from quire.option import ATTAINMENTS
from quire.sampling_params import SamplingParams
from quire.schedule import StepRecord, TokenLogprobs


class UnixSockets(msgspec.Struct, tag="unix", frozen=True):
    """ZMQ endpoints that the front end has bound: `ipc://` and a path in a folder of mode 0700."""

    input_address: str  # the address to which the engine's messages go
    output_address: str


class ServerAddress(msgspec.Struct, tag="tcp", frozen=True):
    """Where the front end waits for an engine on any machine that knows the cluster key."""

    address: str
    port: int


class EngineLaunch(msgspec.Struct):
    """The parent's first message to a new engine process."""

    config: EngineConfig
    model_folder: str  # "": the process finds it on its machine
    link: UnixSockets | ServerAddress
    engine_index: int = 0
    is_first: bool = True  # whether no engine of this server was ready before
    drafter_folder: str | None = None
    free_memory_bytes: int | None = None  # RAM when the server started, for all of its replicas
    gets_tokenizer: bool = False  # whether its first message brings the tokenizer; it is ready after that
    checkpoint: str = ""  # nodes.checkpoint of the model that an engine on another machine must find


class Fork(msgspec.Struct, frozen=True):
    """A further continuation of a prompt: what it has in place of the first one's."""

    request_id: str
    seed: int | None
    output_token_ids: list[int] = []


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True):
    """One prompt and one continuation, validated and resolved. The engine checks only its own limits.

    `request_id` is unique: no other request of the engine ever has it. Further continuations of the prompt come with it
    as `forks` (`joined`), and are messages of their own in the engine (`continuations`).

    A request that another engine had begun comes with the tokens that this engine gave. It goes on after them as a
    preempted request does.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int] = []  # EOS (unless ignore_eos) and the user's
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None  # AdapterFacts.digest of a loaded adapter
    fork_of: str | None = None
    wants_vector: bool = False  # the request gets a vector of the prompt instead of tokens; max_tokens is 1
    output_token_ids: list[int] = []  # known output tokens; they count for max_tokens and are not sent back
    is_retry: bool = False  # an engine that has ended had accepted it, so the queue's limit does not count
    lane: int | None = None  # the lane that computes it; None: the lane with the least work
    forks: list[Fork] = []

    def continuations(self) -> Iterator[AddRequest]:
        """The first continuation, then its forks. They share the prompt and the lists of the parameters."""
        yield msgspec.structs.replace(self, forks=[])
        for fork in self.forks:
            params = copy.copy(self.sampling_params)
            params.seed, params.prompt_logprobs = fork.seed, None
            yield msgspec.structs.replace(
                self,
                request_id=fork.request_id,
                sampling_params=params,
                output_token_ids=fork.output_token_ids,
                fork_of=self.request_id,
                forks=[],
            )


def joined(messages: Sequence[AddRequest]) -> AddRequest:
    """One message for several continuations of a prompt, so that what they share is sent once."""
    first, *others = messages
    forks = [Fork(each.request_id, each.sampling_params.seed, each.output_token_ids) for each in others]
    return msgspec.structs.replace(first, fork_of=None, forks=forks)


class Abort(msgspec.Struct, tag="abort"):
    """The caller has left. The engine frees these requests within one step, and sends no answer for them."""

    request_ids: list[str]


Positive = Annotated[int, msgspec.Meta(ge=1)]


class SetLimits(msgspec.Struct, tag="limits", omit_defaults=True):
    """Changes limits while serving. None leaves a limit as it is. Decoding refuses illegal values."""

    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    long_prefill_token_threshold: Annotated[int, msgspec.Meta(ge=0)] | None = None  # 0: no limit
    max_num_queued_reqs: Positive | None = None
    max_shared_prefill_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # 0: prompts go in order
    spec_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # most drafts of a request in a step
    slo_ttft: Annotated[float, msgspec.Meta(ge=0)] | None = None  # seconds; 0: no target
    slo_itl: Annotated[float, msgspec.Meta(ge=0)] | None = None
    slo_attainment: Annotated[float, msgspec.Meta(ge=ATTAINMENTS[0], le=ATTAINMENTS[1])] | None = None


class UseTokenizer(msgspec.Struct, tag="tokenizer", frozen=True):
    """The tokenizer whose vocabulary grammars use. If an engine gets this message, it is the first one."""

    tokenizer: str  # the content of a tokenizer.json
    eos_token_ids: list[int]  # end an output where the grammar allows it


class LoadAdapter(msgspec.Struct, tag="load_adapter", omit_defaults=True):
    """Asks the engine to read and check an adapter's folder, and to keep the adapter. The answer is an AdapterState.

    If the digest is given, another engine has read the adapter. Then this engine reads it when a request needs it, and
    sends no answer.
    """

    operation: int  # chosen by the sender, returned with the answer
    path: str
    digest: str | None = None  # the content that it must have; with other content, its requests end with an error
    is_awaited: bool = False  # a request waits for the answer


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Takes back one LoadAdapter. After the last one, no new request names the digest; earlier ones finish with it."""

    digest: str
    path: str


class ObservedOverhead(msgspec.Struct, tag="overhead"):
    """The time that the front end has taken for one request, outside of the engine: see cost.overhead."""

    num_prompt_tokens: int
    seconds: float


class Command(msgspec.Struct, tag="command"):
    """A rare control message: name is one of reset_prefix_cache, shutdown."""

    name: str


EngineInput = AddRequest | Abort | SetLimits | UseTokenizer | LoadAdapter | UnloadAdapter | ObservedOverhead | Command


_encode_logprobs = msgspec.msgpack.Encoder().encode
_decode_logprobs = msgspec.msgpack.Decoder(TokenLogprobs).decode


def pack(entry: TokenLogprobs) -> msgspec.Raw:
    """One position of RequestDelta.prompt_logprobs."""
    return msgspec.Raw(_encode_logprobs(entry))


def unpack(packed: msgspec.Raw) -> TokenLogprobs:
    """The reverse of `pack`."""
    return _decode_logprobs(packed)


class RequestDelta(msgspec.Struct, omit_defaults=True):
    """One step's results for one request. Times are seconds since the engine received the request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    # All positions at once, with the first sampled token, in the form of `pack`. Unpacking the logprobs of a long
    # prompt takes too long for an event loop.
    prompt_logprobs: list[msgspec.Raw] | None = None
    vector: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_seconds: float | None = None  # arrival to first scheduling; with the first delta
    drafts: tuple[int, int] | None = None  # how many drafts this step verified, and how many of them were accepted
    error_code: str | None = None  # QuireError.code of `error`, if it is a QuireError


class _FromEngine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message from an engine, with its index among the engines of one front end."""

    engine_index: int = 0


class EngineOutputs(_FromEngine, tag="outputs", omit_defaults=True):
    """The deltas of one step, for all requests that changed."""

    deltas: list[RequestDelta]
    record: StepRecord | None = None


class EngineBegun(_FromEngine, tag="begun"):
    """The engine begins to prepare or to compute these requests, which other engines have lost.

    It has left the process before a grammar is compiled or an adapter is read for a request, and before its first step.
    If scheduling fails, it names all requests that wait, because each of them may be the reason.
    """

    request_ids: list[str]


class Pace(msgspec.Struct, frozen=True):
    """Predicted times of steps, in seconds."""

    fastest_step: float  # a step with one token of one request hardly ever takes less
    usual_step: float  # the same step hardly ever takes more
    per_prompt_token: float  # if no other request has a token in the step
    per_prompt_pair: float  # in addition, for each pair of a prompt's token and one before it
    first_row: float = 0.0  # a step with one token of one answer, without its context
    per_row: float = 0.0  # in addition, for each further answer in the step
    per_kv_token: float = 0.0  # in addition, for each token of context of these answers

    def prompt_seconds(self, num_tokens: float) -> float:
        """The time of a prompt that runs alone."""
        return num_tokens * (self.per_prompt_token + num_tokens / 2 * self.per_prompt_pair)

    def answer_step(self, num_rows: int, num_kv_tokens: float) -> float:
        """The time of a step with one token of each of `num_rows` answers, at least one."""
        return self.first_row + (num_rows - 1) * self.per_row + num_kv_tokens * self.per_kv_token


class EngineReady(_FromEngine, tag="ready"):
    """Facts about the loaded model for the front end. It is sent after the first real token."""

    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    resolved: dict[str, object] = {}  # the settings with their sources, for GET /v1/config and the first screen
    pace: Pace | None = None
    num_lanes: int = 1  # each has as many blocks, requests that run, and tokens in a step


# The progress of a start: (phase, fraction, detail), the first three fields of EngineProgress. Any thread may call it.
Progress = Callable[[str, float, str], None]


WARM_UP = "warm up"


class EngineProgress(_FromEngine, tag="progress"):
    """Start-up progress: phase is load (reading and packing) or WARM_UP; fraction in 0..1."""

    phase: str
    fraction: float
    detail: str = ""
    seconds: float = 0.0  # since the phase began

    @property
    def stage(self) -> tuple[bool, float]:
        """A number that grows during a start."""
        return self.phase == WARM_UP, self.fraction


class EngineBeat(_FromEngine, tag="beat", omit_defaults=True):
    """A sign of life. A thread sends it every second, also while the engine computes. A stopped process sends none.

    These fields are for an engine with several ranks:
        rank: the number and place of the rank in this process.
        late_ranks: the ranks for which others wait in a step now, with their places and what they do.
        rank_timeout_seconds: the most seconds that a rank waits for another one.
    """

    predicted_seconds: float  # the predicted time of the batches in flight; 0: there are none
    rank: str = ""
    late_ranks: str = ""
    rank_timeout_seconds: int = 0


class AdapterState(_FromEngine, tag="adapter", omit_defaults=True):
    """The result of reading an adapter: its facts, or an error for the user. The engine and other adapters go on."""

    path: str
    operation: int | None = None  # the number of the LoadAdapter; None: requests waited for the adapter
    seconds: float = 0.0
    facts: AdapterFacts | None = None
    error: str | None = None
    error_code: str | None = None  # QuireError.code of `error`


class EngineFailed(_FromEngine, tag="failed"):
    """The engine could not start or has ended. The message is for the user."""

    message: str
    code: str = "engine_dead"


EngineMessage = EngineOutputs | EngineBegun | EngineReady | EngineProgress | EngineBeat | AdapterState | EngineFailed
