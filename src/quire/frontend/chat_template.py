"""Renders a model's chat template: Jinja in a sandbox, with Hugging Face's extensions and bounds on steps and output.

Templates come with models, and messages come from unknown clients. So a template sees only JSON data, cannot change it,
and cannot run forever. The text is the same as from transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import ConfigError, InvalidRequestError
from quire.frontend.chat_messages import normalise_messages, plain

MAX_STEPS = 1_000_000  # loop rounds of one rendering: 4096 messages that are read 100 times are 410 thousand
MAX_SECONDS = 5.0  # seconds of processor time
MAX_OUTPUT_CHARS = 16 * 2**20  # the largest accepted body
MAX_POWER_OPERAND = 1024  # 1024 ** 1024 is a number of 3 thousand digits
STEPS_PER_CLOCK = 1024
BUDGET_NAME = "__quire_budget"

# chat_template_kwargs cannot replace these names: they have their own arguments or belong to the sandbox.
RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "padding", "truncation", "max_length", "raise_exception", "strftime_now", "namespace"),
        *("dict", "range", "cycler", "joiner", "lipsum", "loop", "self", "caller", "varargs", "kwargs"),
    )
)


class _Budget:
    """The remaining steps and time of one rendering."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self) -> str:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_STEPS} loop rounds")
        if self.steps % STEPS_PER_CLOCK == 0 and time.thread_time() > self.deadline:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_SECONDS:g} seconds of processor time")
        return ""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. Here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names, because these could hide Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named parameters: templates use every name as a key
        jinja2.utils.Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_namespace_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace name {name!r} begins with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment. Every round of a loop and every macro call uses up some of the rendering's budget."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _new_dict  # not the type, because its methods could change immutable values
        del self.globals["lipsum"]

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        loops: list[nodes.For | nodes.Macro] = [*source.find_all(nodes.For), *source.find_all(nodes.Macro)]
        for node in loops:
            spend = nodes.Getattr(nodes.Name(BUDGET_NAME, "load"), "spend", "load")
            call = nodes.Output([nodes.Call(spend, [], [], None, None)])
            node.body.insert(0, call.set_lineno(node.lineno).set_environment(self))
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that would fill the memory."""
        if operator == "**" and (abs(left) > MAX_POWER_OPERAND or abs(right) > MAX_POWER_OPERAND):
            raise jinja2.exceptions.SecurityError("a power too large")
        lengths = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if operator == "*" and lengths and counts and lengths[0] * counts[0] > MAX_OUTPUT_CHARS:
            raise jinja2.exceptions.SecurityError("a repetition too long")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON, as templates expect it. Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja source.
        special_tokens: name -> token (`bos_token`, ...): variables of the template.
        name: its source, for error messages.
    Raises:
        ConfigError: the source is not a Jinja template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, name: str = "the chat template"
    ) -> None:
        self.source, self.name = source, name
        self._special_tokens = dict(special_tokens or {})
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise ConfigError(
                f"{name} is not a valid Jinja template: {error}" + (f" (line {line})" if line else ""),
                fix="Correct it, or give another one with --chat-template",
                param="chat_template",
            ) from error
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_as_parts = _loops_over_content(tree)
        self._keep_strings = any(test.name == "string" for test in tree.find_all(nodes.Test))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; encode it without adding special tokens.

        Args:
            continue_final_message: leave the last message open for the model; excludes add_generation_prompt.
            tools, documents: JSON objects handed to the template.
            kwargs: further variables (`enable_thinking`, ...): chat_template_kwargs.

        Raises:
            InvalidRequestError: malformed messages, a reserved argument, or the template's own refusal.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                fix="Set add_generation_prompt to false to continue the last message",
                param="continue_final_message",
            )
        chat = normalise_messages(messages, content_as_parts=self.content_as_parts, keep_strings=self._keep_strings)
        tag, unfinished = _tag_final_text(chat) if continue_final_message else ("", "")
        variables = self._special_tokens | check_template_kwargs(kwargs or {})
        text = self._render(
            variables
            | {
                "messages": chat,
                "tools": plain(tools, "tools"),
                "documents": plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_tag(text, tag, unfinished) if continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        pieces, length = [], 0
        try:
            for piece in self._template.generate(variables, **{BUDGET_NAME: _Budget()}):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise jinja2.TemplateRuntimeError(f"more than {MAX_OUTPUT_CHARS} characters of output")
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The chat template refused these messages: {error}",
                fix="Change the messages as it says",
                param="messages",
            ) from error
        except Exception as error:  # a template is a foreign program: its errors concern only this request
            raise InvalidRequestError(
                f"The chat template failed on these messages: {type(error).__name__}: {error}",
                fix="Check roles, order and content of the messages",
                param="messages",
            ) from error
        return "".join(pieces)


def check_template_kwargs(kwargs: Mapping[str, Any], param: str = "chat_template_kwargs") -> dict[str, Any]:
    """A copy of the variables for a template. Raises InvalidRequestError for a forbidden name or value."""
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"{param} is not an object", param=param)
    for name in kwargs:
        if not isinstance(name, str) or name in RESERVED_KWARGS or name.startswith("_") or name.endswith("_token"):
            raise InvalidRequestError(f"{param} may not set this name", value=name, fix="Remove it", param=param)
    checked: dict[str, Any] = plain(kwargs, param)
    return checked


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over `message.content`, or over a variable with its value."""
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    return any(_is_content(node.iter, frozenset(names)) for node in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
    return False


def _tag_final_text(chat: list[dict[str, Any]]) -> tuple[str, str]:
    """Append a tag that nobody can guess to the last message's text -> the tag, and the text without it.

    The tag ends with a space. If the template trims the message, this space is gone, and the text's own must go too.
    """
    tag = f"quire-continue-{secrets.token_hex(16)} "
    final = chat[-1]
    if isinstance(final["content"], str):
        text: str = final["content"]
        final["content"] = text + tag
        return tag, text
    final["content"] = final["content"] or [{"type": "text", "text": ""}]
    last_part = final["content"][-1]
    text = last_part["text"]
    last_part["text"] = text + tag
    return tag, text


def _cut_at_tag(rendered: str, tag: str, unfinished: str) -> str:
    position = rendered.rfind(tag.rstrip())
    if position < 0 or unfinished.strip() not in rendered:
        raise InvalidRequestError(
            "The chat template does not write the last message as it is, so it cannot be continued",
            fix="Set continue_final_message to false",
            param="continue_final_message",
        )
    before = rendered[:position]
    return before if rendered.startswith(tag, position) else before.rstrip()


class ChatRenderer:
    """Chooses one of a model's templates: "tool_use" if there are tools and it exists, else "default".

    Args:
        templates: name -> Jinja source.
        override: a template that replaces all of these, or the name of one of them.
        name: the model's tokenizer, for error messages.
        content_as_parts: give content to the templates as lists of parts (True) or strings (False); None: the form that
            each template reads.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        override: str | None = None,
        name: str = "The tokenizer",
        content_as_parts: bool | None = None,
    ) -> None:
        if override is not None and override not in templates:
            templates = {"default": override}
        elif override is not None:
            templates = {"default": templates[override]}
        self.name = name
        self.templates = {
            key: ChatTemplate(source, special_tokens, f"chat template {key!r} of {name}")
            for key, source in templates.items()
        }
        if content_as_parts is not None:
            for template in self.templates.values():
                template.content_as_parts = content_as_parts

    def choose(self, has_tools: bool = False) -> ChatTemplate:
        """The template to use. Raises ConfigError if the model has none."""
        template = (self.templates.get("tool_use") if has_tools else None) or self.templates.get("default")
        if template is None:
            names = ", ".join(sorted(self.templates))
            raise ConfigError(
                f"{self.name} has no chat template" + (f" called default, only {names}" if names else ""),
                fix="Use /v1/completions with a prompt, or start with --chat-template FILE",
                param="chat_template",
            )
        return template

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt's text. Arguments: see ChatTemplate.render."""
        return self.choose(bool(tools)).render(messages, tools=tools, **options)
