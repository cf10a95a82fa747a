"""LLM: vLLM's offline API over an engine in this process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig
from quire.engine.start import start_engine
from quire.errors import ConfigError, UnsupportedFieldError
from quire.frontend.beam_search import BeamSearch
from quire.frontend.chat_template import ChatRenderer
from quire.frontend.input_processor import InputProcessor, PromptType, split_prompts
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.tokenizer import Tokenizer
from quire.launch import open_model
from quire.messages import Command
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded in this process.

    Args:
        model: folder or hub id; None: the bundled demo model.
        **kwargs: fields of EngineConfig (vLLM's names); an unknown one is an error naming the nearest.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **kwargs)
        parts = open_model(self.config, _no_progress)
        engine = start_engine(self.config, parts.model_folder, is_server=False, progress=_no_progress)
        self.resolved = engine.resolved
        self.model_config = engine.model_config
        self._core = engine.core
        self._tokenizer = parts.tokenizer
        self._inputs: InputProcessor = parts.input_processor.with_max_model_len(self.resolved.max_model_len)
        self._outputs = OutputProcessor(self._tokenizer)
        self._counter = itertools.count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: object | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: text, token ids, a TextPrompt or TokensPrompt, or a list of these.
            sampling_params: one for all, or one per prompt; None: the model's defaults.
            priority: one per prompt, lower first (scheduling_policy="priority").

        Raises:
            InvalidRequestError: before anything is computed, naming the field.
        """
        _refuse_lora(lora_request)
        return self._run(
            self._inputs, split_prompts(prompts), sampling_params, priority, use_tqdm, add_special_tokens=True
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: object | None = None,
        *,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        _refuse_lora(lora_request)
        tokenizer = self.get_tokenizer()
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        renderer = ChatRenderer(
            tokenizer.chat_templates, tokenizer.special_tokens, override=chat_template, name=tokenizer.name
        )
        prompts: list[PromptType] = [
            renderer.render(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(self._inputs, prompts, sampling_params, priority, use_tqdm, add_special_tokens=False)

    def beam_search(self, prompts: Sequence[PromptType], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of every prompt, best first; text holds prompt and continuation."""
        params.verify()
        limits = replace(self._inputs.limits, max_logprobs=-1)  # the width decides, not what a request may ask for
        inputs = InputProcessor(self._tokenizer, limits, eos_token_ids=self._inputs.eos_token_ids)
        searches = []
        for prompt in split_prompts(prompts):
            processed = inputs.process("beam", prompt, SamplingParams(max_tokens=params.max_tokens))
            searches.append(BeamSearch(processed.prompt_token_ids, params, self._inputs.eos_token_ids))
        while pending := [(search, beams) for search in searches if (beams := search.pending())]:
            step_prompts: list[PromptType] = [{"prompt_token_ids": tokens} for _, beams in pending for tokens in beams]
            step_params = [search.step_params() for search, beams in pending for _ in beams]
            outputs = iter(self._run(inputs, step_prompts, step_params, None, False, add_special_tokens=False))
            for search, beams in pending:
                extended = [next(outputs).outputs[0].logprobs for _ in beams]
                search.advance([logprobs[0] for logprobs in extended if logprobs is not None])
        results = [search.result() for search in searches]
        if self._tokenizer is not None:
            for sequence in itertools.chain.from_iterable(result.sequences for result in results):
                sequence.text = self._tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
        return results

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the model runs without one."""
        if self._tokenizer is None:
            raise ConfigError(
                "This LLM has no tokenizer", fix="Leave skip_tokenizer_init out", param="skip_tokenizer_init"
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate() uses without SamplingParams: the model's generation config over vLLM's defaults."""
        return self._inputs.default_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self._core.command(Command("reset_prefix_cache"))
        return True

    def _run(
        self,
        inputs: InputProcessor,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        """Check everything, then run it. After an error or an interrupt nothing of this call stays in the engine."""
        params = _per_prompt("sampling_params", sampling_params, len(prompts))
        priorities = _per_prompt("priority", priority, len(prompts))
        processed = [
            inputs.process(
                str(next(self._counter)),
                prompt,
                _final_only(own or inputs.default_params()),
                priority=own_priority or 0,
                add_special_tokens=add_special_tokens,
                clamp_max_tokens=True,
            )
            for prompt, own, own_priority in zip(prompts, params, priorities, strict=True)
        ]
        finished: dict[str, RequestOutput] = {}
        bar = _progress_bar(len(processed)) if use_tqdm else None
        try:
            for request in processed:
                self._outputs.add(request)
                for message in request.requests:
                    self._core.add(message)
            while len(finished) < len(processed):
                self._step(finished, bar)
        finally:
            self._core.abort(self._outputs.abort(self._outputs.request_ids))
            if bar is not None:
                bar.close()
        return [finished[request.request_id] for request in processed]

    def _step(self, finished: dict[str, RequestOutput], bar: Any) -> None:
        result = self._outputs.process(self._core.step())
        if result.abort_ids:
            self._core.abort(result.abort_ids)
        for error in result.errors.values():
            raise error
        for output in result.outputs:
            if output.finished:
                finished[output.request_id] = output
                if bar is not None:
                    bar.update(1)


def _no_progress(phase: str, fraction: float, detail: str) -> None:
    """Offline use is quiet."""


def _refuse_lora(lora_request: object | None) -> None:
    if lora_request is not None:
        raise UnsupportedFieldError(
            "LoRA adapters are not supported in this version", fix="Leave lora_request out", param="lora_request"
        )


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or one for each."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} has the wrong length",
            value=len(value),
            expected=f"one for each of the {count} prompts",
            param=name,
        )
    return list(value)


def _final_only(params: SamplingParams) -> SamplingParams:
    """Offline callers see only the end: build no output before it."""
    own = params.clone()
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
