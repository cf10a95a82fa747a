"""Headers of GGUF files on the hub, without their weights: for what plans a model before it is downloaded. No torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from quire.gguf.file import MoreNeededError, parse_start
from quire.gguf.names import CONFIG_TENSORS

FIRST_BYTES = 8 << 20  # those of large vocabularies take a second request
_MAX_CONFIG_BYTES = 1 << 20  # of a tensor that belongs to the configuration; a larger one is refused by its shape


def fetch_headers(repo: str, names: Sequence[str], revision: str | None, token: str | None) -> Path:
    """A folder with these files of a hub id: each as long as it is there, with a hole where its weights are.

    It is removed when the process ends.
    Raises WeightsError for a malformed header, and whatever the hub library does.
    """
    from huggingface_hub import HfFileSystem, constants

    hub = HfFileSystem(endpoint=constants.ENDPOINT, token=token, skip_instance_cache=True)
    folder = Path(tempfile.mkdtemp(dir=_parent().name))
    for name in names:
        with (
            hub.open(f"{repo}/{name}", "rb", revision=revision, cache_type="none") as there,
            (folder / Path(name).name).open("wb") as here,
        ):
            _copy_header(there, here, name)
    return folder


@cache
def _parent() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quire-headers-")


def _copy_header(there: Any, here: IO[bytes], name: str) -> None:
    """`there`: a file of the hub library's, which fetches what is read."""
    size = int(there.size)
    start = there.read(min(size, FIRST_BYTES))
    while True:
        try:
            infos = parse_start(start, size, name)
            break
        except MoreNeededError as more:
            piece = there.read(min(max(more.num_bytes, 2 * len(start)), size) - len(start))
            if not piece:
                raise EOFError(f"{name} ends at {len(start)} of {size} bytes") from None
            start += piece
    here.truncate(size)
    here.write(start)
    for info in infos:
        if info.name in CONFIG_TENSORS and info.end > len(start) and info.end - info.begin <= _MAX_CONFIG_BYTES:
            there.seek(info.begin)
            here.seek(info.begin)
            here.write(there.read(info.end - info.begin))
