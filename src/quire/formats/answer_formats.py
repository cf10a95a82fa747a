"""The formats in which models write tool calls and reasoning: their names, and how a chat template shows the format."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError

TOOL_PARSERS = (
    *("deepseek_v3", "deepseek_v31", "glm45", "granite", "hermes", "kimi_k2", "llama3_json", "llama4_pythonic"),
    *("mistral", "openai", "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_xml"),
)
REASONING_PARSERS = ("deepseek_r1", "glm45", "granite", "mistral", "openai_gptoss", "qwen3")
NO_PARSER = "none"
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"  # one format with both

# Texts by which the template of a format is recognized. The rarer texts come first.
_TOOL_MARKS = (
    (("<|channel|>", "functions."), HARMONY_TOOLS),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<function=",), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (('"parameters": dictionary of argument',), "llama3_json"),
    (("functools",), "phi4_mini_json"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
)
_REASONING_MARKS = (
    (("<|channel|>analysis",), HARMONY_REASONING),
    (("[THINK]",), "mistral"),
    (("Here is my thought process:",), "granite"),
    (("<｜Assistant｜>", "</think>"), "deepseek_r1"),
    (("<arg_key>", "</think>"), "glm45"),
    (("</think>",), "qwen3"),
)


@dataclass(frozen=True)
class AnswerFormats:
    """The formats by which answers are parsed; None: there is no such format.

    `why_...` is the reason, if the chat template has decided.
    """

    tools: str | None
    reasoning: str | None
    why_tools: str = ""
    why_reasoning: str = ""

    @classmethod
    def choose(cls, tools: str | None, reasoning: str | None, template: str) -> AnswerFormats:
        """Choose the formats that the user names, or else those of the chat template.

        Raises ConfigError if the chosen formats do not go together.
        """
        tools, why_tools = _chosen(tools, template, _TOOL_MARKS)
        reasoning, why_reasoning = _chosen(reasoning, template, _REASONING_MARKS)
        if None not in (tools, reasoning) and (tools == HARMONY_TOOLS) != (reasoning == HARMONY_REASONING):
            raise ConfigError(
                "The formats of tool calls and of reasoning do not go together",
                value=[tools, reasoning],
                expected=f"{HARMONY_TOOLS} with {HARMONY_REASONING}, or neither of them",
                fix="Give both --tool-call-parser and --reasoning-parser",
                param="tool_call_parser",
            )
        return cls(tools, reasoning, why_tools, why_reasoning)


def _chosen(given: str | None, template: str, marks: tuple[tuple[tuple[str, ...], str], ...]) -> tuple[str | None, str]:
    if given is not None:
        return (None if given == NO_PARSER else given), ""
    for texts, name in marks:
        if all(text in template for text in texts):
            return name, f"the chat template has {' and '.join(texts)}"
    return None, "the chat template shows no known format"
