"""Headers of GGUF files that are elsewhere, without their weights, to plan a model before its download. No torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO

from quire.gguf.file import MAX_HEADER_BYTES, MoreNeededError, parse_start
from quire.gguf.names import CONFIG_TENSORS

FIRST_BYTES = 8 << 20  # headers with large vocabularies take a second request
_MAX_CONFIG_BYTES = 1 << 20  # the most bytes of a tensor of the configuration; the shape of a larger tensor is refused


def fetch_headers(repo: str, names: Sequence[str], revision: str | None, token: str | None) -> Path:
    """A folder with these files of a hub id. Each has its full length, with a hole in the place of its weights.

    The folder is removed when the process ends.
    Raises WeightsError for a malformed header, OSError if the hub sends too little, and the errors of the hub library.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    # Without compression, the bytes are the bytes of the file.
    http_headers = build_hf_headers(token=token) | {"accept-encoding": "identity"}
    folder = Path(tempfile.mkdtemp(dir=_parent().name))
    for name in names:
        url = hf_hub_url(repo, name, revision=revision)
        size = get_hf_file_metadata(url, token=token).size
        if size is None:
            raise OSError(f"the hub does not say how long {name} is")
        with (folder / Path(name).name).open("wb") as here:
            copy_header(partial(_read, url, http_headers), size, here, name)
    return folder


@cache
def _parent() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quire-headers-")


def _read(url: str, http_headers: dict[str, str], begin: int, end: int) -> bytes:
    """The bytes of a file from begin to end, or fewer if the file is shorter.

    A server without ranges sends the file from its start: bytes before `begin` are dropped, and the connection is
    closed at `end`. At most a header's size may be dropped; OSError if it would be more.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    if begin == end:
        return b""
    http_headers = http_headers | {"range": f"bytes={begin}-{end - 1}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with http_stream_backoff("GET", url, headers=http_headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        is_part = response.status_code == 206
        if not is_part and begin > MAX_HEADER_BYTES:
            raise OSError("the hub sends no parts of files")
        found, passed_over = bytearray(), begin if is_part else 0
        for piece in response.iter_bytes():
            found += piece[begin - passed_over :]
            passed_over = min(passed_over + len(piece), begin)
            if len(found) >= end - begin:
                break
    return bytes(found[: end - begin])


def copy_header(read: Callable[[int, int], bytes], size: int, here: IO[bytes], name: str) -> None:
    """Write the header to `here`, which gets the length `size`.

    Args:
        read: gives the bytes of the file, which is elsewhere, from one place to another.
    """
    start = read(0, min(size, FIRST_BYTES))
    while True:
        try:
            infos = parse_start(start, size, name)
            break
        except MoreNeededError as more:
            piece = read(len(start), min(max(more.num_bytes, 2 * len(start)), size))
            if not piece:
                raise EOFError(f"{name} ends at {len(start)} of {size} bytes") from None
            start += piece
    here.truncate(size)
    here.write(start)
    for info in infos:
        if info.name in CONFIG_TENSORS and info.end > len(start) and info.end - info.begin <= _MAX_CONFIG_BYTES:
            here.seek(info.begin)
            here.write(read(info.begin, info.end))
