"""python llama_index_client.py <QUESTIONS: llama-index's answers as one line of JSON. See test_frameworks.py."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Entry(BaseModel):
    """Write down how many there are."""

    kind: Literal["file", "folder"]
    count: int = Field(ge=0, le=99)


def note(kind: Literal["file", "folder"], count: int) -> str:
    """Write down how many there are."""
    return f"{kind} {count}"


asked = json.load(sys.stdin)
text, question, options = asked["text"], asked["question"], asked["options"]
plain = OpenAILike(is_chat_model=False, **options)
chat = OpenAILike(is_chat_model=True, **options)
caller = OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
tool = FunctionTool.from_defaults(note, fn_schema=Entry)
calling: dict[str, Any] = {"tools": [tool], "user_msg": question, "tool_choice": "required"}
(call,) = caller.get_tool_calls_from_response(caller.chat_with_tools(**calling))
*_, last = caller.stream_chat_with_tools(**calling)
(streamed_call,) = caller.get_tool_calls_from_response(last)
answers = {
    "text": plain.complete(text).text,
    "streamed_text": "".join(part.delta for part in plain.stream_complete(text)),
    "chat": chat.complete(question).text,
    "streamed_chat": "".join(part.delta or "" for part in chat.stream_chat([ChatMessage(content=question)])),
    "typed": caller.as_structured_llm(Entry).complete(question).raw.model_dump(),
    "called": call.tool_kwargs,
    "streamed_call": streamed_call.tool_kwargs,
}
print(json.dumps(answers))
