"""Beam search for the HTTP APIs: rounds of one-token requests, answered in the shape of an ordinary final output."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.frontend.beam_search import BeamSearch
from quire.frontend.logprobs import LogprobDecoder
from quire.frontend.prompts import PromptType
from quire.outputs import BeamSearchSequence, CompletionOutput, PositionLogprobs, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.schedule import TokenLogprobs
from quire.server import generation
from quire.server.generation import Generation
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import GenerationRequest
from quire.server.state import ServerState


async def run(state: ServerState, body: GenerationRequest, asked: Generation) -> list[RequestOutput]:
    """One final output per prompt with the n best sequences, best first. Raises QuireErrors as ordinary requests do."""
    generation.check_fan_out(state, asked)
    max_logprobs = state.engine.input_processor.limits.max_logprobs
    if max_logprobs >= 0 and 2 * asked.params.n > max_logprobs:
        raise InvalidRequestError(
            "n is more beams than this server's --max-logprobs allows",
            value=asked.params.n,
            expected=f"at most {max_logprobs // 2}",
            param="n",
        )
    if asked.params.prompt_logprobs is not None:
        raise UnsupportedFieldError(
            "Logprobs of the prompt do not work with beam search",
            fix="Remove prompt_logprobs, or remove echo if you ask for logprobs",
            param="prompt_logprobs",
        )
    if asked.params.structured_outputs is not None:
        raise UnsupportedFieldError(
            "Calls whose form is given do not work with beam search",
            fix='Set tool_choice to "auto", and strict to false, or remove use_beam_search',
            param=body.constraint_name,
        )
    num_logprobs = asked.params.logprobs
    if num_logprobs is not None and not 0 <= num_logprobs <= 2 * asked.params.n:
        raise InvalidRequestError(
            "Beam search gives logprobs of at most twice as many tokens as it has beams",
            value=num_logprobs,
            expected=f"at most {2 * asked.params.n} with n = {asked.params.n}",
            param="top_logprobs" if isinstance(body, ChatRequest) else "logprobs",
        )
    return [await _search(state, body, asked, prompt) for prompt in asked.prompts]


async def stream(
    state: ServerState, body: GenerationRequest, asked: Generation
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Like `run`, for a streamed answer. Sequences are known at the end, so each prompt has one output, as in vLLM."""
    for index, output in enumerate(await run(state, body, asked)):
        yield index, output


async def _search(state: ServerState, body: GenerationRequest, asked: Generation, prompt: PromptType) -> RequestOutput:
    inputs = state.engine.input_processor
    processed = inputs.process(
        asked.response_id,
        prompt,
        SamplingParams(max_tokens=asked.params.max_tokens, logprobs=2 * asked.params.n),
        cache_salt=asked.cache_salt,
        add_special_tokens=asked.add_special_tokens,
        clamp_max_tokens=asked.max_tokens_is_default,
        truncation=asked.truncation,
    )
    params = BeamSearchParams(
        beam_width=asked.params.n,
        max_tokens=processed.requests[0].max_tokens,
        ignore_eos=asked.params.ignore_eos,
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        skip_special_tokens=asked.params.skip_special_tokens,
    )
    search = BeamSearch(processed.prompt_token_ids, params, inputs.eos_token_ids)
    step_params = search.step_params()
    while beams := search.pending():
        step = Generation(
            response_id=asked.response_id,
            prompts=[{"prompt_token_ids": tokens} for tokens in beams],
            params=step_params,
            priority=asked.priority,
            adapter=asked.adapter,
            cache_salt=asked.cache_salt,
            data_parallel_rank=asked.data_parallel_rank,
            add_special_tokens=False,
            max_tokens_is_default=True,
        )
        outputs = await generation.collect(await generation.start(state, step))
        search.advance([logprobs[0] for output in outputs if (logprobs := output.outputs[0].logprobs)])
    num_prompt_tokens = len(processed.prompt_token_ids)
    completions = [
        _completion(state, index, beam, num_prompt_tokens, params, has_logprobs=asked.params.logprobs is not None)
        for index, beam in enumerate(search.result().sequences)
    ]
    return RequestOutput(asked.response_id, processed.prompt, processed.prompt_token_ids, completions, finished=True)


def _completion(
    state: ServerState,
    index: int,
    beam: BeamSearchSequence,
    num_prompt_tokens: int,
    params: BeamSearchParams,
    *,
    has_logprobs: bool,
) -> CompletionOutput:
    token_ids = beam.tokens[num_prompt_tokens:]
    ended_by_eos = beam.finish_reason == "stop"
    text = ""
    if state.tokenizer is not None:
        detokenizer = state.tokenizer.new_detokenizer(beam.tokens[:num_prompt_tokens], params.skip_special_tokens)
        text = detokenizer.push(token_ids[:-1] if ended_by_eos else token_ids) + detokenizer.flush()
    logprobs = _logprobs(state, beam, num_prompt_tokens) if has_logprobs else None
    return CompletionOutput(index, text, token_ids, beam.cum_logprob, logprobs, beam.finish_reason)


def _logprobs(state: ServerState, beam: BeamSearchSequence, num_prompt_tokens: int) -> list[PositionLogprobs]:
    """Logprobs as in an ordinary output: the chosen token comes first, and texts are those of its own sequence."""
    decoder = LogprobDecoder(state.tokenizer)
    positions = []
    for token_id, choices in zip(beam.tokens[num_prompt_tokens:], beam.logprobs, strict=True):
        token_ids = [token_id, *(other for other in choices if other != token_id)]
        entries = [choices[other] for other in token_ids]
        ranks = [entry.rank or 0 for entry in entries]
        positions.append(decoder.position(TokenLogprobs(token_ids, [entry.logprob for entry in entries], ranks)))
    return positions
