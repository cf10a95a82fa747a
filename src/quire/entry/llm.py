"""LLM: vLLM's offline API over an engine in this process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config import EngineConfig
from quire.entry.llm_engine import LLMEngine
from quire.entry.offline import UseTqdm
from quire.entry.request_arguments import refuse, wants_special_tokens
from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.frontend.beam_search import BeamSearch
from quire.frontend.blocking_renderer import BlockingRenderer
from quire.frontend.chat_messages import plain
from quire.frontend.input_processor import InputProcessor, ProcessedRequest
from quire.frontend.prompts import PromptType, split_prompts
from quire.frontend.render_process import Render
from quire.frontend.tokenizer import Tokenizer
from quire.lora.request import LoRARequest
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.metrics.reader import Metric

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None

# Other methods of vLLM's LLM. A script gets the reason, and hasattr() is False.
_ABSENT = {
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), "models here generate text only"),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), "weights and cache stay in memory until the end"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use py-spy, or torch.profiler around generate()"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "no code is sent to workers"),
    "reset_mm_cache": "models here read text only",
}


class LLM:
    """A model loaded in this process.

    `LLM(**vars(args))` takes the fields of EngineArgs or of a parser's arguments, as in vLLM's examples, and
    `LLM.from_engine_args(args)` takes EngineArgs as a whole. `llm_engine` is the engine behind it.

    Args:
        model: folder, hub id or GGUF file; None: the bundled demo model.
        chat_template: a Jinja template for chat(), or the name of one of the model's templates; None: the model's
            default template.
        **kwargs: fields of EngineConfig (vLLM's names). The error for an unknown field names the nearest one.
            With `disable_log_stats=False` the engine keeps metrics for get_metrics(), as in vLLM.

    Raises:
        ConfigError: a setting is unknown, illegal or impossible on this machine.
    """

    def __init__(self, model: str | None = None, *, chat_template: str | None = None, **kwargs: Any) -> None:
        config = EngineConfig.from_kwargs(model=model, **kwargs)
        engine = self.llm_engine = LLMEngine(config, keeps_metrics=kwargs.get("disable_log_stats") is False)
        self.config, self.resolved, self.model_config = engine.config, engine.resolved, engine.model_config
        self._runner, self._inputs, self._tokenizer = engine.runner, engine.inputs, engine.tokenizer
        self._chat_template = chat_template
        self._renderer: BlockingRenderer | None = None  # for the template and the content format that were asked last
        self._rendered_form: tuple[str | None, str] | None = None
        self._counter = itertools.count()
        self._enqueued: list[str] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """vLLM's constructor from a config."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ABSENT:
            raise AttributeError(f"vLLM's LLM.{name} does not exist in this version: {_ABSENT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs come in the order of the prompts.

        Args:
            prompts: text, token ids, a TextPrompt or TokensPrompt, or a list of these.
            sampling_params: one object for all prompts, or one for each; None: the model's defaults.
            prompt_token_ids: vLLM's older way to give token ids; then the outputs only report `prompts`.
            use_tqdm: whether to show a progress bar; a function is called in place of tqdm.
            lora_request: the adapter of all prompts, or an adapter or None for each. An adapter is read when it is
                first named.
            priority: a number for each prompt; lower numbers come first (scheduling_policy="priority").
            tokenization_kwargs: only `add_special_tokens` is known.

        Raises:
            InvalidRequestError: a request is refused before anything is computed; the message names the field. If every
                prompt fails later, the error of the first one is raised. If only some fail, their outputs have
                finish_reason "error" and the text in `error`.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        chosen = _with_token_ids(prompts, prompt_token_ids)
        add_special_tokens = wants_special_tokens(tokenization_kwargs)
        processed = self._process(
            chosen, sampling_params, priority, lora_request, add_special_tokens=add_special_tokens
        )
        return self._runner.run(processed, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Args:
            chat_template: a Jinja template, or the name of one of the model's templates; None: the default template.
            chat_template_content_format: "string" or "openai" (a list of parts); "auto": the form that the template
                reads.

        generate() describes the other arguments and the errors.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._render(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=plain(tools, "tools"),
            kwargs=plain(chat_template_kwargs, "chat_template_kwargs"),
        )
        add_special_tokens = wants_special_tokens(tokenization_kwargs, default=False)  # the template wrote them
        processed = self._process(
            prompts, sampling_params, priority, lora_request, add_special_tokens=add_special_tokens
        )
        return self._runner.run(processed, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without computing anything yet; wait_for_completion() does that. Returns their request ids.

        generate() describes the arguments. `use_tqdm` has no effect here.
        """
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        add_special_tokens = wants_special_tokens(tokenization_kwargs)
        processed = self._process(
            _with_token_ids(prompts, None),
            sampling_params,
            priority,
            lora_request,
            add_special_tokens=add_special_tokens,
        )
        self._enqueued += (request_ids := self._runner.enqueue(processed))
        return request_ids

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations like enqueue(). Returns their request ids. chat() describes the arguments."""
        refuse(mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._render(
            messages,
            chat_template,
            chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=plain(tools, "tools"),
            kwargs=plain(chat_template_kwargs, "chat_template_kwargs"),
        )
        processed = self._process(prompts, sampling_params, priority, lora_request, add_special_tokens=False)
        self._enqueued += (request_ids := self._runner.enqueue(processed))
        return request_ids

    def wait_for_completion(self, output_type: type | None = None, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """Compute all queued requests. The outputs come in the order of the queue. Raises as generate() does."""
        if output_type not in (None, RequestOutput):
            raise UnsupportedFieldError("Only text is generated here", expected="RequestOutput", param="output_type")
        request_ids, self._enqueued = self._enqueued, []
        return self._runner.wait(request_ids, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of every prompt, the best one first.

        The text of a continuation begins with its prompt.

        Args:
            concurrency_limit: the number of prompts that are searched at the same time; None: all.
        """
        params.verify()
        limits = replace(self._inputs.limits, max_logprobs=-1)  # the width decides, not the limit of a request
        inputs = InputProcessor(self._tokenizer, limits, eos_token_ids=self._inputs.eos_token_ids)
        searches = []
        for prompt in _with_token_ids(prompts, None):
            processed = inputs.process("beam", prompt, SamplingParams(max_tokens=params.max_tokens))
            searches.append(BeamSearch(processed.prompt_token_ids, params, self._inputs.eos_token_ids))
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(
                "Illegal concurrency_limit", value=concurrency_limit, expected="1 or more", param="concurrency_limit"
            )
        width = concurrency_limit or len(searches) or 1
        for begin in range(0, len(searches), width):
            self._search(searches[begin : begin + width], inputs, lora_request)
        results = [search.result() for search in searches]
        if self._tokenizer is not None:
            for sequence in itertools.chain.from_iterable(result.sequences for result in results):
                sequence.text = self._tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
        return results

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, which also applies the chat template. Raises ConfigError if the model runs without one."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of generate() without SamplingParams: the model's generation config over vLLM's defaults."""
        return self._inputs.default_params()

    def get_metrics(self) -> list[Metric]:
        """Every series of /metrics as a Counter, Gauge or Histogram of quire.metrics.reader. Raises ConfigError."""
        return self.llm_engine.get_metrics()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of devices that the model runs on."""
        return self.config.tensor_parallel_size

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self.llm_engine.reset_prefix_cache()

    def _render(
        self,
        messages: Messages | Sequence[Messages],
        template: str | None,
        content_format: str,
        **options: Any,
    ) -> list[PromptType]:
        """The text of every conversation."""
        tokenizer = self.get_tokenizer()
        if content_format not in ("auto", "string", "openai"):
            raise InvalidRequestError(
                "Unknown chat_template_content_format",
                value=content_format,
                expected="auto, string or openai",
                param="chat_template_content_format",
            )
        renderer = self._renderer_for(tokenizer, self._chat_template if template is None else template, content_format)
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        is_one = not is_list or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        texts: list[Any] = []
        texts += renderer.render([Render(plain(each, "messages"), **options) for each in conversations])
        return texts

    def _renderer_for(self, tokenizer: Tokenizer, template: str | None, content_format: str) -> BlockingRenderer:
        """The renderer for a template and a content format. Its first process starts within some tenths of a second."""
        if self._renderer is None or self._rendered_form != (template, content_format):
            if self._renderer is not None:
                self._renderer.close()
            self._renderer = BlockingRenderer(
                tokenizer.chat_templates,
                tokenizer.special_tokens,
                override=template,
                name=tokenizer.name,
                content_as_parts=None if content_format == "auto" else content_format == "openai",
            )
            self._rendered_form = (template, content_format)
        return self._renderer

    def _process(
        self,
        prompts: Sequence[PromptType],
        sampling_params: Params,
        priority: Sequence[int] | None,
        lora_request: LoRARequests,
        **options: Any,
    ) -> list[ProcessedRequest]:
        """Check all requests. If one is refused, none reaches the engine."""
        lora_requests = _per_prompt("lora_request", lora_request, len(prompts))
        params = _per_prompt("sampling_params", sampling_params, len(prompts))
        priorities = _per_prompt("priority", priority, len(prompts))
        finals: dict[int, SamplingParams] = {}  # one copy of parameters that many prompts share
        for own in params:
            if id(own) not in finals:
                finals[id(own)] = _final_only(self._inputs.default_params() if own is None else own)
        processed = [
            self._inputs.process(
                str(next(self._counter)),
                prompt,
                finals[id(own)],
                priority=own_priority or 0,
                clamp_max_tokens=True,
                **options,
            )
            for prompt, own, own_priority in zip(prompts, params, priorities, strict=True)
        ]
        return self.llm_engine.adapters.give(processed, lora_requests)

    def _search(self, searches: Sequence[BeamSearch], inputs: InputProcessor, lora_request: LoRARequest | None) -> None:
        """Run beam searches side by side. Each step of each beam is a request."""
        adapter = None if lora_request is None else self.llm_engine.adapters.find(lora_request)
        while pending := [(search, beams) for search in searches if (beams := search.pending())]:
            processed = []
            for search, beams in pending:
                params = _final_only(search.step_params())
                processed += [
                    inputs.process(str(next(self._counter)), {"prompt_token_ids": tokens}, params) for tokens in beams
                ]
            if adapter is not None:
                processed = [each.with_adapter(adapter) for each in processed]
            outputs = iter(self._runner.run(processed))
            for search, beams in pending:
                extended = [next(outputs).outputs[0].logprobs for _ in beams]
                search.advance([logprobs[0] for logprobs in extended if logprobs])


def _with_token_ids(prompts: Any, token_ids: Any) -> list[PromptType]:
    """The prompts as a list. With vLLM's older `prompt_token_ids`, the prompts are only the texts of these tokens."""
    if token_ids is None:
        return [] if isinstance(prompts, (list, tuple)) and not prompts else split_prompts(prompts)
    ids = split_prompts(token_ids)
    if prompts is None:
        return ids
    texts = split_prompts(prompts)
    if len(texts) != len(ids):
        raise InvalidRequestError(
            "prompts and prompt_token_ids have different lengths",
            value=(len(texts), len(ids)),
            expected="one list of token ids for each prompt",
            param="prompt_token_ids",
        )
    pairs: list[Any] = [{"prompt": text, "prompt_token_ids": own} for text, own in zip(texts, ids, strict=True)]
    return pairs


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """The value for each prompt, from one value for all prompts or from a list."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(
            f"{name} has the wrong length",
            value=len(value),
            expected=f"one for each of the {count} prompts",
            param=name,
        )
    return list(value)


def _final_only(params: SamplingParams) -> SamplingParams:
    """A copy of `params` that builds no output before the end, because offline callers see only the end."""
    if not isinstance(params, SamplingParams):
        return params  # the input processor refuses it
    own = copy.copy(params)
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own
