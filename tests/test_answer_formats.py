"""The formats of tool calls and reasoning are chosen from the chat template, unless flags name them."""

from __future__ import annotations

import json

import pytest

import quire.demo
from quire.config import EngineConfig, ServerConfig
from quire.entry.launch import find_chat_template
from quire.errors import ConfigError
from quire.formats.answer_formats import REASONING_PARSERS, TOOL_PARSERS, AnswerFormats
from quire.resolve import resolve_server

# Special texts in the templates of well-known models.
TEMPLATES = {
    "<tool_call>\n{\"name\": <function-name>}</tool_call> {{ content.split('</think>') }}": ("hermes", "qwen3"),
    "<tool_call>\n<function=example>\n<parameter=a>": ("qwen3_coder", None),
    "<｜Assistant｜> <｜tool▁calls▁begin｜> ```json </think>": ("deepseek_v3", "deepseek_r1"),
    "<｜Assistant｜></think> <｜tool▁calls▁begin｜>": ("deepseek_v31", "deepseek_r1"),
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key> </think>": ("glm45", "glm45"),
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.': (
        "llama3_json",
        None,
    ),
    "<|header_start|>assistant<|header_end|> <|python_start|>": ("llama4_pythonic", None),
    "<|header_start|> Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]": (
        "llama4_pythonic",
        None,
    ),
    "<|start_header_id|> Respond in the format [func_name1(params_name1=params_value1...)] ": ("pythonic", None),
    "[AVAILABLE_TOOLS][TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|start|>assistant<|channel|>analysis to=functions.": ("openai", "openai_gptoss"),
    "<|tool_calls_section_begin|>": ("kimi_k2", None),
    "<|tool_call|> Write after 'Here is my thought process:'": ("granite", "granite"),
    "<|system|><|tool|>{{ tools }}<|/tool|>": ("phi4_mini_json", None),
    "{{ messages[0].content }}": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_decides(template):
    formats = AnswerFormats.choose(None, None, template)
    assert (formats.tools, formats.reasoning) == TEMPLATES[template]
    settings = resolve_server(ServerConfig(), template).settings
    tools, reasoning = settings["tool_call_parser"], settings["reasoning_parser"]
    assert (tools.value, reasoning.value) == TEMPLATES[template]
    for setting in (tools, reasoning):
        assert setting.source == ("default" if setting.value is None else "model")
        assert "the chat template" in setting.detail


def test_every_format_has_a_template():
    """qwen3_xml is what qwen3_coder is."""
    tools, reasoning = zip(*TEMPLATES.values(), strict=True)
    assert {*tools} - {None} == {*TOOL_PARSERS} - {"qwen3_xml"}
    assert {*reasoning} - {None} == {*REASONING_PARSERS}


def test_flags_decide_first():
    config = ServerConfig(tool_call_parser="granite", reasoning_parser="none")
    formats = AnswerFormats.choose(config.tool_call_parser, config.reasoning_parser, "<tool_call></think>")
    assert (formats.tools, formats.reasoning) == ("granite", None)
    settings = resolve_server(config, "<tool_call></think>").settings
    assert (settings["tool_call_parser"].value, settings["tool_call_parser"].source) == ("granite", "argument")


def test_harmony_is_one_format():
    with pytest.raises(ConfigError, match="do not go together"):
        AnswerFormats.choose("openai", None, "</think>")
    assert AnswerFormats.choose("openai", "none", "").tools == "openai"


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        ServerConfig(tool_call_parser="hermess")


def test_where_the_template_is_found(tmp_path):
    demo = find_chat_template(EngineConfig(), ServerConfig(), quire.demo.path("target"))
    assert "messages" in demo
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 'own' }}"}))
    assert find_chat_template(EngineConfig(), ServerConfig(), tmp_path) == "{{ 'own' }}"
    given = ServerConfig(chat_template="{{ 'given' }}")
    assert find_chat_template(EngineConfig(), given, tmp_path) == "{{ 'given' }}"
    assert find_chat_template(EngineConfig(skip_tokenizer_init=True), ServerConfig(), tmp_path) == ""
