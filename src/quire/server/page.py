"""The page to chat with the model: one HTML file, and the style and scripts that it names. No build step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".woff2": "font/woff2",
}
# Everything is loaded from this server, no script stands in the page, and only the sanitizer's policy
# (vendor/purify.es.mjs) may turn a string into markup.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; font-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
# The browser asks each time whether its copy is still the same: a new Quire never runs with old scripts.
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FOLDER = resources.files("quire.server") / "playground"


def _files() -> Iterator[tuple[str, Traversable]]:
    for folder, prefix in ((_FOLDER, "/playground/"), (_FOLDER / "vendor", "/playground/vendor/")):
        for file in folder.iterdir():
            if PurePosixPath(file.name).suffix in MEDIA_TYPES:
                yield prefix + file.name, file


FILES = dict(sorted(_files()))  # the other files of the page, by path


def routes(root_path: str) -> list[Route]:
    """The page at / and its files; all are read once. `root_path` is the prefix under which a proxy shows them."""
    html = (_FOLDER / "index.html").read_bytes()
    if root_path:  # at /prefix without a slash behind it, the page's own "playground/" would be beside the prefix
        html = html.replace(b'"playground/', f'"{root_path}/playground/'.encode())
    return [
        Route("/", _answer(html, "text/html; charset=utf-8", {"content-security-policy": POLICY}), methods=["GET"]),
        *(
            Route(
                path,
                _answer(file.read_bytes(), MEDIA_TYPES[PurePosixPath(path).suffix], {}),
                methods=["GET"],
                include_in_schema=False,
            )
            for path, file in FILES.items()
        ),
    ]


def _answer(content: bytes, media_type: str, headers: dict[str, str]) -> Callable[[Request], object]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, **headers, "etag": etag}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):  # a proxy may have made it W/"..."
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return answer
