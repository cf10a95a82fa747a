"""LLM as a vLLM script uses it: names, arguments, prompt shapes, sampling fields and outputs, on the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import quire
import quire.demo
from quire import LLM, SamplingParams
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedFieldError
from quire.metrics import reader
from tests.e2e import reference
from tests.e2e.serving import Program

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = reference.prompts()[0]
MESSAGES = [{"role": "user", "content": reference.QUESTIONS[0]}]

# vLLM's offline example in its own shape: only the name in the import is ours.
SCRIPT = """
from quire import LLM, EngineArgs, SamplingParams
from quire.sampling_params import BeamSearchParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
llm = LLM(**vars(EngineArgs(model={model!r}, enforce_eager=True, max_num_seqs=16, kv_cache_memory_bytes=1 << 24)))
for output in llm.generate(prompts, sampling_params):
    print(f"Prompt: {{output.prompt!r}}, Generated text: {{output.outputs[0].text!r}}")
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template([{{"role": "user", "content": "Hi"}}], tokenize=False, add_generation_prompt=True)
print(repr(text), llm.get_world_size(), tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text)
"""


def _tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    (output,) = llm.generate(prompt, params, use_tqdm=False, **options)
    return output.outputs[0].token_ids


def test_vllm_script(tmp_path: Path) -> None:
    script = tmp_path / "offline_inference.py"
    script.write_text(SCRIPT.format(model=str(quire.demo.path())))
    result = Program((str(script),)).run()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == ["Prompt: 'Hello", "Prompt: 'The capital of France is'"]
    assert lines[2] == r"'<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n' 1 True"
    assert "Processed prompts" in result.stderr
    assert "toks/s, output:" in result.stderr


def test_prompt_shapes(llm: LLM) -> None:
    ids = reference.tokenizer().encode(QUESTION)
    expected = reference.greedy(QUESTION, 12)
    shapes: list[Any] = [QUESTION, ids, {"prompt": QUESTION}, {"prompt_token_ids": ids}, tuple(ids)]
    for shape in shapes:
        assert _tokens(llm, shape) == expected, shape
    outputs = llm.generate(shapes, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * len(shapes)
    assert [output.prompt for output in outputs] == [QUESTION, None, QUESTION, None, None]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert all(output.finished for output in outputs)
    assert llm.generate([], GREEDY) == []


def test_older_prompt_token_ids_argument(llm: LLM) -> None:
    ids, expected = reference.tokenizer().encode(QUESTION), reference.greedy(QUESTION, 12)
    assert _tokens(llm, None, prompt_token_ids=ids) == expected
    outputs = llm.generate(["a", "b"], GREEDY, prompt_token_ids=[ids, ids], use_tqdm=False)
    assert [(output.prompt, output.outputs[0].token_ids) for output in outputs] == [("a", expected), ("b", expected)]
    with pytest.raises(InvalidRequestError, match="different lengths"):
        llm.generate("a", GREEDY, prompt_token_ids=[ids, ids])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"lora_request": object()}, "lora_request"),
        ({"lora_request": [object()]}, "lora_request"),
        ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs"),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": 4}}, "tokenization_kwargs"),
        ({"priority": [1, 2]}, "priority"),
    ],
)
def test_unsupported_arguments_are_refused(llm: LLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(QUESTION, GREEDY, use_tqdm=False, **options)
    assert caught.value.param == param
    if param not in ("priority",):
        assert isinstance(caught.value, UnsupportedFieldError)


def test_neutral_arguments_are_accepted(llm: LLM) -> None:
    neutral = {"lora_request": [None], "mm_processor_kwargs": {}, "tokenization_kwargs": {"add_special_tokens": False}}
    assert _tokens(llm, QUESTION, **neutral) == reference.greedy(QUESTION, 12)


def test_metrics_are_objects_of_vllms_shape() -> None:
    llm = LLM(disable_log_stats=False, max_num_seqs=4, kv_cache_memory_bytes=1 << 24, served_model_name="m")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate(["Hello", "World"], params, use_tqdm=False)
    metrics = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    generated = metrics["vllm:generation_tokens", "m", "0"]
    assert isinstance(generated, reader.Counter)
    assert generated.value == 24
    assert metrics["vllm:request_success", "m", "0", "length"].value == 2
    running = metrics["vllm:num_requests_running", "m", "0"]
    assert isinstance(running, reader.Gauge)
    assert running.value == 0
    lengths = metrics["vllm:request_generation_tokens", "m", "0"]
    assert isinstance(lengths, reader.Histogram)
    assert (lengths.count, lengths.sum, lengths.buckets["10.0"], lengths.buckets["+Inf"]) == (2, 24, 0, 2)
    steps = metrics["vllm:iteration_tokens_total", "m", "0"]
    assert isinstance(steps, reader.Histogram)
    assert steps.sum == sum(len(reference.tokenizer().encode(text)) + 12 for text in ("Hello", "World"))


def test_metrics_are_kept_on_request_only(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_absent_methods_say_why(llm: LLM) -> None:
    for name in ("embed", "classify", "score", "encode", "sleep", "wake_up", "collective_rpc", "apply_model"):
        assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="generate text only"):
        llm.embed("Hello")
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        llm.generat("Hello")


def test_chat_arguments(llm: LLM) -> None:
    expected = reference.greedy(QUESTION, 12)
    parts = [{"role": "user", "content": [{"type": "text", "text": reference.QUESTIONS[0]}]}]
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ suffix }}"

    def tokens(messages: Any, **options: Any) -> list[int]:
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        return output.outputs[0].token_ids

    assert tokens(MESSAGES) == tokens(parts) == expected
    assert tokens(MESSAGES, chat_template_content_format="string") == expected
    own = {"chat_template": template, "chat_template_kwargs": {"suffix": "<|im_start|>assistant\n"}}
    assert tokens(MESSAGES, **own) == expected
    unfinished = [*MESSAGES, {"role": "assistant", "content": "`os.path.join("}]
    continued = tokens(unfinished, add_generation_prompt=False, continue_final_message=True)
    assert continued == reference.greedy(QUESTION + "`os.path.join(", 12)
    with pytest.raises(InvalidRequestError, match="chat_template_content_format"):
        tokens(MESSAGES, chat_template_content_format="parts")
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        tokens([])


def test_default_params_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_n_continuations(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=12)
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    (again,) = llm.generate("Hello", params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_seeds_reproduce_in_any_company(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=12) for seed in range(6)]
    alone = [_tokens(llm, "Hello", own) for own in params]
    together = llm.generate(["Hello"] * 6, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert len(set(map(tuple, alone))) == 6
    unseeded = SamplingParams(temperature=1.2, max_tokens=12)
    assert _tokens(llm, "Hello", unseeded) != _tokens(llm, "Hello", unseeded), "two requests drew the same seed"


def test_stop_strings(llm: LLM) -> None:
    whole = llm.generate(QUESTION, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)[0].outputs[0].text
    word = "pathname"
    assert word in whole
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["nothing like it", word])
    completion = llm.generate(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert completion.text == whole[: whole.index(word)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", word)
    params.include_stop_str_in_output = True
    completion = llm.generate(QUESTION, params, use_tqdm=False)[0].outputs[0]
    assert completion.text == whole[: whole.index(word) + len(word)]


def test_stop_token_ids(llm: LLM) -> None:
    expected = reference.greedy(QUESTION, 12)
    stop = expected[4]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop])
    (output,) = llm.generate(QUESTION, params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[: expected.index(stop) + 1]
    assert output.outputs[0].stop_reason == stop


def test_min_tokens_and_ignore_eos(llm: LLM) -> None:
    prompts, greedy = reference.chat_prompts(), SamplingParams(temperature=0.0, max_tokens=100)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    prompt = next(
        text for text, output in zip(prompts, outputs, strict=True) if output.outputs[0].finish_reason == "stop"
    )
    natural = reference.greedy(prompt, 100)
    assert natural[-1] == reference.EOS
    longer = len(natural) + 4
    tokens = _tokens(llm, prompt, SamplingParams(temperature=0.0, max_tokens=longer + 8, min_tokens=longer))
    assert len(tokens) >= longer
    assert reference.EOS not in tokens[:longer]
    tokens = _tokens(llm, prompt, SamplingParams(temperature=0.0, max_tokens=longer, ignore_eos=True))
    assert len(tokens) == longer
    assert tokens[: len(natural)] == natural


def test_bad_words(llm: LLM) -> None:
    greedy = reference.greedy(QUESTION, 30)
    encode = reference.tokenizer().encode
    texts = [reference.tokenizer().token_text(token) for token in greedy]
    words = [text[1:] for text in texts if text[0] == " " and text[1:].isalpha() and len(encode(text[1:])) == 1]
    at = texts.index(" " + words[0])
    tokens = _tokens(llm, QUESTION, SamplingParams(temperature=0.0, max_tokens=30, bad_words=words[:1]))
    assert tokens[:at] == greedy[:at], "nothing changes before the word"
    assert greedy[at] not in tokens
    common = ["the", "a", "of", "in", "to"]
    wished = dict.fromkeys((token for word in common for letter in word for token in encode(letter)), 8.0)
    wished[encode(" ")[0]] = 8.0  # letters and spaces alone: the words come in every spelling
    params = SamplingParams(temperature=1.0, seed=3, n=8, max_tokens=60, logit_bias=wished, ignore_eos=True)
    word = re.compile(rf"\b({'|'.join(common)})\b")
    (plain,) = llm.generate(QUESTION, params, use_tqdm=False)
    assert all(word.search(output.text) for output in plain.outputs)
    params.bad_words = common
    (without,) = llm.generate(QUESTION, params, use_tqdm=False)
    assert not any(word.search(output.text) for output in without.outputs)


def test_parameters_stay_as_they_were(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, skip_clone=True)
    before = repr(params)
    llm.generate([QUESTION] * 2, params, use_tqdm=False)
    assert repr(params) == before


def test_max_tokens_is_cut_to_the_context(llm: LLM) -> None:
    ids = reference.tokenizer().encode(QUESTION) * 140
    longest = llm.resolved.model.max_model_len
    params = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids[: longest - 3]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ContextLengthError, match=f"at most {longest - 1}"):
        llm.generate({"prompt_token_ids": ids[:longest]}, params)


def test_prefix_cache_is_reported_and_reset(llm: LLM) -> None:
    ids = reference.tokenizer().encode(QUESTION) * 4
    assert llm.reset_prefix_cache()
    cached = [llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, (len(ids) - 1) // 16 * 16]
    llm.reset_prefix_cache()
    assert llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_enqueue_and_wait(llm: LLM) -> None:
    first = llm.enqueue(list(reference.TEXTS), GREEDY)
    second = llm.enqueue_chat(MESSAGES, GREEDY)
    assert _tokens(llm, QUESTION) == reference.greedy(QUESTION, 12), "generate() answers its own prompt only"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    texts = [*reference.TEXTS, QUESTION]
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(text, 12) for text in texts]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_two_thousand_prompts(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [3 + index % 4000, 5]} for index in range(2000)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert {len(output.outputs[0].token_ids) for output in outputs} == {1}


def test_progress_bar_may_be_the_callers(llm: LLM) -> None:
    from tqdm import tqdm

    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def close(self) -> None:
            bars.append((self.total, self.n))
            super().close()

    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=1), use_tqdm=Bar)
    assert bars[0] == (3, 3)


def test_without_tokenizer() -> None:
    llm = LLM(dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, seed=None, num_threads=1)
    ids = reference.tokenizer().encode(QUESTION)
    (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(QUESTION, 12)
    assert output.outputs[0].text == ""
    for call in (lambda: llm.generate("text", GREEDY), lambda: llm.chat(MESSAGES, GREEDY), llm.get_tokenizer):
        with pytest.raises((ConfigError, InvalidRequestError), match="tokenizer"):
            call()


def test_tokenizer_from_another_folder(tmp_path: Path) -> None:
    """The model's own folder then needs none."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(quire.demo.path() / name)
    with pytest.raises(ConfigError, match="tokenizer"):
        LLM(str(tmp_path), kv_cache_memory_bytes=1 << 24)
    options = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    llm = LLM(str(tmp_path), tokenizer=str(quire.demo.path("draft")), **options)
    assert _tokens(llm, QUESTION) == reference.greedy(QUESTION, 12)


def test_plain_torch_gives_the_same_tokens() -> None:
    """An install without a compiler: the same model on the kernels' plain-torch twins."""
    code = (
        "import importlib, os\n"
        "from quire import LLM, SamplingParams\n"
        "from quire.kernels import cpu\n"
        "os.environ['QUIRE_FORCE_REFERENCE'] = '1'\n"
        "importlib.reload(cpu)\n"  # which looks at it
        "assert not cpu.available()\n"
        "llm = LLM(dtype='float32', kv_cache_memory_bytes=1 << 24, num_threads=1)\n"
        "params = SamplingParams(temperature=0, max_tokens=8)\n"
        f"outputs = llm.generate({list(reference.TEXTS)!r}, params, use_tqdm=False)\n"
        "print([output.outputs[0].token_ids for output in outputs])"
    )
    result = Program(("-c", code)).run()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [reference.greedy(text, 8) for text in reference.TEXTS]


def test_engine_args_make_an_llm() -> None:
    args = quire.EngineArgs(dtype="float32", kv_cache_memory_bytes=1 << 24, served_model_name="a")
    config = LLM.from_engine_args(args).config
    assert vars(config) == vars(args)
    assert type(config) is quire.EngineConfig, "what travels to an engine process"


def test_dummy_weights_give_tokens(tmp_path: Path) -> None:
    """--load-format dummy needs config.json only; the same numbers at every start."""
    (tmp_path / "config.json").write_text((quire.demo.path() / "config.json").read_text())

    def tokens() -> list[int]:
        llm = LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, num_threads=1
        )
        return _tokens(llm, [1, 2, 3])

    assert len(first := tokens()) == 12
    assert tokens() == first
