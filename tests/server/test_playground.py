"""The page at / in headless Chromium: asking, answers, errors, requests and copies."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys

import pytest

from quire.errors import InvalidRequestError
from tests.server.browser import ENTER, ESCAPE
from tests.server.playground_page import ANSWERED, ask, open_page, speaking
from tests.server.serving import ANSWER, MODEL, TEXT, TOKENIZER, RunningServer


def last_prompt(server: RunningServer) -> str:
    """What the model was last asked, as text."""
    return TOKENIZER.decode(list(server.last_request().prompt_token_ids), skip_special_tokens=False)


def test_question_and_streamed_answer(browser, steady):
    open_page(browser, steady)
    assert browser.text("#model-line") == f"{MODEL} · context 2,048 tokens"
    browser.press("What does os.path.join do?" + ENTER)
    partial = browser.wait("document.querySelector('[aria-busy] .text')?.textContent")
    assert TEXT.startswith(partial)
    assert len(partial) < len(TEXT)
    assert browser.text("#send") == "Stop"
    browser.wait(ANSWERED, 1)
    assert browser.text(".assistant .text") == TEXT
    assert browser.text(".user .text") == "What does os.path.join do?"
    assert browser.text("#send") == "Send"
    assert "What does os.path.join do?" in last_prompt(steady)
    assert re.fullmatch(
        rf"{len(ANSWER) + 1} tokens · [\d,.]+ tokens/s · first after \d+ ms · prompt \d+", browser.text(".facts")
    )
    assert re.fullmatch(r"[\d,.]+ tokens/s", browser.text("#speed"))
    assert re.fullmatch(r"\d+ ms", browser.text("#first"))
    assert browser.focused() == "prompt"


def test_thinking_is_folded_above_the_answer(browser):
    with speaking([{"reasoning": "Let me "}, {"reasoning": "see."}, "Yes", "."]) as server:
        open_page(browser, server)
        ask(browser, "Is it?")
        for _ in range(2):
            assert browser.text(".assistant .text") == "Yes."
            assert browser.js("document.querySelector('.thinking').open") is False
            assert browser.js("document.querySelector('.thoughts').textContent") == "Let me see."
            browser.open(server.url)
            browser.wait("document.querySelectorAll('.turn').length == 2")


def test_json_and_calls_are_indented(browser):
    """An answer that is JSON, and the arguments of calls; numbers and strings stay as the model wrote them."""
    calls = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "note", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"n": 12345678901234567890, '}},
        {"index": 0, "function": {"arguments": '"to": ["a: {b}", {}, []]}'}},
        {"index": 1, "id": "b", "function": {"name": "<b>", "arguments": "{"}},
    ]
    pieces = ['{"a": ', "[1, 2.50]", "}", *({"tool_calls": [call]} for call in calls)]
    with speaking(pieces) as server:
        open_page(browser, server)
        ask(browser, "Is it?")
        for _ in range(2):
            assert browser.text(".assistant .text pre") == '{\n  "a": [\n    1,\n    2.50\n  ]\n}'
            first, second = browser.js("[...document.querySelectorAll('.call')].map((call) => call.textContent)")
            arguments = '{\n  "n": 12345678901234567890,\n  "to": [\n    "a: {b}",\n    {},\n    []\n  ]\n}'
            assert first == "Call of note" + arguments
            assert second == "Call of <b>{"
            browser.open(server.url)
            browser.wait("document.querySelectorAll('.turn').length == 2")


def test_a_schema_and_tools_are_sent_and_copied(browser, steady):
    open_page(browser, steady)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    schema = {"type": "object", "properties": {"a": {"const": None}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "note", "parameters": schema}}
    browser.js("(document.querySelector('#response_format').value = args[0], 1)", "{")
    browser.click("#prompt")
    browser.press("Hi" + ENTER)
    assert browser.focused() == "response_format"
    browser.js("(document.querySelector('#response_format').value = args[0], 1)", json.dumps(schema))
    browser.click("#prompt")
    browser.press(ENTER)
    browser.wait(ANSWERED, 1)
    assert '"additionalProperties":false' in (steady.last_request().sampling_params.grammar or "")
    browser.js("(document.querySelector('#tools').value = args[0], 1)", json.dumps([tool]))
    browser.click("#copy-python")
    browser.wait_for_text("#notice", "Copied as Python")
    program = browser.js("navigator.clipboard.readText()")
    (asked,) = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call) and len(node.keywords) > 2]
    sent = {word.arg: ast.literal_eval(word.value) for word in asked.keywords if word.arg != "api_key"}
    assert sent["tools"] == [tool]
    assert sent["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_example_questions(browser, steady):
    open_page(browser, steady)
    question = browser.text("#chips button")
    browser.click("#chips button")
    browser.wait(ANSWERED, 1)
    assert browser.text(".user .text") == question
    assert browser.focused() == "prompt"


@pytest.mark.parametrize("how", ["escape", "button"])
def test_cancel(browser, endless, how):
    open_page(browser, endless)
    browser.press("Say it" + ENTER)
    browser.wait("document.querySelector('[aria-busy] .text')?.textContent.length > 30")
    if how == "escape":
        browser.press(ESCAPE)
    else:
        browser.click("#send")
    browser.wait(ANSWERED, 1)
    endless.wait_for_idle()
    assert browser.text(".facts").startswith("stopped · ")
    assert len(browser.text(".assistant .text")) > 30, "what was said stays"
    assert not browser.js("document.querySelector('.error')")
    browser.press("More" + ENTER)  # the conversation goes on, with the part of the answer
    browser.wait("document.querySelectorAll('.assistant')[1]?.textContent.length > 30")
    assert last_prompt(endless).count("<|im_start|>") == 4
    browser.press(ESCAPE)
    endless.wait_for_idle()


def test_error_with_the_servers_words(browser, steady):
    open_page(browser, steady)
    browser.click("#temperature")
    browser.press("5")
    browser.click("#prompt")
    browser.press("Hi" + ENTER)
    browser.wait_for_text(
        ".error[role=alert]", "temperature is out of range. Got 5.0. Expected a finite number in [0, 2]."
    )
    assert browser.text(".error .facts").startswith("invalid_value · request ")
    assert browser.js("document.querySelector('#temperature').ariaInvalid") == "true"
    assert not browser.js("document.querySelector('.assistant')")
    browser.click("#settings [type=reset]")
    browser.click(".error .tools button")
    browser.wait(ANSWERED, 1)
    assert browser.text(".assistant .text") == TEXT
    assert not browser.js("document.querySelector('.error') || document.querySelector('[aria-invalid]')")


def test_error_in_the_middle_of_an_answer(browser, endless):
    open_page(browser, endless)
    browser.press("Say it" + ENTER)
    browser.wait("document.querySelector('.assistant .text')?.textContent")
    request = endless.last_request().request_id
    endless.run(lambda: endless.client.fail_request(request, InvalidRequestError("It broke", fix="Mend it")))
    browser.wait_for_text(".error", "It broke. Mend it.")
    assert browser.text(".assistant .text"), "what was said stays"
    assert browser.text("#send") == "Send"


def test_a_question_that_failed_is_not_part_of_the_conversation(browser, steady):
    open_page(browser, steady)
    browser.js("(document.querySelector('#prompt').value = 'x'.repeat(9000), 1)")
    browser.press(ENTER)
    browser.wait_for_text(".error", "2048")
    ask(browser, "short")
    assert last_prompt(steady) == "<|im_start|>user\nshort<|im_end|>\n<|im_start|>assistant\n"


def test_connection_that_ends_in_the_middle_of_an_answer(browser, endless):
    open_page(browser, endless)
    browser.press("Say it" + ENTER)
    browser.wait("document.querySelector('.assistant .text')?.textContent")
    connections = endless._server.server_state.connections
    endless.run(lambda: [connection.transport.abort() for connection in set(connections)])
    browser.wait_for_text(".error", "The connection ended in the middle of the answer.")
    assert browser.text(".assistant .text"), "what was said stays"
    endless.wait_for_idle()


def test_edit_retry_and_new_chat(browser, steady):
    open_page(browser, steady)
    browser.click("#system")
    browser.press("Be brief.")
    browser.click("#prompt")
    ask(browser, "first")
    ask(browser, "second", 2)
    assert last_prompt(steady) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
        f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    )
    browser.press("a draft")
    browser.js("(document.querySelector('.user button').click(), 1)")  # Edit, shown when the mouse is over it
    assert browser.js("document.querySelector('#prompt').value") == "first"
    browser.press(ESCAPE)
    assert browser.js("document.querySelector('#prompt').value") == "a draft"
    browser.js("(document.querySelector('.user button').click(), 1)")
    browser.press(" of all" + ENTER)
    browser.wait(ANSWERED, 1)
    assert last_prompt(steady).endswith("<|im_start|>user\nfirst of all<|im_end|>\n<|im_start|>assistant\n")
    assert "second" not in last_prompt(steady)
    assert browser.js("document.querySelectorAll('.turn').length") == 2
    browser.click(".assistant .tools button:last-child")  # Retry
    browser.wait(ANSWERED, 1)
    assert last_prompt(steady).endswith("<|im_start|>user\nfirst of all<|im_end|>\n<|im_start|>assistant\n")
    browser.click("#new")
    assert browser.js("document.querySelectorAll('.turn').length") == 0
    assert browser.js("document.querySelector('#welcome').offsetHeight > 0")


def test_settings_are_sent(browser, steady):
    open_page(browser, steady)
    values = {
        "temperature": "0.5", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "max_tokens": "4", "seed": "-3",
        "stop": "END\\nOF\nFILE", "repetition_penalty": "1.1", "presence_penalty": "0.2", "frequency_penalty": "0.3",
    }  # fmt: skip
    browser.js(
        "(Object.entries(args[0]).forEach(([id, value]) => document.getElementById(id).value = value), 1)", values
    )
    ask(browser, "Hi")
    request = steady.last_request()
    params = request.sampling_params
    got = {name: getattr(params, name) for name in values if name not in ("max_tokens", "stop")}
    assert got == {name: float(value) for name, value in values.items() if name in got}
    assert params.stop == ["END\nOF", "FILE"]
    assert request.max_tokens == 4
    assert "cut at max tokens" in browser.text(".facts")


def test_a_mistyped_number_is_not_dropped(browser, steady):
    open_page(browser, steady)
    sent = len(steady.client.sent)
    browser.click("#seed")
    browser.press("1e")
    browser.click("#prompt")
    browser.press("Hi" + ENTER)
    assert browser.focused() == "seed"
    assert not browser.js("document.querySelector('.turn')")
    assert len(steady.client.sent) == sent


def test_copies_run(browser, steady):
    open_page(browser, steady)
    browser.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.js("(document.querySelector('#top_k').value = '7', document.querySelector('#temperature').value = '0.5')")
    question = 'It\'s a "test"\\n $HOME `x` ünï 😀'
    ask(browser, "before")
    browser.press(question)

    def copied(what: str) -> str:
        browser.click(f"#copy-{what}")
        browser.wait_for_text("#notice", f"Copied as {'curl' if what == 'curl' else 'Python'}")
        return browser.js("navigator.clipboard.readText()")

    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "before"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": question},
        ],
        "temperature": 0.5,
        "top_k": 7,
        "stream": True,
    }
    command, *words = shlex.split(copied("curl"))
    assert (command, words[:2]) == ("curl", ["-N", f"{steady.url}/v1/chat/completions"])
    assert json.loads(words[words.index("-d") + 1]) == body
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    program = copied("python")
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert (run.stdout, run.stderr) == (TEXT, "")
    assert last_prompt(steady).endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert steady.last_request().sampling_params.top_k == 7
