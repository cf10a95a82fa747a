"""The text of the page at /: loads nothing from elsewhere, labels everything, can be read; its files and libraries."""

from __future__ import annotations

import hashlib
import itertools
import re
from html.parser import HTMLParser
from importlib import resources
from urllib.parse import unquote, urljoin

import httpx
import pytest

from quire.server import page
from quire.server.protocol.chat import ChatRequest
from tests.server.serving import RunningServer

FOLDER = resources.files("quire.server") / "playground"
VENDOR = FOLDER / "vendor"
HTML = (FOLDER / "index.html").read_text()
CSS = (FOLDER / "style.css").read_text()
SCRIPTS = {file.name: file.read_text() for file in FOLDER.iterdir() if file.name.endswith(".js")}
OWN = "\n".join([HTML, CSS, *SCRIPTS.values()])


class Tags(HTMLParser):
    """All start tags of the page, with the elements around them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(HTML)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))


TAGS = Tags().found
IDS = [attributes["id"] for _, attributes in TAGS if "id" in attributes]
LOADED = {
    attributes.get("src") or attributes["href"] for tag, attributes in TAGS if tag in ("script", "link")
}  # by the page itself


def test_nothing_is_loaded_from_elsewhere():
    addresses = set(re.findall(r"\b(?:https?|wss?|ftp):", unquote(OWN)))
    assert addresses == {"http:"}
    assert unquote(OWN).count("http:") == 1, "only the namespace of the icon"
    assert "http://www.w3.org/2000/svg" in unquote(OWN)
    assert {name for name in LOADED if not name.startswith("data:")} <= {path.lstrip("/") for path in page.FILES}
    for tag, attributes in TAGS:
        assert "src" not in attributes or tag == "script", tag
        assert attributes.get("href", "#").startswith(("#", "data:")) or tag == "link", tag
    assert not re.search(r"@import|url\(|\bimport\(|XMLHttpRequest|WebSocket|sendBeacon|EventSource", OWN)
    assert set(re.findall(r"(?:fetch|call|look)\((?:HERE \+ )?\"([^\"]*)\"", OWN)) == {
        "/readyz", "/metrics", "/v1/models", "/v1/chat/completions",
    }  # fmt: skip
    imported = set(re.findall(r"from \"\./([^\"]*)\"", OWN))
    assert {f"/playground/{name}" for name in imported} <= set(page.FILES)
    assert {f"playground/{name}" for name in {*SCRIPTS} - imported} <= LOADED, "a script that nothing loads"


def test_no_string_becomes_markup_or_code_but_by_the_sanitizer():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", OWN)
    assert not re.search(r"\son[a-z]+=", HTML), "handlers in attributes"
    assert "style=" not in HTML
    assert not re.search(r"<script[^>]*>[^<]", HTML), "scripts in the page"


def test_the_key_is_stored_for_the_session_only():
    assert re.findall(r"(\w+)\.setItem\(\"quire\.key\"", OWN) == ["session"]
    assert "document.cookie" not in OWN
    assert not re.search(r"\bkey\b", SCRIPTS["store.js"].replace("keyPath", "")), "the database holds chats alone"


def test_ids_are_unique_and_references_exist():
    assert len(IDS) == len(set(IDS))
    for tag, attributes in TAGS:
        for name in ("for", "form", "aria-labelledby", "aria-describedby", "aria-controls"):
            assert set(attributes.get(name, "").split()) <= set(IDS), (tag, name)
    assert set(re.findall(r"\$\(\"([^\"]*)\"\)", OWN)) <= set(IDS), "the script looks for elements that are not there"
    for pattern in re.findall(r"\$\(`([a-z]*-)\$\{id\}`\)", OWN):
        assert {f"{pattern}settings", f"{pattern}sidebar"} <= set(IDS)


def test_every_control_has_a_label():
    labelled = {attributes["for"] for tag, attributes in TAGS if tag == "label"}
    for tag, attributes in TAGS:
        if tag in ("input", "textarea", "select", "progress") or attributes.get("role") in ("region", "meter", "log"):
            assert attributes.get("id") in labelled or "aria-label" in attributes, (tag, attributes)


def test_settings_are_request_fields():
    form = HTML[HTML.index('<form id="fields"') : HTML.index("</form>", HTML.index('<form id="fields"'))]
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
        name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
    }
    pairs = [
        *((text, ground, 4.5) for text in ("text", "soft", "warn", "accent") for ground in ("page", "card")),
        *((text, "tint", 4.5) for text in ("text", "soft")),
        *((f"code-{number}", "card", 4.5) for number in (1, 2, 3, 4)),
        ("on-accent", "accent", 4.5),
        ("page", "text", 4.5),
        ("page", "warn", 4.5),
        ("edge", "page", 3.0),
        ("edge", "card", 3.0),
    ]
    for (front, back, least), theme in itertools.product(pairs, (0, 1)):
        high, low = sorted((luminance(colours[front][theme]), luminance(colours[back][theme])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= least, (front, back, ("light", "dark")[theme])


def test_policy(server):
    policy = server.http.get("/").headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "font-src": "'self'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }


@pytest.mark.parametrize("path", ["/", *page.FILES])
def test_files_are_served_and_checked_by_the_browsers_copy(server, path):
    url = server.url + path
    response = httpx.get(url)
    assert response.status_code == 200
    suffix = path.rpartition(".")[2]
    kinds = {"/": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "woff2": "font/woff2"}
    assert response.headers["content-type"] == kinds.get(suffix, "text/javascript; charset=utf-8")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    etag = response.headers["etag"]
    for known in (etag, f'"other", W/{etag}'):
        again = httpx.get(url, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert httpx.get(url, headers={"if-none-match": '"other"'}).content == response.content
    assert httpx.head(url).headers["etag"] == etag


def test_only_the_files_of_the_page_are_served(server):
    for path in ("/playground", "/playground/", "/playground/index.html", "/playground/vendor/README.md",
                 "/playground/../app.py", "/playground/vendor/%2e%2e/app.js", "/playground/app.js/"):  # fmt: skip
        assert server.http.get(path).status_code == 404, path


def test_the_files_are_public_and_counted_as_no_requests_of_people():
    with RunningServer(api_keys=("key",)) as server:
        for path in page.FILES:
            assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(server.url + "/playground/none.js").status_code == 401
        assert "/playground/" not in server.http.get("/metrics").text


@pytest.mark.parametrize(("root_path", "address"), [("", "/"), ("/llm", "/"), ("/llm", "/llm"), ("/llm", "/llm/")])
def test_the_page_finds_its_files_under_a_prefix(root_path, address):
    with RunningServer(root_path=root_path) as server:
        html = server.http.get(address).text
        names = re.findall(r'(?:src|href)="([^"#:]+)"', html)
        assert len(names) == 4
        for name in names:
            assert server.http.get(urljoin(server.url + address, name)).status_code == 200, name


def test_libraries_are_those_that_were_published():
    rows = re.findall(r"^\| `(\S+)` \| \S+ [\d.]+ \| `\S+` \| [^|]*\(`(LICENSE-\w+)`\) \| `(\w{64})` \|$",
                      (VENDOR / "README.md").read_text(), re.MULTILINE)  # fmt: skip
    served = {path.rpartition("/")[2] for path in page.FILES if "/vendor/" in path}
    assert {name for name, _, _ in rows} == served
    for name, licence, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
        assert len((VENDOR / licence).read_text()) > 1000, licence
    assert sum(len((VENDOR / name).read_bytes()) for name in served) < 500_000
