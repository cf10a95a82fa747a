"""Chats of the page at / in headless Chromium: kept, found, exported, imported, deleted; versions; settings."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from tests.server.browser import ENTER, ESCAPE
from tests.server.playground_page import READY, ask, kept_chats, open_page
from tests.server.serving import TEXT, RunningServer
from tests.server.test_playground import last_prompt

ROWS = "[...document.querySelectorAll('#chats .chat')].map(e => e.textContent)"
QUESTIONS = "[...document.querySelectorAll('.user .text')].map(e => e.textContent)"
VERSIONS = "[...document.querySelectorAll('.versions')].map(e => e.ariaLabel)"


def press_tool(browser, role: str, name: str, number: int = 0) -> None:
    """A turn's tool, which is shown when the mouse is over the turn."""
    script = "([...document.querySelectorAll(args[0])].filter(b => b.ariaLabel == args[1] || b.textContent == args[1])"
    browser.js(script + "[args[2]].click(), 1)", f".{role} .tools button", name, number)


def give_file(browser, content: str) -> None:
    """As if the reader had chosen a file of this content."""
    browser.js(
        """(() => {
            const files = new DataTransfer();
            files.items.add(new File([args[0]], "chats.json", { type: "application/json" }));
            document.querySelector("#file").files = files.files;
            document.querySelector("#file").dispatchEvent(new Event("change"));
            return 1;
        })()""",
        content,
    )


def test_chats_are_kept(browser, steady):
    open_page(browser, steady)
    assert browser.js(ROWS) == []
    browser.js("(document.querySelector('#prompt').value = 'first\\nof all', 1)")
    ask(browser, "")
    browser.click("#new")
    browser.wait("document.activeElement.id == 'prompt' && document.querySelectorAll('.turn').length == 0")
    ask(browser, "second")
    assert browser.js(ROWS) == ["second", "first"]
    browser.open(steady.url)
    browser.wait("document.querySelectorAll('.turn').length == 2")
    assert browser.js(QUESTIONS) == ["second"], "a reload shows the same chat"
    facts = browser.text(".assistant .facts")
    assert " tokens/s · " in facts
    browser.wait(READY)
    browser.click("#chats li:nth-child(2) .chat")
    assert browser.js(QUESTIONS) == ["first\nof all"]
    assert browser.text(".assistant .text") == TEXT
    assert browser.js("document.querySelector('#chats [aria-current]').textContent") == "first"
    assert browser.js("document.title") == "first · Quire"
    ask(browser, "third", 2)
    assert last_prompt(steady).count("<|im_start|>") == 4, "the conversation goes on"
    assert browser.js(ROWS) == ["first", "second"], "newest first"
    (first, second) = sorted(kept_chats(browser), key=lambda chat: len(chat["messages"]), reverse=True)
    assert [message["content"] for message in first["messages"]] == ["first\nof all", TEXT, "third", TEXT]
    assert len(second["messages"]) == 2


def test_search_and_delete(browser, steady):
    open_page(browser, steady)
    for question in ("apples", "pears", "plums"):
        browser.click("#new")
        ask(browser, question)
    browser.click("#search")
    browser.press("PEAR")
    assert browser.js(ROWS) == ["pears"]
    browser.press("xyz")
    assert (browser.js(ROWS), browser.text("#no-chats")) == ([], "No chat says that.")
    browser.js("(document.querySelector('#search').select(), 1)")
    browser.press("naïve caf")  # what the answers say
    assert len(browser.js(ROWS)) == 3
    browser.js("(document.querySelector('#search').value = '', 1)")
    browser.press("e")
    assert browser.js("document.querySelector('#delete-dialog').open") is False
    browser.click("#chats li:first-child .delete")
    browser.wait("document.querySelector('#delete-dialog').open")
    assert browser.text("#delete-title") == "Delete this chat?"
    assert browser.focused() == "delete-cancel"
    browser.press(ESCAPE)
    browser.wait("!document.querySelector('#delete-dialog').open")
    assert len(kept_chats(browser)) == 3
    browser.click("#chats li:first-child .delete")
    browser.click("#delete")
    browser.wait("document.querySelectorAll('.turn').length == 0")  # it was the one on the page
    assert browser.js(ROWS) == ["pears", "apples"]
    assert len(kept_chats(browser)) == 2
    browser.click("#delete-all")
    assert browser.text("#delete-title") == "Delete 2 chats?"
    browser.click("#delete")
    browser.wait("document.querySelectorAll('#chats li').length == 0")
    browser.open(steady.url)
    browser.wait(READY)
    assert browser.js(ROWS) == kept_chats(browser) == []


def test_export_and_import(browser, steady):
    open_page(browser, steady)
    browser.click("#system")
    browser.press("Be brief.")
    browser.click("#prompt")
    ask(browser, "ünï 😀")
    press_tool(browser, "assistant", "Retry")
    browser.wait("document.querySelector('.versions')")
    with tempfile.TemporaryDirectory() as folder:
        browser.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder)
        browser.click("#export")
        deadline = time.monotonic() + 10
        while not (files := list(Path(folder).glob("*.json"))):
            assert time.monotonic() < deadline, "no file was saved"
            time.sleep(0.02)
        exported = files[0].read_text()
    assert files[0].name.startswith("quire-chats-20")
    document = json.loads(exported)
    assert (document["format"], document["version"]) == ("quire-chats", 1)
    before = kept_chats(browser)
    assert document["chats"] == before
    give_file(browser, exported)
    browser.wait_for_text("#notice", "Imported 0 of 1 chats; the others are here already")
    browser.click("#delete-all")
    browser.click("#delete")
    browser.wait("document.querySelectorAll('#chats li').length == 0")
    give_file(browser, exported)
    browser.wait_for_text("#notice", "Imported 1 of 1 chats")
    assert kept_chats(browser) == before
    browser.js("(document.querySelector('#system').value = '', 1)")
    browser.click("#chats .chat")
    assert browser.js(QUESTIONS) == ["ünï 😀"]
    assert browser.js(VERSIONS) == ["Version 2 of 2"]
    assert browser.js("document.querySelector('#system').value") == "Be brief.", "a chat brings its settings"


MESSAGE = {"parent": -1, "role": "user", "content": "x", "facts": "", "shown": -1}
CHAT = {"id": "a", "updated": 1, "settings": {}, "shown": 0, "messages": [MESSAGE]}
WRONG = [
    ("{", "This is no file of exported chats."),
    ("null", "This is no file of exported chats."),
    ([], "This is no file of exported chats."),
    (None, "in chat 1 of the file the id or the time is missing"),
    ({**CHAT, "id": 5}, "in chat 1 of the file the id or the time is missing"),
    ({**CHAT, "messages": {}}, "in chat 1 of the file there is no list of messages"),
    ({**CHAT, "messages": [None]}, "message 1 is none"),
    ({**CHAT, "messages": [{**MESSAGE, "content": 1}]}, "message 1 is none"),
    ({**CHAT, "messages": [{**MESSAGE, "role": "system"}]}, "message 1 is none"),
    ({**CHAT, "messages": [{**MESSAGE, "parent": 0}]}, "message 1 follows no message"),
    ({**CHAT, "messages": [{**MESSAGE, "role": "assistant"}]}, "message 1 follows no message"),
    ({**CHAT, "messages": [MESSAGE, {**MESSAGE, "parent": 0}]}, "message 2 follows no message"),
]


def test_wrong_files_are_refused_whole(browser, steady):
    open_page(browser, steady)
    for content, message in WRONG:
        if not isinstance(content, str):
            chats = content if isinstance(content, list) else [content]
            content = json.dumps({"format": "quire-chats" if chats else "x", "version": 1, "chats": chats})
        browser.js("(document.querySelector('#notice').textContent = '', 1)")
        give_file(browser, content)
        browser.wait_for_text("#notice", message)
        assert browser.js(ROWS) == []


def test_a_hostile_file_is_text(browser, steady):
    """Loops in the data, names of properties, markup and endless titles do no harm."""
    markup = "<img src=x onerror='window.hit = 1'>[x](javascript:window.hit=2)"
    answer = {"parent": 0, "role": "assistant", "content": markup, "facts": markup, "shown": 0}
    hostile = {
        "id": "__proto__",
        "updated": 1e300,
        "settings": {"model": markup, "__proto__": "x", "system": markup, "temperature": markup, "top_p": 7},
        "shown": 0,
        "evil": markup,
        "messages": [{**MESSAGE, "content": markup * 3, "shown": 1}, answer, {**answer, "shown": "__proto__"}],
    }
    open_page(browser, steady)
    give_file(browser, json.dumps({"format": "quire-chats", "version": 1, "chats": [hostile]}))
    browser.wait("document.querySelector('#chats .chat')")
    browser.click("#chats .chat")
    assert browser.js(VERSIONS) == ["Version 1 of 2"]
    assert browser.text(".assistant .facts") == markup
    assert browser.js("document.querySelector('#temperature').value") == ""
    assert browser.js("document.querySelectorAll('#turns :is(img, a[href]), #chats img').length") == 0
    assert browser.js("window.hit === undefined && {}.evil === undefined")
    assert "evil" not in kept_chats(browser)[0]
    ask(browser, "goes on", 2)


def test_versions_of_an_answer(browser, steady):
    open_page(browser, steady)
    ask(browser, "one")
    ask(browser, "two", 2)
    press_tool(browser, "assistant", "Retry")  # of the first answer
    browser.wait("document.querySelectorAll('.assistant:not([aria-busy])').length == 1")
    browser.wait("document.querySelector('.versions')")
    assert browser.js(VERSIONS) == ["Version 2 of 2"]
    assert browser.js(QUESTIONS) == ["one"]
    assert browser.js("[...document.querySelectorAll('.versions button')].map(b => b.disabled)") == [False, True]
    press_tool(browser, "assistant", "Earlier version")
    assert browser.js(VERSIONS) == ["Version 1 of 2"]
    assert browser.js(QUESTIONS) == ["one", "two"], "what followed it is there again"
    browser.open(steady.url)
    browser.wait("document.querySelectorAll('.turn').length == 4")
    assert browser.js(VERSIONS) == ["Version 1 of 2"], "the version that is shown is kept"
    press_tool(browser, "assistant", "Later version")
    assert browser.js(QUESTIONS) == ["one"]


def test_versions_of_a_question(browser, steady):
    open_page(browser, steady)
    ask(browser, "one")
    ask(browser, "two", 2)
    for text in ("deux", "zwei"):
        press_tool(browser, "user", "Edit", 1)
        browser.js("(document.querySelector('#prompt').select(), 1)")
        ask(browser, text, 2)
    assert browser.js(VERSIONS) == ["Version 3 of 3"]
    assert browser.js(QUESTIONS) == ["one", "zwei"]
    assert "deux" not in last_prompt(steady)
    press_tool(browser, "user", "Earlier version")
    press_tool(browser, "user", "Earlier version")
    assert browser.js(QUESTIONS) == ["one", "two"]
    assert browser.js("document.querySelector('.versions').textContent") == "‹1/3›"
    ask(browser, "next", 3)
    assert last_prompt(steady).count("<|im_start|>user\n") == 3
    assert "zwei" not in last_prompt(steady)


def test_a_question_without_an_answer_can_be_asked_again(browser, endless):
    open_page(browser, endless)
    browser.js("(document.querySelector('#prompt').value = 'x'.repeat(9000), 1)")
    browser.press(ENTER)
    browser.wait_for_text(".error", "2048")
    browser.open(endless.url)
    browser.wait_for_text(".note", "This question has no answer.")
    browser.wait(READY)
    browser.click(".note button")
    browser.wait_for_text(".error", "2048")
    assert len(kept_chats(browser)[0]["messages"]) == 1


def test_an_old_answer_stays_when_its_retry_fails(browser, steady):
    open_page(browser, steady)
    ask(browser, "Hi")
    browser.click("#temperature")
    browser.press("5")
    press_tool(browser, "assistant", "Retry")
    browser.wait_for_text(".error", "temperature is out of range")
    assert browser.text(".assistant .text") == TEXT
    assert browser.js(VERSIONS) == []
    assert len(kept_chats(browser)[0]["messages"]) == 2


def test_an_answer_that_is_left_is_kept_as_far_as_it_came(browser, endless):
    open_page(browser, endless)
    browser.press("left" + ENTER)
    browser.wait("document.querySelector('[aria-busy] .text')?.textContent.length > 30")
    browser.click("#new")
    endless.wait_for_idle()
    assert browser.text("#send") == "Send"
    assert "left" not in browser.js(QUESTIONS)
    browser.wait("document.querySelector('#chats .chat').textContent == 'left'")
    browser.click("#chats .chat")
    assert browser.text(".assistant .facts").startswith("stopped · ")
    assert len(browser.text(".assistant .text")) > 30


def test_a_chat_deleted_while_it_is_answered_stays_deleted(browser, endless):
    open_page(browser, endless)
    browser.press("Hi" + ENTER)
    browser.wait("document.querySelector('[aria-busy] .text')?.textContent")
    browser.click("#chats .delete")
    browser.click("#delete")
    endless.wait_for_idle()
    browser.wait("document.querySelectorAll('.turn').length == 0")
    assert kept_chats(browser) == []
    assert browser.js(ROWS) == []


def test_settings_are_kept(browser, steady):
    open_page(browser, steady)
    for field, value in (("temperature", "0.5"), ("system", "Be brief."), ("stop", "END")):
        browser.click(f"#{field}")
        browser.press(value)
    browser.js("(document.querySelector('#model').value = 'alias', 1)")
    browser.js("(document.querySelector('#model').dispatchEvent(new Event('change')), 1)")
    browser.open(steady.url)
    browser.wait(READY)
    values = "['temperature', 'system', 'stop', 'model', 'top_k'].map(id => document.getElementById(id).value)"
    assert browser.js(values) == ["0.5", "Be brief.", "END", "alias", ""]
    assert browser.text("#model-line").startswith("alias · ")
    ask(browser, "Hi")
    assert steady.last_request().sampling_params.temperature == 0.5
    browser.click("#settings [type=reset]")
    browser.wait("localStorage.getItem('quire.settings') == '{\"model\":\"alias\"}'")
    browser.open(steady.url)
    browser.wait(READY)
    assert browser.js(values)[:2] == ["0.5", "Be brief."], "the chat on the page brings its settings"
    browser.click("#new")
    assert browser.js(values)[0] == "0.5", "a new chat goes on with what is set"


def test_without_a_database(browser, steady):
    """A browser may forbid it: the page says so, and works."""
    script = "Object.defineProperty(window, 'indexedDB', { get() { throw new Error('forbidden'); } })"
    added = browser.cdp("Page.addScriptToEvaluateOnNewDocument", source=script)
    open_page(browser, steady)
    browser.wait_for_text("#notice", "This browser does not keep the chats: forbidden")
    browser.cdp("Page.removeScriptToEvaluateOnNewDocument", **added)
    ask(browser, "Hi")
    assert browser.js(ROWS) == ["Hi"]
    browser.open(steady.url)
    browser.wait(READY)


def test_the_page_works_under_a_prefix(browser):
    with RunningServer(root_path="/llm") as server:
        browser.open(server.url + "/llm")
        browser.wait(READY)
        ask(browser, "Hi")
        assert browser.text(".assistant .text") == TEXT
