"""Items of the Responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from quire.errors import InvalidRequestError
from quire.server.protocol.responses import ITEM_FIELDS, InputItem, InputText


def chat_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items as messages of a chat: items that the model wrote in one turn become one message. Raises
    InvalidRequestError.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        for name in ITEM_FIELDS[item.type]:
            if getattr(item, name) in (UNSET, None):
                raise InvalidRequestError(
                    f"An item of type {item.type} has no {name}",
                    expected=", ".join(ITEM_FIELDS[item.type]),
                    param=f"input[{index}].{name}",
                )
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif item.type == "message" and (item.role != "assistant" or last is None or last["content"]):
            # Templates know no developers.
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        else:
            if last is None or item.type == "reasoning":
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            if item.type == "message":
                last["content"] = _content(item.content)
            elif item.type == "reasoning":
                last["reasoning_content"] = _content(item.content)
            else:
                function = {"name": item.name, "arguments": item.arguments}
                last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return messages


def _content(content: str | list[InputText] | UnsetType | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
