"""Words of the playground's tests: open the page, ask."""

from __future__ import annotations

from tests.server.browser import ENTER, Browser
from tests.server.serving import RunningServer

# JavaScript conditions: so many whole answers; a question can be sent.
ANSWERED = "document.querySelectorAll('.assistant:not([aria-busy])').length == args[0]"
READY = "!document.querySelector('#send').disabled && document.querySelector('#model').value"


def open_page(browser: Browser, server: RunningServer) -> None:
    browser.open(server.url)
    browser.wait(READY)


def ask(browser: Browser, question: str, answers: int = 1) -> None:
    """Type a question where the focus is, and wait until there are so many whole answers."""
    browser.press(question + ENTER)
    browser.wait(ANSWERED, answers)
