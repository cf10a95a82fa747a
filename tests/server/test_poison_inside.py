"""Any value inside tools, schemas and histories: an answer or a 4xx, as tests/server/test_poison.py has it for fields.

The server reads calls and reasoning, so that no value is refused unread.
"""

from __future__ import annotations

import itertools

import pytest

from quire.frontend.echo_client import EchoClient
from tests.examples import IS_FULL
from tests.server.serving import MAX_MODEL_LEN, RunningServer
from tests.server.test_poison import POISON, check, four_streams

# In place of P comes the poison.
SCHEMAS = ("P", '{"properties": P}', '{"properties": {"a": P}, "required": P}', '{"type": P, "$ref": P}')
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "reasoning_end", "reasoning_start")
CHAT = [
    '"tools": [P]',
    '"tools": [{"type": P, "function": {"name": P, "strict": P}}]',
    *(
        f'"tools": [{{"function": {{"name": "f", "strict": true, "parameters": {schema}}}}}]{choice}'
        for schema in SCHEMAS
        for choice in ("", ', "tool_choice": "required"', ', "tool_choice": {"function": {"name": "f"}}')
    ),
    *(f'"tools": [{{"function": {{"name": "f"}}}}], "tool_choice": {each}' for each in ("P", '{"function": P}')),
    '"response_format": {"type": P}',
    '"response_format": {"type": "json_schema", "json_schema": {"name": P, "schema": {}, "strict": P}}',
    *(f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}' for schema in SCHEMAS),
    '"response_format": {"type": "structural_tag", "triggers": ["<f>"], "structures": P}',
    *(f'"structured_outputs": {{"{name}": P}}' for name in CONSTRAINTS),
    *(f'"structured_outputs": {{"json": {{}}, "{name}": P}}' for name in OPTIONS),
]
CHAT_HISTORY = [
    '{"role": P, "content": "Hi"}',
    '{"role": "user", "content": [{"type": "text", "text": P}]}',
    '{"role": "assistant", "content": P, "reasoning": P, "reasoning_content": P}',
    '{"role": "assistant", "content": null, "tool_calls": P}',
    '{"role": "assistant", "tool_calls": [{"id": P, "type": P, "function": P}]}',
    '{"role": "assistant", "tool_calls": [{"function": {"name": P, "arguments": "{}"}}]}',
    '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": P}}]}',
    '{"role": "tool", "tool_call_id": P, "content": P}',
]
MESSAGES = [
    '"tools": [P]',
    *(f'"tools": [{{"name": "f", "strict": true, "input_schema": {schema}}}]' for schema in SCHEMAS),
    *(f'"tools": [{{"name": "f", "input_schema": {{}}}}], "tool_choice": {each}' for each in ("P", '{"type": P}')),
    '"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": P}',
    '"thinking": {"type": P}',
    '"output_config": {"format": P}',
    *(f'"output_config": {{"format": {{"type": "json_schema", "schema": {schema}}}}}' for schema in SCHEMAS),
]
MESSAGES_HISTORY = [
    '{"role": "user", "content": [P]}',
    '{"role": "assistant", "content": [{"type": "tool_use", "id": P, "name": P, "input": {}}]}',
    '{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": P}]}',
    '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": P}]}',
    '{"role": "assistant", "content": [{"type": "thinking", "thinking": P, "signature": P}]}',
]
RESPONSES = [
    '"tools": [P]',
    '"tools": [{"type": "function", "name": P}]',
    *(f'"tools": [{{"type": "function", "name": "f", "strict": true, "parameters": {schema}}}]' for schema in SCHEMAS),
    '"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": P}',
    '"text": {"format": P}',
    *(f'"text": {{"format": {{"type": "json_schema", "name": "x", "schema": {schema}}}}}' for schema in SCHEMAS),
    '"reasoning": {"effort": P}',
]
RESPONSES_HISTORY = [
    '{"role": "user", "content": [P]}',
    '{"type": "function_call", "call_id": P, "name": P, "arguments": "{}"}',
    '{"type": "function_call", "call_id": "a", "name": "f", "arguments": P}',
    '{"type": "function_call_output", "call_id": "a", "output": P}',
    '{"type": "reasoning", "content": P, "summary": P}',
]
# Path -> the field of the history, a limit, and what may be wrong in other fields and in the history.
PLACES = {
    "/v1/chat/completions": ("messages", '"max_tokens": 1', CHAT, CHAT_HISTORY),
    "/v1/messages": ("messages", '"max_tokens": 1', MESSAGES, MESSAGES_HISTORY),
    "/v1/responses": ("input", '"max_output_tokens": 1', RESPONSES, RESPONSES_HISTORY),
}


@pytest.mark.parametrize("path", PLACES)
def test_poison_in_tools_schemas_and_histories(path: str) -> None:
    name, limit, fields, history = PLACES[path]
    user = '{"role": "user", "content": "Hi"}'
    bodies = [f'{{{limit}, "{name}": [{user}], {field}}}' for field in fields]
    bodies += [f'{{{limit}, "{name}": [{user}, {message}, {user}]}}' for message in history]
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    # Streams without a pause between their tokens would take the processor from the poison.
    client = EchoClient(None, step_seconds=0.01, max_model_len=MAX_MODEL_LEN)
    with RunningServer(client, **settings) as server, four_streams(server):
        for body in bodies:
            assert server.ask("POST", path, body.replace("P", "{}").encode()).status_code in (200, 400)
        for (at, body), (index, poison) in itertools.product(enumerate(bodies), enumerate(POISON)):
            if IS_FULL or (at + index) % 6 == 0:
                check(server.ask("POST", path, body.replace("P", poison).encode()), (path, body, poison[:40]))
