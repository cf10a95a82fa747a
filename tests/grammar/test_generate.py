"""Structured output with the demo model: every text satisfies its constraint, and no schedule changes a token."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits

from quire import LLM, SamplingParams, demo
from quire.errors import ConstraintError, InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.grammar import compiled, matchers
from quire.grammar.matchers import Grammars, RowGrammar, token_masks
from quire.lora.request import LoRARequest
from quire.sampling import grammars
from quire.sampling_params import MAX_CHOICES
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.grammar.random_schemas import random_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "<" item ("," item)? ">"\nitem ::= [0-9] [0-9]\n'
LARK = 'start: "<" ITEM ("," ITEM)? ">"\nITEM: /[0-9][0-9]/\n'
TAGS = json.dumps(
    {
        "structures": [{"begin": "<f>", "schema": {"type": "integer", "maximum": 9, "minimum": 0}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
)
DRAFT_MODEL = {
    "method": "draft_model", "model": str(demo.path("draft")), "num_speculative_tokens": 3, "adaptive": False
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "max_logprobs": -1,
    "num_threads": 1,
    "kv_cache_memory_bytes": 1 << 24,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(dtype="float32", **SETTINGS)
    yield engine
    assert engine.llm_engine.core.scheduler.kv.pool.num_used_blocks == 0


def texts(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[str]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs), outputs
    return [output.outputs[0].text for output in outputs]


def is_json(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


CASES = {
    "json": (Structured(json=PERSON), lambda text: is_json(text, PERSON)),
    "json text": (Structured(json=json.dumps(PERSON)), lambda text: is_json(text, PERSON)),
    "json without spaces": (
        Structured(json=PERSON, disable_any_whitespace=True),
        lambda text: text == json.dumps(json.loads(text), ensure_ascii=False) and is_json(text, PERSON),
    ),
    "closed": (
        Structured(
            json={k: v for k, v in PERSON.items() if k != "additionalProperties"}, disable_additional_properties=True
        ),
        lambda text: is_json(text, PERSON),
    ),
    "json object": (Structured(json_object=True), lambda text: is_json(text, {"type": "object"})),
    "regex": (Structured(regex=r"[0-9]{3}-[a-f]{4}"), re.compile(r"[0-9]{3}-[a-f]{4}").fullmatch),
    "behind reasoning": (
        Structured(regex=r"[0-9]{3}-[a-f]{4}", reasoning_end=["e", "\n"]),
        re.compile(r"[^e\n]*[e\n][ \n]{0,4}[0-9]{3}-[a-f]{4}").fullmatch,
    ),
    "behind messages": (
        Structured(
            regex=r"[0-9]{3}-[a-f]{4}", reasoning_start=["in "], reasoning_end=["e", "\n"], answer_start=["It ", "Is "]
        ),
        re.compile(r"([ \n]{0,4}in [^e\n]*[e\n][ \n]{0,4})*(It |Is )[0-9]{3}-[a-f]{4}").fullmatch,
    ),
    "choice": (Structured(choice=["yes", 'no "never"', "ye"]), {"yes", 'no "never"', "ye"}.__contains__),
    "EBNF": (Structured(grammar=EBNF), re.compile(r"<\d\d(,\d\d)?>").fullmatch),
    "Lark": (Structured(grammar=LARK), re.compile(r"<\d\d(,\d\d)?>").fullmatch),
}


@pytest.mark.parametrize("name", CASES)
def test_every_text_satisfies_its_constraint(llm: LLM, name: str) -> None:
    """In one batch with requests without a constraint, at three temperatures."""
    constraint, satisfies = CASES[name]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=200, structured_outputs=constraint)
        for temperature in (0.0, 1.0, 2.0)
        for seed in (1, 2)
    ]
    free = SamplingParams(temperature=0.0, max_tokens=8)
    alone = llm.generate(["def f("], free, use_tqdm=False)[0].outputs[0].text
    outputs = llm.generate(["Answer:"] * len(params) + ["def f("], [*params, free], use_tqdm=False)
    for output in outputs[:-1]:
        text = output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            assert satisfies(text), text
    least = 2 if name == "json object" else len(params) - 2  # the others cannot be long
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs[:-1]) >= least
    assert outputs[-1].outputs[0].text == alone


def test_masks_of_many_rows_are_computed_beside_the_forward_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tokens are the same as with one row, whose mask is computed in place."""
    threads: list[str] = []

    def noted(*work: Any) -> Any:
        threads.append(threading.current_thread().name)
        return token_masks(*work)

    monkeypatch.setattr(grammars, "token_masks", noted)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=12, structured_outputs=CASES["regex"][0])
        for seed in range(8)
    ]
    together = texts(llm, ["Answer:"] * len(params), params)
    assert any(name.startswith("quire-masks") for name in threads)
    threads.clear()
    assert together == [texts(llm, ["Answer:"], [each])[0] for each in params]
    assert threads
    assert not any(name.startswith("quire-masks") for name in threads)


@pytest.mark.parametrize("num_schemas", [25, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_schemas(num_schemas: int) -> None:
    """Every answer that ends by itself is valid; an answer cut by max_tokens says so. Many rows are in a step."""
    llm = LLM(**{**SETTINGS, "kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 256})
    schemas = [random_schema(seed) for seed in range(num_schemas)]
    params = [
        SamplingParams(structured_outputs=Structured(json=schema), temperature=seed % 3, seed=seed, max_tokens=150)
        for seed, schema in enumerate(schemas)
    ]
    parts = [params[first : first + 1000] for first in range(0, num_schemas, 1000)]
    outputs = [each.outputs[0] for part in parts for each in llm.generate(["Data: "] * len(part), part, use_tqdm=False)]
    ended = [
        (output, schema) for output, schema in zip(outputs, schemas, strict=True) if output.finish_reason == "stop"
    ]
    for output, schema in ended:
        jsonschema.validate(json.loads(output.text), schema)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(ended) > 0.6 * num_schemas, "too few answers were looked at"


def test_the_likeliest_of_the_allowed_tokens_is_taken(llm: LLM) -> None:
    """Against a plain twin: each step, the unconstrained scores of all tokens that lead to one of the choices."""
    # No text is determined for more than a character: there the grammar takes the tokenizer's own tokens for it.
    choices = [a + b + c + d for a in "ri" for b in "en" for c in "tf" for d in ("", "u", "i")]
    decode = {i: llm.get_tokenizer().decode([i], skip_special_tokens=False) for i in range(4096)}
    eos = llm._inputs.eos_token_ids
    prompt = llm.get_tokenizer().encode("def f():\n ")
    expected: list[int] = []
    while not expected or expected[-1] not in eos:
        text = "".join(decode[i] for i in expected)
        scores = (
            llm.generate(
                {"prompt_token_ids": [*prompt, *expected]},
                SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1),
                use_tqdm=False,
            )[0]
            .outputs[0]
            .logprobs[0]
        )
        allowed = [
            i
            for i, piece in decode.items()
            if (i in eos and text in choices)
            or (i not in eos and piece and any(choice.startswith(text + piece) for choice in choices))
        ]
        expected.append(max(allowed, key=lambda i: scores[i].logprob))
    output = llm.generate(
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0.0, structured_outputs=Structured(choice=choices)),
        use_tqdm=False,
    )[0].outputs[0]
    assert list(output.token_ids) == expected


TOKENIZER = Tokenizer.from_folder(demo.path("target"))
THINKING: dict[str, Any] = {  # which only the budget ends
    "thinking_token_budget": 7,
    "thinking_token_ids": [TOKENIZER.token_to_id("e")],
    "logit_bias": {TOKENIZER.token_to_id("e"): -100},
    "allowed_token_ids": [each for each in range(300) if (text := TOKENIZER.decode([each])) == "e" or "e" not in text],
}
REQUESTS = [
    (prompt, SamplingParams(temperature=temperature, seed=7, max_tokens=64, structured_outputs=constraint, **others))
    for prompt, temperature, constraint, others in [
        ("Who is it? ", 0.0, Structured(json=PERSON), {}),
        ("Who is it? ", 1.0, Structured(json=PERSON), {"n": 2}),
        ("Code: " * 20, 1.0, Structured(regex=r"([a-z]{3,9} ){4}"), {"repetition_penalty": 1.2}),
        ("Number", 2.0, Structured(grammar=EBNF), {"logprobs": 3}),
        ("Tags ", 1.0, Structured(structural_tag=TAGS), {}),
        ("def f(", 1.0, Structured(regex="[0-9]{3}", reasoning_end=["e"]), THINKING),
        ("def f(", 0.0, None, {}),
    ]
]


def answers(engine: LLM) -> list[Any]:
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = engine.generate(list(prompts), list(params), use_tqdm=False)
    return [[(list(c.token_ids), c.finish_reason, c.logprobs) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    """All requests in one batch."""
    return answers(llm)


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_num_seqs": 2, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 12, "max_model_len": 192, "enable_prefix_caching": False},  # preempts
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}},
        {"speculative_config": DRAFT_MODEL, "async_scheduling": True},
    ],
    ids=["chunks", "preemption", "drafts", "draft model"],
)
def test_no_schedule_changes_a_token(expected: list[Any], schedule: dict[str, Any]) -> None:
    other = LLM(dtype="float32", **{**SETTINGS, **schedule})
    assert answers(other) == expected
    ((thinking, _, _),) = expected[-2]
    assert thinking.index(TOKENIZER.token_to_id("e")) == THINKING["thinking_token_budget"]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_weights(quantization: str) -> None:
    engine = LLM(quantization=quantization, **SETTINGS)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=200, structured_outputs=Structured(json=PERSON))
        for seed in range(4)
    ]
    assert all(is_json(text, PERSON) for text in texts(engine, ["Who is it? "] * len(params), params))


def test_adapters_and_prefix_hits(llm: LLM) -> None:
    """In one batch, a row with an adapter and one without; then once more, from the prefix cache."""
    engine = LLM(dtype="float32", enable_lora=True, max_lora_rank=8, **SETTINGS)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=200, structured_outputs=Structured(json=PERSON))
    prompt, adapter = "Who is it? " * 20, LoRARequest("json", 1, str(demo.path("lora")))

    def run() -> list[Any]:
        return engine.generate([prompt] * 2, params, lora_request=[adapter, None], use_tqdm=False)

    first, again = run(), run()
    assert all(is_json(output.outputs[0].text, PERSON) for output in first)
    assert first[1].outputs[0].token_ids == llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in first]
    assert all((output.num_cached_tokens or 0) > 0 for output in again)
    assert first[0].outputs[0].token_ids != first[1].outputs[0].token_ids, "the adapter changed nothing"


def test_a_slow_grammar_delays_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled beside the steps: the others end while it waits."""
    may_compile = threading.Event()
    compiled = Grammars.compile

    def slow(self: Grammars, text: str) -> Any:
        assert may_compile.wait(60)
        return compiled(self, text)

    monkeypatch.setattr(Grammars, "compile", slow)
    waits = llm.enqueue(["Number"], SamplingParams(structured_outputs=Structured(regex="[0-9]{7}")))
    assert llm.generate("def f(", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
    assert llm.llm_engine.core.scheduler.num_deferred == 1
    may_compile.set()
    (output,) = llm._runner.wait(waits)
    assert re.fullmatch("[0-9]{7}", output.outputs[0].text)


def test_a_grammar_that_nothing_satisfies_ends_with_its_reason(llm: LLM) -> None:
    """The front end sees most of them; the others end when they are compiled, and the engine goes on."""
    endless = SamplingParams(structured_outputs=Structured(grammar='start: A\nA: "a" & "b"'))
    with pytest.raises(InvalidRequestError, match="grammar cannot be used: nothing satisfies it"):
        llm.generate("a", endless, use_tqdm=False)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


def test_a_constraint_against_other_limits_fails_alone(llm: LLM) -> None:
    """No token is left: that request ends with an error, its neighbour does not."""
    nothing_left = SamplingParams(structured_outputs=Structured(regex="[0-9]"), allowed_token_ids=[5])
    outputs = llm.generate(["a", "b"], [nothing_left, SamplingParams(max_tokens=2)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "structured_outputs" in (outputs[0].error or "")


@pytest.mark.parametrize(
    ("constraint", "others", "why"),
    [
        (Structured(choice=["a"]), {"min_tokens": 9}, "min_tokens"),
        (Structured(grammar="start: " + " | ".join(f'"a{i}"' for i in range(2100))), {}, "cannot go on"),
    ],
    ids=["nothing is left", "a limit of the parser"],
)
def test_what_a_constraint_does_is_the_fault_of_its_request(
    llm: LLM, constraint: Structured, others: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConstraintError, match=why) as error:
        llm.generate("a", SamplingParams(temperature=0.0, structured_outputs=constraint, **others), use_tqdm=False)
    assert error.value.status == 400


def test_a_lexer_that_many_requests_filled_is_made_anew(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request fails for the tokens of others with the same constraint, with drafts and without."""
    monkeypatch.setattr(compiled, "parser_limits", lambda: LLParserLimits(max_lexer_states=400, verbose_errors=False))
    renewed: list[bool] = []
    renew = RowGrammar.renew
    monkeypatch.setattr(RowGrammar, "renew", lambda row: renewed.append(renew(row)) or renewed[-1])
    drafting = LLM(
        dtype="float32",
        **SETTINGS,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )
    constraint = Structured(regex="[ab]*a[ab]{20}c")
    params = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=20, structured_outputs=constraint) for seed in range(24)
    ]
    outputs = [engine.generate(["ab"] * 24, params, use_tqdm=False) for engine in (llm, drafting)]
    assert any(renewed)
    assert {output.outputs[0].finish_reason for output in outputs[0]} <= {"length", "stop"}
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]


def test_a_grammar_is_compiled_anew_after_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step would have to wait for it."""
    monkeypatch.setattr(matchers, "_MAX_TOKENS", 0)
    compiler = Grammars(4096)
    compiler.use_tokenizer((demo.path("target") / "tokenizer.json").read_text(), [0])
    monkeypatch.delattr(matchers, "vocabulary")  # its tables are there now, and no constraint makes them
    text = LLMatcher.grammar_from_regex("[a-z]{40}")
    compiler.prepare(text).result()
    first = compiler.compile(text)
    row = compiler.row(text, [])
    for _ in range(len(text) + 1):
        row.append(0)
    assert compiler.compile(text) is first
    compiler.prepare(text).result()
    assert compiler.compile(text) is not first


def test_what_is_compiled_for_a_request_is_kept_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step compiles a grammar, however many wait; a request without room waits uncompiled."""
    compiler = Grammars(4096)
    compiler.use_tokenizer((demo.path("target") / "tokenizer.json").read_text(), [0])
    grammars = [LLMatcher.grammar_from_regex(f"[a-z]{{{length}}}") for length in range(1, 301)]
    waiting = [compiler.prepare(text) for text in grammars]
    for each in waiting:
        each.result()
    made: list[str] = []
    monkeypatch.setattr(matchers, "compiled_matcher", lambda tokenizer, text: made.append(text))
    for text in grammars:
        assert compiler.row(text, []).error is None
    assert not made

    monkeypatch.undo()
    monkeypatch.setattr(matchers, "_MAX_BYTES", 1)
    first, second = (compiler.prepare(LLMatcher.grammar_from_regex(text)) for text in ("ab", "abc"))
    assert not first.done()  # grammars that are kept have used up the room
    waiting.clear()
    del each
    assert not second.done()
    assert not first.done() or first.result()
    first.result()
    assert first.done()
    assert not second.done()
    del first
    assert second.done() or second.result()


def test_what_nobody_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One grammar compiles while the clients of two others leave: one is in the thread's queue, one has no room."""
    compiler = Grammars(4096)
    compiler.use_tokenizer((demo.path("target") / "tokenizer.json").read_text(), [0])
    gate, made = threading.Event(), []
    compiled = matchers.compiled_matcher

    def slow(tokenizer: Any, text: str) -> Any:
        made.append(text)
        assert gate.wait(10)
        return compiled(tokenizer, text)

    monkeypatch.setattr(matchers, "compiled_matcher", slow)
    texts = [LLMatcher.grammar_from_regex(text) for text in ("a", "ab", "abc", "abcd")]
    first, queued = compiler.prepare(texts[0]), compiler.prepare(texts[1])
    with monkeypatch.context() as full:
        full.setattr(matchers, "_MAX_BYTES", 1)
        without_room, last = compiler.prepare(texts[2]), compiler.prepare(texts[3])
        assert not without_room.done()
    del queued, without_room
    gate.set()
    assert first.result()
    assert not last.done() or last.result()  # it asks, and so begins
    assert last.result()
    assert made == [texts[0], texts[3]]


def test_many_choices(llm: LLM) -> None:
    choices = [f"label {index} of many" for index in range(MAX_CHOICES)]
    params = SamplingParams(temperature=2.0, max_tokens=40, structured_outputs=Structured(choice=choices))
    assert texts(llm, ["Answer: "], [params])[0] in choices


def test_drafts_behind_the_end_of_a_grammar(llm: LLM) -> None:
    """With ignore_eos only the end may follow the end, also with drafts."""
    drafting = LLM(
        dtype="float32",
        **SETTINGS,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    )
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=40, structured_outputs=Structured(choice=["a"])
    )
    expected, drafted = (
        engine.generate("Answer: ", params, use_tqdm=False)[0].outputs[0] for engine in (llm, drafting)
    )
    assert expected.finish_reason == drafted.finish_reason == "length"
    assert expected.token_ids == drafted.token_ids
    assert set(expected.token_ids[1:]) <= set(llm._inputs.eos_token_ids)


def test_a_thinking_budget_is_kept_to_the_token(llm: LLM) -> None:
    """Up to its end nothing changes; the constraint behind the reasoning begins there."""
    prompts, tokenizer = ["def f("], llm.get_tokenizer()
    end_id = tokenizer.token_to_id("e")
    others = [token_id for token_id in range(300) if "e" not in tokenizer.decode([token_id])]
    free = SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=others)
    (thoughts,) = (output.outputs[0].token_ids for output in llm.generate(prompts, free, use_tqdm=False))
    for budget, start in ((0, None), (1, None), (7, None), (4, 2)):
        bounded = SamplingParams(
            temperature=0.0,
            max_tokens=40,
            allowed_token_ids=[*others, end_id],
            logit_bias={end_id: -100},  # the model would not end by itself
            thinking_token_budget=budget,
            thinking_token_ids=[end_id] if start is None else [end_id, thoughts[start]],
            structured_outputs=Structured(regex="[0-9]{3}", reasoning_end=["e"]),
        )
        ((output,),) = (output.outputs for output in llm.generate(prompts, bounded, use_tqdm=False))
        place = budget if start is None else thoughts.index(thoughts[start]) + 1 + budget
        assert output.token_ids[: place + 1] == [*thoughts[:place], end_id]
        assert re.fullmatch(r"[^e]*e[ \n]{0,4}[0-9]{3}", output.text), output.text
