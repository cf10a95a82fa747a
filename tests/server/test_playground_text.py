"""The text of the page at /: loads nothing, makes no markup of strings, labels everything, can be read."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from importlib import resources
from urllib.parse import unquote

from quire.server.protocol.chat import ChatRequest

PAGE = resources.files("quire.server").joinpath("playground/index.html").read_text()


class Tags(HTMLParser):
    """All start tags of the page, with what surrounds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))


TAGS = Tags().found
IDS = [attributes["id"] for _, attributes in TAGS if "id" in attributes]


def test_nothing_is_loaded_from_elsewhere():
    addresses = set(re.findall(r"\b(?:https?|wss?|ftp):", unquote(PAGE)))
    assert addresses == {"http:"}
    assert unquote(PAGE).count("http:") == 1, "only the namespace of the icon"
    assert "http://www.w3.org/2000/svg" in unquote(PAGE)
    for tag, attributes in TAGS:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
    assert not re.search(r"@import|url\(|\bimport\(|XMLHttpRequest|WebSocket|sendBeacon|EventSource", PAGE)
    assert set(re.findall(r"(?:fetch|call)\((?:HERE \+ )?\"([^\"]*)\"", PAGE)) == {
        "/readyz", "/metrics", "/v1/models", "/v1/chat/completions",
    }  # fmt: skip


def test_no_string_becomes_markup_or_code():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", PAGE)
    assert not re.search(r"\son[a-z]+=", PAGE), "handlers in attributes"
    assert "style=" not in PAGE


def test_the_key_is_stored_for_the_session_only():
    assert re.findall(r"(\w+)\.setItem\(\"quire\.key\"", PAGE) == ["session"]
    assert not re.search(r"document\.cookie|indexedDB", PAGE)


def test_ids_are_unique_and_references_exist():
    assert len(IDS) == len(set(IDS))
    for tag, attributes in TAGS:
        for name in ("for", "form", "aria-labelledby", "aria-describedby", "aria-controls"):
            assert set(attributes.get(name, "").split()) <= set(IDS), (tag, name)
    assert set(re.findall(r"\$\(\"([^\"]*)\"\)", PAGE)) <= set(IDS), "the script looks for elements that are not there"


def test_every_control_has_a_label():
    labelled = {attributes["for"] for tag, attributes in TAGS if tag == "label"}
    for tag, attributes in TAGS:
        if tag in ("input", "textarea", "select", "progress") or attributes.get("role") in ("region", "meter", "log"):
            assert attributes.get("id") in labelled or "aria-label" in attributes, (tag, attributes)


def test_settings_are_request_fields():
    form = PAGE[PAGE.index('<form id="fields"') : PAGE.index("</form>", PAGE.index('<form id="fields"'))]
    fields = set(re.findall(r'<(?:input|textarea) id="(\w+)"', form)) - {"system"}
    assert fields <= set(ChatRequest.__struct_fields__)
    assert fields >= {"temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "repetition_penalty"}


def luminance(colour: str) -> float:
    """WCAG 2.2: relative luminance of #rrggbb."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_contrasts():
    colours = {
        name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", PAGE)
    }
    pairs = [
        *((text, ground, 4.5) for text in ("text", "soft", "warn", "accent") for ground in ("page", "card")),
        *((text, "tint", 4.5) for text in ("text", "soft")),
        ("on-accent", "accent", 4.5),
        ("page", "text", 4.5),
        ("edge", "page", 3.0),
        ("edge", "card", 3.0),
    ]
    for (front, back, least), theme in itertools.product(pairs, (0, 1)):
        high, low = sorted((luminance(colours[front][theme]), luminance(colours[back][theme])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= least, (front, back, ("light", "dark")[theme])


def test_policy(server):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2
