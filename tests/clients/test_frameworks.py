"""Frameworks with their own clients: answers and streams equal transformers', and objects fit their schema."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e import reference
from tests.e2e.serving import Serve

# What other people's packages warn of is not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

FOLDER = Path(__file__).parent
MODEL = "quire-demo"
MAX_TOKENS = 200
QUESTION = reference.QUESTIONS[0]
TEXT = reference.TEXTS[0]
EXTRA = "make test-full installs it"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


class Entry(BaseModel):
    """Write down how many there are."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["file", "folder"]
    count: int = Field(ge=0, le=99)


class Described(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


TOOL = {"type": "function", "function": {"name": "note", "parameters": Entry.model_json_schema()}}


@cache
def _expected(prompt: str) -> str:
    return reference.tokenizer().decode(reference.greedy(prompt, MAX_TOKENS), skip_special_tokens=True)


@cache
def answer() -> str:
    return _expected(reference.chat_prompts()[0])


def test_langchain(server: Serve) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=EXTRA)
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": MODEL, **SAMPLING}
    chat = langchain.ChatOpenAI(**options)
    assert chat.invoke(QUESTION).content == answer()
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer()
    for method in ("json_schema", "function_calling"):
        typed = chat.with_structured_output(Entry, method=method)
        found = typed.invoke(QUESTION)
        assert isinstance(found, Entry)
        assert [*typed.stream(QUESTION)][-1] == found
    plain = langchain.OpenAI(**options)
    assert plain.invoke(TEXT) == "".join(plain.stream(TEXT)) == _expected(TEXT)


def test_langchain_tools(server: Serve) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=EXTRA)
    chat = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, **SAMPLING)
    bound = chat.bind_tools([Entry], tool_choice="any", parallel_tool_calls=False)
    message = bound.invoke(QUESTION)
    (call,) = message.tool_calls
    Entry.model_validate(call["args"])
    streamed, *rest = bound.stream(QUESTION)
    for chunk in rest:
        streamed += chunk
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    from langchain_core.messages import HumanMessage, ToolMessage

    history = [HumanMessage(QUESTION), message, ToolMessage("noted", tool_call_id=call["id"])]
    assert isinstance(chat.invoke(history).content, str)


async def test_langchain_batch(server: Serve) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=EXTRA)
    chat = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=MODEL, **SAMPLING)
    assert [message.content for message in await chat.abatch([QUESTION] * 4)] == [answer()] * 4


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(server: Serve, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason=EXTRA)
    client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
    messages = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "response_model": Entry, **SAMPLING}
    assert isinstance(client.chat.completions.create(**options), Entry)
    *_, last = client.chat.completions.create_partial(**options)
    Entry.model_validate(last.model_dump())


def test_instructor_json(server: Serve) -> None:
    """The schema stands in the prompt alone. The answer is a JSON object, as the demo model has learned it."""
    instructor = pytest.importorskip("instructor", reason=EXTRA)
    client = instructor.from_openai(server.openai(), mode=instructor.Mode.JSON)
    messages = [{"role": "user", "content": "Describe json.loads as JSON."}]
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "response_model": Described, **SAMPLING}
    found = client.chat.completions.create(**options)
    assert found.model_extra
    *_, last = client.chat.completions.create_partial(**options)
    assert last.model_extra == found.model_extra


async def test_pydantic_ai(server: Serve) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=EXTRA)
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    agent = pydantic_ai.Agent(model, model_settings=SAMPLING)
    assert (await agent.run(QUESTION)).output == answer()
    async with agent.run_stream(QUESTION) as stream:
        assert [text async for text in stream.stream_text()][-1] == answer()
    for output_type in (Entry, pydantic_ai.NativeOutput(Entry)):
        typed = pydantic_ai.Agent(model, output_type=output_type, model_settings=SAMPLING)
        output = (await typed.run(QUESTION)).output
        assert isinstance(output, Entry)
        async with typed.run_stream(QUESTION) as typed_stream:
            outputs = [part async for part in typed_stream.stream_output(debounce_by=None)]
        assert outputs[-1] == output


def test_llama_index(server: Serve) -> None:
    """In an environment of its own: it needs an older openai than the others."""
    python = FOLDER.parents[1] / "build" / "llama_index" / "bin" / "python"
    if not python.exists():
        pytest.skip(EXTRA)
    options = {"model": MODEL, "api_base": f"{server.url}/v1", "api_key": "none", **SAMPLING}
    asked = {"options": options, "text": TEXT, "question": QUESTION}
    command = [python, "-W", "ignore", FOLDER / "llama_index_client.py"]
    run = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["text"] == found["streamed_text"] == _expected(TEXT)
    assert found["chat"] == found["streamed_chat"] == answer()
    for each in ("typed", "called", "streamed_call"):
        Entry.model_validate(found[each])


def test_litellm(server: Serve) -> None:
    litellm = pytest.importorskip("litellm", reason=EXTRA)
    options: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", **SAMPLING}
    messages = [{"role": "user", "content": QUESTION}]
    for provider in ("openai", "hosted_vllm"):
        chat = options | {"model": f"{provider}/{MODEL}", "messages": messages}
        assert litellm.completion(**chat).choices[0].message.content == answer()
        parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **chat)]
        assert "".join(parts) == answer()
        for asked in ({"response_format": Entry}, {"tools": [TOOL], "tool_choice": "required"}):
            whole = litellm.completion(**chat, **asked).choices[0].message
            chunks = [*litellm.completion(stream=True, **chat, **asked)]
            built = litellm.stream_chunk_builder(chunks).choices[0].message
            form = "response_format" in asked
            for message in (whole, built):
                Entry.model_validate_json(message.content if form else message.tool_calls[0].function.arguments)
            assert (built.content or "") == (whole.content or "")
    text_options = {"model": f"text-completion-openai/{MODEL}", "prompt": TEXT, **options}
    assert litellm.text_completion(**text_options).choices[0].text == _expected(TEXT)
    parts = [chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **text_options)]
    assert "".join(parts) == _expected(TEXT)


def test_haystack(server: Serve) -> None:
    pytest.importorskip("haystack", reason=EXTRA)
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    options: dict[str, Any] = {"api_key": Secret.from_token("none"), "model": MODEL, "api_base_url": f"{server.url}/v1"}
    generator = OpenAIChatGenerator(**options, generation_kwargs=SAMPLING)
    messages = [ChatMessage.from_user(QUESTION)]
    assert generator.run(messages)["replies"][0].text == answer()
    chunks: list[str] = []
    generator.run(messages, streaming_callback=lambda chunk: chunks.append(chunk.content))
    assert "".join(chunks) == answer()
    typed = generator.run(messages, generation_kwargs={"response_format": Entry})
    Entry.model_validate_json(typed["replies"][0].text)
    from haystack.tools import Tool

    tool = Tool("note", "Write down", Entry.model_json_schema(), lambda **_: "noted")
    called = generator.run(messages, tools=[tool], generation_kwargs={"tool_choice": "required"})
    Entry.model_validate(called["replies"][0].tool_calls[0].arguments)
    schema = {"type": "json_schema", "json_schema": {"name": "entry", "schema": Entry.model_json_schema()}}
    chunks.clear()
    generation_kwargs = {"response_format": schema}
    generator.run(messages, generation_kwargs=generation_kwargs, streaming_callback=lambda c: chunks.append(c.content))
    assert Entry.model_validate_json("".join(chunks)) == Entry.model_validate_json(typed["replies"][0].text)
    streamed = generator.run(
        messages, tools=[tool], generation_kwargs={"tool_choice": "required"}, streaming_callback=lambda chunk: None
    )
    assert streamed["replies"][0].tool_calls[0].arguments == called["replies"][0].tool_calls[0].arguments


async def test_openai_agents(server: Serve) -> None:
    agents = pytest.importorskip("agents", reason=EXTRA)
    import openai

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    settings = agents.ModelSettings(**SAMPLING)
    responses = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)

    async def streamed(agent: Any) -> Any:
        run = agents.Runner.run_streamed(agent, QUESTION)
        assert [event async for event in run.stream_events()]
        return run.final_output

    for api in (model, responses):
        agent = agents.Agent(name="demo", model=api, model_settings=settings)
        assert (await agents.Runner.run(agent, QUESTION)).final_output == answer()
        assert await streamed(agent) == answer()
    noted: list[Entry] = []

    @agents.function_tool
    def note(entry: Entry) -> str:
        """Write down an entry."""
        noted.append(entry)
        return "noted"

    required = agents.ModelSettings(**SAMPLING, tool_choice="required", parallel_tool_calls=False)
    for number, api in enumerate((model, responses), 1):
        caller = agents.Agent(name="caller", model=api, model_settings=required, tools=[note])
        assert isinstance((await agents.Runner.run(caller, QUESTION)).final_output, str)
        assert isinstance(await streamed(caller), str)
        assert len(noted) == 2 * number
        typed = agents.Agent(name="typed", model=api, model_settings=settings, output_type=Entry)
        found = (await agents.Runner.run(typed, QUESTION)).final_output
        assert isinstance(found, Entry)
        assert await streamed(typed) == found
