"""The page at / in headless Chromium: the server's states, and every reader: keyboard, voice, dark, narrow."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from quire.frontend.echo_client import EchoClient
from quire.messages import EngineProgress
from tests.server.browser import ENTER, ESCAPE, SHIFT, SPACE, TAB
from tests.server.playground_page import ANSWERED, READY, ask, kept_chats, open_page
from tests.server.serving import ANSWER, MAX_MODEL_LEN, TEXT, RunningServer


def test_start_is_followed(browser):
    client = EchoClient(ANSWER, max_model_len=MAX_MODEL_LEN, is_ready=False)
    with RunningServer(client, waits_for_engine=False) as server:
        browser.open(server.url)
        browser.wait_for_text("#about", "The engine is starting")
        assert browser.js("document.querySelector('#send').disabled")
        server.run(lambda: client.push(EngineProgress("load", 0.43, "model-00001-of-00002")))
        browser.wait_for_text("#phase", "load: model-00001-of-00002")
        assert browser.text("#percent") == "43 %"
        assert browser.js("document.querySelector('#progress').value") == 0.43
        browser.press("Hi" + ENTER)
        assert browser.js("document.querySelector('#prompt').value") == "Hi", "a question may be written meanwhile"
        server.run(client.make_ready)
        browser.wait(READY)
        assert browser.js("document.querySelector('#starting').offsetHeight") == 0
        ask(browser, "")
        assert browser.text(".assistant .text") == TEXT


def test_a_server_that_goes_away(browser):
    with RunningServer() as server:
        open_page(browser, server)
    browser.press("Hi" + ENTER)
    browser.wait_for_text(".error", "The server does not answer.")
    browser.wait_for_text("#notice.alarm", "The server does not answer. Trying again.")
    assert browser.js("document.querySelector('#send').disabled")


def test_a_server_that_comes_back_with_another_model(browser):
    with RunningServer() as server:
        open_page(browser, server)
        browser.cdp("Network.enable")
        conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.cdp("Network.emulateNetworkConditions", offline=True, **conditions)
        browser.press("Hi" + ENTER)
        browser.wait_for_text("#notice.alarm", "The server does not answer. Trying again.")
        state = server.app.state.quire
        state.settings = replace(state.settings, served_model_names=("other",))
        browser.cdp("Network.emulateNetworkConditions", offline=False, **conditions)
        browser.wait(READY)
        assert browser.js("document.querySelector('#model').value") == "other"
        assert browser.text("#model-line").startswith("other · ")
        browser.click(".error .tools button")
        browser.wait(ANSWERED, 1)


def test_api_key(browser):
    key = "sécret-key"
    with RunningServer(api_keys=("another", key)) as server:
        browser.open(server.url)
        browser.wait("document.querySelector('#key-dialog').open && document.activeElement.id == 'key'")
        browser.press("wrong" + ENTER)
        browser.wait_for_text("#key-error", "The server does not accept this key.")
        assert not re.search("header|bearer|authorization", browser.text("#key-dialog"), re.IGNORECASE)
        browser.press(ESCAPE)
        browser.wait("!document.querySelector('#key-dialog').open")
        browser.click("#prompt")
        browser.press("Hi" + ENTER)
        browser.wait("document.querySelector('#key-dialog').open")
        browser.js("(document.querySelector('#key').value = '', 1)")
        browser.press(key + ENTER)
        browser.wait(READY)
        browser.wait("!document.querySelector('#key-dialog').open")
        ask(browser, "")
        assert browser.text(".assistant .text") == TEXT
        assert browser.js("[sessionStorage.getItem('quire.key'), Object.values(localStorage), document.cookie]") == [
            key,
            [],
            "",
        ]
        assert key not in browser.js("document.documentElement.outerHTML")
        (chat,) = kept_chats(browser)
        assert key not in json.dumps(chat, ensure_ascii=False)
        browser.open(server.url)
        browser.wait(READY)
        browser.js("(Object.defineProperty(navigator, 'clipboard', {value: {writeText(t) { window.clip = t; }}}), 1)")
        for what, secret in (("curl", "Bearer $QUIRE_API_KEY"), ("python", 'os.environ["QUIRE_API_KEY"]')):
            browser.click(f"#copy-{what}")
            copied = browser.wait("window.clip")
            assert key not in copied
            browser.wait("window.clip.includes(args[0])", secret)


def test_gauge(browser, endless):
    open_page(browser, endless)
    browser.wait_for_text("#kv-size", "of 16,384 tokens")
    assert browser.text("#kv-text") == "0 %"
    browser.cdp("Input.insertText", text="word " * 200)
    browser.press(ENTER)
    browser.wait("Number(document.querySelector('#kv').ariaValueNow) > 1")
    assert browser.text("#requests") == "1 running"
    assert re.fullmatch(r"\d+(\.\d\d)? %", browser.text("#kv-text"))
    browser.press(ESCAPE)
    endless.wait_for_idle()
    browser.wait("document.querySelector('#kv').ariaValueNow == 0")


def test_without_metrics(browser):
    with RunningServer() as server:
        server.app.state.quire.metrics = None
        open_page(browser, server)
        ask(browser, "Hi")
        assert browser.text(".assistant .text") == TEXT
        assert browser.text("#kv-text") == "–"
        assert sum(url.endswith("/metrics") for url in browser.requested_urls()) == 1
        browser.open(server.url)


def test_keyboard_alone(browser, steady):
    open_page(browser, steady)
    browser.js("(document.body.tabIndex = -1, document.body.focus(), 1)")
    browser.press(TAB)
    assert browser.focused() == "Skip to the message box"
    browser.press(ENTER)
    browser.wait("document.activeElement.id == 'prompt'")
    browser.press("one")
    browser.press(ENTER, holding=SHIFT)
    browser.press("two" + ENTER)
    browser.wait(ANSWERED, 1)
    assert browser.text(".user .text") == "one\ntwo"
    order = []
    for _ in range(40):
        browser.press(TAB)
        order.append(browser.focused())
        style = browser.js("(s => [s.outlineStyle, s.outlineWidth])(getComputedStyle(document.activeElement))")
        assert style[0] == "solid", f"no visible focus on {order[-1]}"
        assert style[1] != "0px", f"no visible focus on {order[-1]}"
        if order[-1] == "copy-python":
            break
    assert order == [
        "send", "Reset", "model", "system", "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop",
        "response_format", "tools", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "copy-curl", "copy-python",
    ]  # fmt: skip
    browser.js("(document.querySelector('.skip').focus(), 1)")
    order = []
    while len(order) < 20 and browser.focused() != "prompt":
        browser.press(TAB)
        order.append(browser.focused())
    assert order == [
        "toggle-sidebar", "new", "theme", "toggle-settings", "search", "one", "×", "export", "import", "delete-all",
        "log", "Edit", "Copy", "Copy", "Retry", "prompt",
    ]  # fmt: skip
    browser.press(TAB, holding=SHIFT)
    browser.press(SPACE)  # on Retry
    browser.wait("document.querySelector('[aria-busy]')")
    browser.wait(ANSWERED, 1)
    assert browser.focused() == "prompt"


def test_what_a_screen_reader_finds(browser, steady):
    open_page(browser, steady)
    ask(browser, "Hi")
    nodes = browser.cdp("Accessibility.getFullAXTree")["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
    ]
    controls = ("button", "textbox", "spinbutton", "combobox", "link", "meter", "progressbar", "region", "article")
    assert [role for role, name in found if role in controls and not name] == []
    assert set(found) >= {
        ("main", ""), ("region", "Conversation"), ("article", "You"), ("article", "Answer"), ("textbox", "Message"),
        ("button", "Send"), ("navigation", "Chats"), ("searchbox", "Search the chats"), ("button", "Delete chat: Hi"),
        ("spinbutton", "Temperature"), ("button", "Theme: system"),
    }  # fmt: skip
    assert browser.js("[...document.querySelectorAll('[aria-live], [role=status], [role=log]')].map(e => e.id)") == [
        "no-chats", "notice", "spoken",
    ], "the answer itself is not a live region: every token would be said"  # fmt: skip
    assert browser.text("#spoken") == TEXT
    ask(browser, "Again", 2)
    assert browser.text("#spoken") == TEXT, "an answer is said once"


def test_light_and_dark(browser, steady):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(248, 246, 241)", "rgb(23, 22, 20)"
    open_page(browser, steady)
    assert browser.js(background) == light
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.js(background) == dark
    for theme, colour in (("light", light), ("dark", dark), ("system", dark), ("light", light)):
        browser.click("#theme")
        assert (browser.js("document.querySelector('#theme').ariaLabel"), browser.js(background)) == (
            f"Theme: {theme}",
            colour,
        )
    open_page(browser, steady)
    assert browser.js(background) == light, "the choice is remembered"


@pytest.mark.parametrize("width", [320, 360, 800])
def test_narrow_screens(browser, steady, width):
    browser.cdp("Emulation.setDeviceMetricsOverride", width=width, height=640, deviceScaleFactor=1, mobile=True)
    open_page(browser, steady)
    ask(browser, "x" * 200)
    assert browser.js("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    log = browser.js("(log => log.scrollWidth - log.clientWidth)(document.querySelector('#log'))")
    assert log == 0, "the conversation scrolls sideways"
    assert browser.js("document.querySelector('#settings').hidden")
    browser.js("(document.querySelector('#toggle-settings').focus(), 1)")
    browser.press(ENTER)
    assert browser.focused() == "close-settings"
    assert browser.js("[...document.querySelectorAll('#settings')].every(e => e.scrollWidth <= e.clientWidth)")
    assert browser.js("document.querySelector('#main').inert")
    browser.press(ESCAPE)
    assert browser.focused() == "toggle-settings"
    assert browser.js("document.querySelector('#settings').hidden && !document.querySelector('#main').inert")


def test_nothing_jumps(browser, steady):
    open_page(browser, steady)
    browser.js(
        "(window.shift = 0, new PerformanceObserver(list => list.getEntries().forEach(e => window.shift += e.value))"
        ".observe({type: 'layout-shift', buffered: true}), 1)"
    )
    ask(browser, "Hi")
    ask(browser, "Hi again", 2)
    # 0.1 is what the web calls good; here only the end of the conversation may move up.
    assert browser.js("new Promise(done => requestAnimationFrame(() => done(window.shift)))") < 0.05
