"""Beam search for the HTTP APIs: rounds of one-token requests, answered in the shape of an ordinary final output."""

from __future__ import annotations

from quire.errors import InvalidRequestError
from quire.frontend.beam_search import BeamSearch
from quire.frontend.prompts import PromptType
from quire.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.server import generation
from quire.server.generation import Generation
from quire.server.protocol.common import GenerationRequest
from quire.server.state import ServerState


async def run(state: ServerState, body: GenerationRequest, asked: Generation) -> list[RequestOutput]:
    """One final output per prompt with the n best sequences, best first. Raises QuireErrors as ordinary requests do."""
    max_logprobs = state.engine.input_processor.limits.max_logprobs
    if max_logprobs >= 0 and 2 * asked.params.n > max_logprobs:
        raise InvalidRequestError(
            "n is more beams than this server's --max-logprobs allows",
            value=asked.params.n,
            expected=f"at most {max_logprobs // 2}",
            param="n",
        )
    return [await _search(state, body, asked, prompt) for prompt in asked.prompts]


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
            cache_salt=asked.cache_salt,
            add_special_tokens=False,
            max_tokens_is_default=True,
        )
        outputs = await generation.collect(await generation.start(state, step))
        search.advance([logprobs[0] for output in outputs if (logprobs := output.outputs[0].logprobs)])
    num_prompt_tokens = len(processed.prompt_token_ids)
    completions = [
        _completion(state, index, beam, num_prompt_tokens, params)
        for index, beam in enumerate(search.result().sequences)
    ]
    return RequestOutput(asked.response_id, processed.prompt, processed.prompt_token_ids, completions, finished=True)


def _completion(
    state: ServerState, index: int, beam: BeamSearchSequence, num_prompt_tokens: int, params: BeamSearchParams
) -> CompletionOutput:
    token_ids = beam.tokens[num_prompt_tokens:]
    ended_by_eos = beam.finish_reason == "stop"
    text = ""
    if state.tokenizer is not None:
        detokenizer = state.tokenizer.new_detokenizer(beam.tokens[:num_prompt_tokens], params.skip_special_tokens)
        text = detokenizer.push(token_ids[:-1] if ended_by_eos else token_ids) + detokenizer.flush()
    return CompletionOutput(index, text, token_ids, beam.cum_logprob, None, beam.finish_reason)
