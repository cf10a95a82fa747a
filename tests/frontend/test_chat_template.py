"""Chat templates: the same text as transformers, errors in the template's words, and no template can do harm."""

from __future__ import annotations

import pytest
import tokenizers

from quire.errors import ConfigError, InvalidRequestError, UnsupportedFieldError
from quire.frontend import chat_template
from quire.frontend.chat_messages import normalise_messages
from quire.frontend.chat_template import ChatRenderer, ChatTemplate
from tests.frontend import chat_templates as templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
STYLES = {name: getattr(templates, name) for name in ("CHATML", "LLAMA3", "MISTRAL", "GEMMA", "QWEN3", "PARTS_ONLY")}

TURN = [{"role": "user", "content": "Hi <b>&\n there  "}]
DIALOGUE = [
    {"role": "user", "content": " One? "},
    {"role": "assistant", "content": "Two.\n\n"},
    {"role": "user", "content": "Three é 😀"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *DIALOGUE]
PREFILL = [*TURN, {"role": "assistant", "content": "Sure, here "}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
REASONING = [*TURN, {"role": "assistant", "content": "4", "reasoning": "2+2"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a<b>é", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def hf_tokenizer():
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def hf_render(hf_tokenizer, source, messages, **options):
    hf_tokenizer.chat_template = source
    return hf_tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("style", ["CHATML", "LLAMA3", "MISTRAL", "GEMMA", "QWEN3"])
@pytest.mark.parametrize("messages", [TURN, DIALOGUE, SYSTEM], ids=["turn", "dialogue", "system"])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_same_as_transformers(hf_tokenizer, style, messages, generation_prompt):
    template = ChatTemplate(STYLES[style], SPECIAL)
    if style == "MISTRAL" and messages is SYSTEM:  # it has no system role
        with pytest.raises(InvalidRequestError, match="roles must alternate"):
            template.render(messages, add_generation_prompt=generation_prompt)
        return
    expected = hf_render(hf_tokenizer, STYLES[style], messages, add_generation_prompt=generation_prompt)
    assert template.render(messages, add_generation_prompt=generation_prompt) == expected


@pytest.mark.parametrize("style", ["CHATML", "LLAMA3", "GEMMA", "QWEN3"])
@pytest.mark.parametrize("content", ["Sure, here ", "Sure, here", "Sure\n\n"])
def test_continued_message_same_as_transformers(hf_tokenizer, style, content):
    messages = [*TURN, {"role": "assistant", "content": content}]
    expected = hf_render(hf_tokenizer, STYLES[style], messages, continue_final_message=True)
    ours = ChatTemplate(STYLES[style], SPECIAL).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert ours == expected
    assert ours.rstrip().endswith(content.rstrip())


def test_continued_parts():
    messages = [
        *PARTS,
        {"role": "assistant", "content": [{"type": "text", "text": "So"}, {"type": "text", "text": " far"}]},
    ]
    ours = ChatTemplate(templates.PARTS_ONLY).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == "USER:ab<end>ASSISTANT:So far"


def test_reasoning_tools_and_kwargs_same_as_transformers(hf_tokenizer):
    qwen = ChatTemplate(templates.QWEN3, SPECIAL)
    assert qwen.render(REASONING) == hf_render(hf_tokenizer, templates.QWEN3, REASONING, add_generation_prompt=True)
    assert "<think>\n2+2\n</think>" in qwen.render(REASONING)
    thinking = qwen.render(TURN, kwargs={"enable_thinking": False})
    assert thinking == hf_render(hf_tokenizer, templates.QWEN3, TURN, add_generation_prompt=True, enable_thinking=False)
    assert thinking.endswith("<think>\n\n</think>\n\n")
    llama = ChatTemplate(templates.LLAMA3, SPECIAL).render(TURN, tools=TOOLS)
    assert llama == hf_render(hf_tokenizer, templates.LLAMA3, TURN, tools=TOOLS, add_generation_prompt=True)
    assert '"description": "a<b>é"' in llama, "tojson must not escape"


def test_tool_call_arguments_arrive_as_objects(hf_tokenizer):
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é<"}'}}]
    messages = [
        *TURN,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    ours = ChatTemplate(templates.LLAMA3, SPECIAL).render(messages)
    assert '{"name": "add", "parameters": {"a": "é<"}}<|eot_id|>' in ours
    assert calls[0]["function"]["arguments"] == '{"a": "é<"}', "the caller's message was changed"
    parsed = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é<"}}}]
    expected = hf_render(
        hf_tokenizer,
        templates.LLAMA3,
        [messages[0], {"role": "assistant", "tool_calls": parsed}, messages[2]],
        add_generation_prompt=True,
    )
    assert ours == expected


def test_null_fields_are_as_if_missing(hf_tokenizer):
    messages = [*TURN, {"role": "assistant", "content": "x", "tool_calls": None, "name": None}]
    expected = hf_render(hf_tokenizer, templates.LLAMA3, messages, add_generation_prompt=True)
    assert ChatTemplate(templates.LLAMA3, SPECIAL).render(messages) == expected


def test_content_parts_reach_the_template_as_it_reads_them():
    assert ChatTemplate(templates.CHATML).render(PARTS) == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert "<start_of_turn>user\nab<end_of_turn>" in ChatTemplate(templates.GEMMA, SPECIAL).render(PARTS)
    assert ChatTemplate(templates.PARTS_ONLY).render([*TURN, *PARTS]) == "USER:Hi <b>&\n there  <end>USER:ab"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": object()}], "messages[0]"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "messages[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages_are_named(messages, param):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(templates.CHATML).render(messages)
    assert caught.value.param == param


def test_images_are_an_unsupported_field():
    with pytest.raises(UnsupportedFieldError):
        normalise_messages([{"role": "user", "content": [{"type": "image_url"}]}], content_as_parts=True)


def test_deep_nesting_is_refused():
    deep: object = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        ChatTemplate(templates.CHATML).render([{"role": "user", "content": "x", "extra": deep}])


def test_the_template_speaks_in_its_errors():
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        ChatTemplate(templates.MISTRAL, SPECIAL).render([{"role": "assistant", "content": "x"}])
    assert caught.value.status == 400
    with pytest.raises(InvalidRequestError, match="TypeError"):
        ChatTemplate("{{ 1 + 'a' }}").render(TURN)


def test_a_broken_template_is_a_config_error_with_its_line():
    with pytest.raises(ConfigError, match=r"line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}")


def test_continue_and_generation_prompt_exclude_each_other():
    with pytest.raises(InvalidRequestError, match="exclude"):
        ChatTemplate(templates.CHATML).render(PREFILL, continue_final_message=True)


def test_a_template_that_rewrites_the_last_message_cannot_continue_it():
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(
            PREFILL, add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "add_generation_prompt", "bos_token", "__quire_budget", "namespace"]
)
def test_reserved_kwargs_are_refused(name):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(templates.CHATML).render(TURN, kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ raise_exception.__globals__ }}{{ x.y.z }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10 ** 8 }}",
        "{{ lipsum(10000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_hostile_templates_only_fail_the_request(source):
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(TURN)


def test_endless_rendering_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 5000)
    nested = "{% for a in range(90000) %}{% for b in range(90000) %}{% set x = 1 %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="5000 loop rounds"):
        ChatTemplate(nested).render(TURN)
    monkeypatch.setattr(chat_template, "MAX_STEPS", 10**9)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    with pytest.raises(InvalidRequestError, match="seconds"):
        ChatTemplate(nested).render(TURN)


def test_output_is_capped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="1000 characters"):
        ChatTemplate("{% for a in range(2000) %}x{% endfor %}").render(TURN)


def test_renderer_chooses_by_tools_and_override():
    named = {"default": "plain", "tool_use": "tools"}
    assert ChatRenderer(named, {}).render(TURN) == "plain"
    assert ChatRenderer(named, {}).render(TURN, tools=TOOLS) == "tools"
    assert ChatRenderer(named, {}, override="tool_use").render(TURN) == "tools"
    assert ChatRenderer(named, {}, override="own {{ messages | length }}").render(TURN, tools=TOOLS) == "own 1"
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer({}, {}).render(TURN)
