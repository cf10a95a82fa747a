"""Folders in object stores (`s3://`, `gs://`, `az://`): a mirror on this machine in which weights are only headers.

A mirror has the small files of a folder. A file of weights has its length and its header there, and a hole in the place
of the tensors, which takes no room on the disk. So sizes are planned and headers are checked as for any folder.
`stored_object` says where the tensors are: they are read while the model loads, by a signed URL (signed_reads.py), and
by the client library where that does not work. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, QuireError, WeightsError
from quire.loader.gguf_headers import copy_header
from quire.loader.safetensors_headers import MAX_HEADER_BYTES
from quire.messages import Progress
from quire.private_cache import cache_folder, check_private, digest, open_private
from quire.resolve import shown_bytes

SCHEMES = ("s3://", "gs://", "az://")
MANIFEST = ".objects.json"  # the file that lists the objects of a mirror with holes
LEAST_PIECE_BYTES, PIECE_BYTES = 1 << 20, 8 << 20  # the bytes of one request
CHUNK_BYTES = 64 << 10  # pieces of the client library; the heap holds these, and maps larger ones anew
NUM_READERS = 16  # requests at once
AHEAD = 0.1  # this share of a file is read ahead, at most 128 MiB
FIRST_BYTES = 1 << 20  # the first bytes of a file of weights: most headers are shorter
MAX_MANIFEST_BYTES = 16 << 20
WAITS = (0.2, 1.0)  # seconds before another try. The client library has its own, for 5xx and for cut connections
RETRIES: dict[str, Any] = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}
Bytes = NDArray[np.uint8]
T = TypeVar("T")
_URL = re.compile(r"(?:s3|gs|az)://[A-Za-z0-9][\w.-]*(?:/[^/?#@\\\0]+)*/?", re.ASCII)
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_SECRETS = re.compile(r"(?:AWS|AZURE|GOOGLE)_.*(?:KEY|TOKEN|SECRET|SAS|ACCOUNT)", re.IGNORECASE)
# Settings that a signed URL cannot follow: the library's proxies, headers, certificates, no signature.
_OF_THE_LIBRARY = re.compile(r"(?:AWS|AZURE|GOOGLE)_.*(?:PROXY|HEADERS|CERTIFICATES|SKIP_SIGNATURE)", re.IGNORECASE)
_ENDPOINTS = (
    *("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    *("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"),
)
_ACCESS = "Set the credentials in the environment (docs/object-stores.md); AWS_SKIP_SIGNATURE=true reads public buckets"


def is_stored(name: str | None) -> bool:
    """Whether a name is the URL of an object or a folder in an object store."""
    return name is not None and name.startswith(SCHEMES)


@dataclass(frozen=True)
class StoredObject:
    """One version of an object.

    Attributes:
        folder: its URL, without the last slash.
        size: in bytes.
        etag: the etag of this version, as an HTTP header has it; None: the store gives none.
        modified: the time when it was written, for stores that give no ETag.
    """

    folder: str
    name: str
    size: int
    etag: str | None
    modified: str = ""

    @property
    def url(self) -> str:
        return f"{self.folder}/{self.name}"

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from begin to end. Raises like `fill`."""
        buffer = np.empty(end - begin, dtype=np.uint8)
        self.fill([buffer], begin)
        return bytes(buffer)

    def fill(self, buffers: Sequence[Bytes], begin: int) -> None:
        """Fill buffers, one after the other, with the bytes from `begin` on. None is empty; no buffers: no request.

        Raises WeightsError or ConfigError that names the object, after all retries.
        """
        num_bytes = sum(len(each) for each in buffers)
        for wait in (*WAITS, None):
            try:
                if num_bytes:
                    self._fill(buffers, begin, num_bytes)
                return
            except _UnlikeError as error:
                if wait is None:
                    raise WeightsError(
                        f"{self.url} cannot be read",
                        value=str(error),
                        expected=f"{num_bytes} bytes from {begin}",
                        fix="Start again; if the error stays, something on the way to the store changes its answers",
                    ) from None
                time.sleep(wait)
            except Exception as error:  # the library has errors of its own, ValueErrors and FileNotFoundErrors
                raise _failure(self.url, error) from None
        raise AssertionError("the last try answers or raises")

    def signed_url(self, seconds: float) -> str:
        """An http:// or https:// URL that anybody may read for `seconds`.

        Raises NotImplementedError if the environment asks for something that only the client library does, and the
        library's errors if it cannot sign.
        """
        from urllib.request import getproxies

        import obstore

        if getproxies().keys() - {"no"} or any(map(_OF_THE_LIBRARY.match, os.environ)):
            raise NotImplementedError
        url: str = obstore.sign(_store(self.folder), "GET", self.name, timedelta(seconds=seconds))
        return url

    def _fill(self, buffers: Sequence[Bytes], begin: int, num_bytes: int) -> None:
        import obstore

        options: dict[str, Any] = {"range": (begin, begin + num_bytes)}
        if self.etag is not None:
            options["if_match"] = self.etag
        found = obstore.get(_store(self.folder), self.name, options=options)
        if found.meta["size"] != self.size or self.etag not in (None, _as_header(found.meta["e_tag"])):
            raise _changed(self.url)  # a store that ignores If-Match
        rest, places, free = num_bytes, iter(buffers), np.empty(0, dtype=np.uint8)
        for chunk in found.stream(CHUNK_BYTES):
            data = np.frombuffer(chunk, dtype=np.uint8)
            if len(data) > rest:
                raise _UnlikeError("more bytes than asked for")
            rest -= len(data)
            while len(data):
                free = free if len(free) else next(places)
                count = min(len(free), len(data))
                free[:count] = data[:count]
                free, data = free[count:], data[count:]
        if rest:
            raise _UnlikeError(f"{num_bytes - rest} bytes")


class _UnlikeError(Exception):
    """The store has sent an answer of another length."""


def _changed(url: str) -> WeightsError:
    return WeightsError(
        f"{url} changed while it was being read", fix="Start again when nobody writes to the folder any more"
    )


def _failure(url: str, error: Exception) -> QuireError:
    from obstore import exceptions

    if isinstance(error, QuireError):
        return error
    if isinstance(error, exceptions.PreconditionError):
        return _changed(url)
    if isinstance(error, FileNotFoundError):
        return ConfigError("The object store has no such object or bucket", value=url, param="model")
    refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, refused) or re.search(r"status code: 40[13]", str(error)):  # a refused list has no class
        return ConfigError("The object store gives no access", value=url, fix=_ACCESS, param="model")
    fix = _ACCESS if re.search(r"169\.254|redential|MissingAccount|Account must", str(error)) else None
    return ConfigError(
        f"{url} cannot be read: {_without_secrets(str(error))}",
        fix=fix or "Start again: requests were repeated and failed each time",
        param="model",
    )


def _without_secrets(text: str) -> str:
    """The first line of an error of the client library, without the keys in use, and of URLs without queries
    (signatures), names and passwords.
    """
    text = re.sub(r"\?\S+", "?...", text.partition("\n")[0])
    text = re.sub(r"//[^/\s@]+@", "//...@", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRETS.match(name):
            text = text.replace(value, "...")
    return text


@cache
def _store(folder: str) -> Any:
    """The client for a folder. Raises ConfigError if it is not installed, or if the environment lacks its settings."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError(
            "Models in object stores need another package",
            value=folder,
            fix="Install it: pip install 'quire[stores]'",
            param="model",
        ) from None
    scheme, _, rest = folder.partition("://")
    try:
        return from_url(f"{scheme}://{quote(rest)}", client_options={"allow_http": _is_plain()}, retry_config=RETRIES)
    except Exception as error:
        raise _failure(folder, error) from None


def _is_plain() -> bool:
    """Whether an endpoint in the environment speaks http://."""
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


def list_objects(folder: str) -> list[StoredObject]:
    """The objects of a folder, by name. Raises ConfigError: an illegal URL, no access, or no objects."""
    if not _URL.fullmatch(folder) or any(part in (".", "..") for part in folder.split("/")):
        raise ConfigError(
            "This is no folder of an object store",
            value=re.sub(r"//.*@", "//...@", folder.partition("?")[0]),
            expected="s3://bucket/folder, gs://bucket/folder or az://container/folder, without a query or a password",
            fix="Credentials come from the environment alone (docs/object-stores.md)",
            param="model",
        )
    folder = folder.rstrip("/")
    store = _store(folder)
    try:
        import obstore

        metas = obstore.list_with_delimiter(store)["objects"]
    except Exception as error:
        raise _failure(folder, error) from None
    found = [
        StoredObject(folder, meta["path"], meta["size"], _as_header(meta["e_tag"]), meta["last_modified"].isoformat())
        for meta in metas
    ]
    found = sorted((each for each in found if _is_file_name(each.name)), key=lambda each: each.name)
    if not found:
        raise ConfigError(
            "The object store has no files in this folder",
            value=folder,
            expected="a folder with config.json, *.safetensors and tokenizer.json, or with GGUF files",
            param="model",
        )
    return found


def _as_header(etag: str | None) -> str | None:
    """The ETag in quotes, as in an HTTP header. Azure lists ETags without quotes."""
    return etag if etag is None or etag.startswith(('"', "W/")) else f'"{etag}"'


def _is_file_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\\" not in name and not name.startswith(".") and name.isprintable()


def mirror(
    folder: str,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    download_dir: str | None = None,
    progress: Progress | None = None,
    *,
    with_holes: bool,
) -> Path:
    """The mirror of this version of a folder, made if it is not there.

    Args:
        folder: URL.
        patterns: patterns of file names; those that match `ignored` are left out.
        download_dir: the parent of the mirror; None: the user's cache.
        progress: called with ("download", fraction, text).
        with_holes: files of weights get only their headers; only in the user's cache.

    Raises ConfigError or WeightsError that names the object.
    """
    objects = [
        each
        for each in list_objects(folder)
        if any(fnmatch(each.name, one) for one in patterns) and not any(fnmatch(each.name, one) for one in ignored)
    ]
    folder = folder.rstrip("/")
    seen = [(each.name, each.size, each.etag or each.modified) for each in objects]
    version = digest(repr((folder, with_holes, seen)))
    assert not (with_holes and download_dir)
    parent = mirrors() if download_dir is None else Path(download_dir)
    path = parent / f"{folder.rpartition('/')[2]}-{version[:20]}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if with_holes:
            check_private(parent)
        with _alone(parent / f".{path.name}.lock"):
            if not path.is_dir():
                _make(path, objects, progress, with_holes)
    except OSError as error:
        raise ConfigError(
            f"The files of {folder} cannot be kept: {error.strerror or error}",
            value=str(parent),
            fix="Give a folder that can be written with "
            + ("QUIRE_CACHE_DIR" if download_dir is None else "--download-dir"),
            param="download_dir",
        ) from error
    if progress:
        total = sum(each.size for each in objects)
        progress("download", 1.0, f"{shown_bytes(total)} in {folder}" if with_holes else shown_bytes(total))
    return path


def mirrors() -> Path:
    """The folder of mirrors with holes. Raises ConfigError if no place for it can be found."""
    return cache_folder("object-stores", "the headers of models in object stores")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Runs the block while no other process makes the same mirror."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(path: Path, objects: Sequence[StoredObject], progress: Progress | None, with_holes: bool) -> None:
    """Write all files beside the place of the mirror, then move them there. Files of an earlier try stay."""
    part = path.with_name(f".{path.name}.part")
    part.mkdir(mode=0o700, exist_ok=True)
    holes = {each.name for each in objects if with_holes and each.name.endswith((".safetensors", ".gguf"))}
    total = max(sum(each.size for each in objects if each.name not in holes), 1)
    done = 0
    for each in objects:
        here = part / each.name
        if not here.exists():
            scratch = part / f".{each.name}.writing"
            with scratch.open("wb") as file:
                if each.name in holes:
                    _write_header(each, file)
                else:
                    _write_whole(each, file, lambda count: _report(progress, done + count, total))  # noqa: B023
            scratch.replace(here)
        if each.name not in holes:
            done += each.size
    if holes:
        kept = {each.name: [each.size, each.etag] for each in objects if each.name in holes}
        (part / MANIFEST).write_text(json.dumps({"folder": objects[0].folder, "files": kept}))
        (part / MANIFEST).chmod(0o600)
    part.rename(path)


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress:
        progress("download", min(done / total, 1.0), f"{shown_bytes(done)} of {shown_bytes(total)}")


def _write_header(source: StoredObject, file: IO[bytes]) -> None:
    """The start of the object up to its tensors, and a hole up to its length."""
    if source.name.endswith(".gguf"):
        copy_header(source.read, source.size, file, source.url)
        return
    start = source.read(0, min(source.size, FIRST_BYTES)) if source.size else b""
    end = min(8 + int.from_bytes(start[:8], "little"), source.size)
    if len(start) < end <= 8 + MAX_HEADER_BYTES:  # a longer header is refused when it is checked
        start += source.read(len(start), end)
    file.write(start)
    file.truncate(source.size)


def _write_whole(source: StoredObject, file: IO[bytes], report: Callable[[int], None]) -> None:
    """Copy an object. If its ETag may be its MD5 and is another one, the object is read twice.

    Encrypted objects have an ETag that only looks like an MD5: then both readings are the same.
    """
    found = hashlib.md5(usedforsecurity=False)
    done = 0
    for piece in _pieces(source):
        file.write(piece.data)
        found.update(piece.data)
        report(done := done + len(piece))
    named = _MD5.fullmatch(source.etag or "")
    if named is None or named[1] == found.hexdigest():
        return
    again = hashlib.md5(usedforsecurity=False)
    for piece in _pieces(source):
        again.update(piece.data)
    if again.digest() != found.digest():
        raise WeightsError(
            f"{source.url} was read twice, and the bytes were different",
            value=[found.hexdigest(), again.hexdigest()],
            expected=f"the MD5 of its ETag, {named[1]}",
            fix="Something between this machine and the store damages the data: use https, or another machine",
        )


def piece_bytes(size: int) -> int:
    """The bytes of one request for a part of an object of `size` bytes."""
    return min(PIECE_BYTES, max(LEAST_PIECE_BYTES, int(AHEAD * size) // NUM_READERS))


def _pieces(source: StoredObject) -> Iterator[Bytes]:
    """The bytes of an object in order. A piece is overwritten when the next one is taken. Raises like `fill_ahead`."""
    size, piece = source.size, piece_bytes(source.size)
    buffers = cycle([np.empty(piece, dtype=np.uint8) for _ in range(NUM_READERS + 1)])  # empty: takes no memory yet
    places = ((begin, buffer[: size - begin]) for begin, buffer in zip(range(0, size, piece), buffers, strict=False))
    return fill_ahead(source, ((begin, [data], data) for begin, data in places))


def fill_ahead(source: StoredObject, parts: Iterable[tuple[int, Sequence[Bytes], T]]) -> Iterator[T]:
    """Read parts of an object, and yield the filled ones in order. The next ones are read meanwhile.

    The client library reads the bytes that a signed URL does not give, repeats its requests, and names errors.

    Args:
        parts: (place of the first byte, buffers, what to yield when they are full). Each is taken when its request is
            made: then the tensors before it, but for NUM_READERS, were yielded and are done with.

    Raises like StoredObject.fill.
    """
    from quire.loader.signed_reads import SignedReads  # Python's HTTP client, which the front end starts without

    left = iter(parts)
    signed = SignedReads(source.signed_url, source.size, source.etag)
    pool = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="objects")
    waiting: deque[tuple[T, Future[None]]] = deque()

    def fill(buffers: Sequence[Bytes], begin: int) -> None:
        came = signed.fill(buffers, begin) if source.size > LEAST_PIECE_BYTES else 0  # else it is one request
        source.fill(_behind(buffers, came), begin + came)

    def ask() -> None:
        for begin, buffers, filled in islice(left, 1):
            waiting.append((filled, pool.submit(fill, buffers, begin)))

    try:
        for _ in range(NUM_READERS):
            ask()
        while waiting:
            waiting[0][1].result()
            ask()
            yield waiting.popleft()[0]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        signed.close()


def _behind(buffers: Sequence[Bytes], count: int) -> list[Bytes]:
    """The rest of buffers after their first `count` bytes."""
    left = []
    for each in buffers:
        if count < len(each):
            left.append(each[count:])
        count = max(count - len(each), 0)
    return left


def stored_object(path: Path) -> StoredObject | None:
    """The object that has the tensors of a file of weights; None: the file itself has them.

    Raises WeightsError for a file with a hole outside of the user's own mirrors, because it may name any folder.
    """
    manifest = path.parent / MANIFEST
    if not manifest.is_file():
        return None
    try:
        if path.parent.parent.resolve() != mirrors().resolve():
            raise ValueError("it is not in this user's cache")
        check_private(path.parent.parent)
        with open_private(manifest) as file:
            told = json.loads(file.read(MAX_MANIFEST_BYTES))
        if path.name not in told["files"]:
            return None
        size, etag = told["files"][path.name]
        return StoredObject(told["folder"], path.name, size, etag)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} holds only headers of a model in an object store ({error})",
            fix="Name the model by its URL, such as s3://bucket/folder",
        ) from None
