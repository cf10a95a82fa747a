"""Finds the folder of a model's name: a local path, a hub id, or a folder of an object store.

Models on the hub are downloaded into the hub library's cache, and models in object stores are mirrored.

No torch here: the API process resolves tokenizers through this file.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import logs
from quire.demo import DEMO_MODEL_NAME
from quire.errors import ConfigError, ModelConfigError
from quire.loader.object_store import is_stored, list_objects, mirror
from quire.messages import Progress

logger = logs.get_logger(__name__)

# Only files that we read: never pickles (.bin, .pt) or code (.py). `*/*` leaves out sub-folders (onnx/, original/), and
# `consolidated*` leaves out the second copy of the weights in the publisher's own layout.
TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_PATTERNS = ["*.safetensors"]
IGNORED_PATTERNS = ["*/*", "consolidated*"]

# A folder with one of these has a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)

_EXPECTED = "a folder with config.json, a hub id, which is owner/name, such as Qwen/Qwen3-0.6B, or a URL such as s3://bucket/folder"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


def resolve_model(
    name_or_path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    weights: bool = True,
) -> Path:
    """The folder with config.json, weights and tokenizer of a model.

    Args:
        name_or_path: an existing folder, a hub id such as `Qwen/Qwen3-0.6B`, or a URL such as `s3://bucket/folder`.
        revision: branch, tag or commit of a hub id.
        download_dir: cache folder instead of the hub library's own (HF_HOME); None: weights of an object store are only
            headers here.
        token: access token; without one the hub library's stored login or HF_TOKEN is used.
        progress: called with ("download", fraction, text); None: the hub library draws its own bar on a terminal.
        weights: False leaves the weights out (dummy weights).

    Raises:
        ConfigError: no such folder or hub id, no access, or no network and no complete cache.
        ModelConfigError: the folder has no config.json.
    """
    patterns = TOKENIZER_PATTERNS + (WEIGHT_PATTERNS if weights else [])
    folder = local_folder(name_or_path)
    if folder is None:
        folder = download_files(name_or_path, revision, download_dir, token, progress, patterns, IGNORED_PATTERNS)
    if not (folder / "config.json").is_file():
        raise _no_config(name_or_path, folder)
    return folder


def resolve_tokenizer_files(
    name_or_path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """The folder with a tokenizer's files; nothing else is downloaded. Raises ConfigError like resolve_model."""
    folder = local_folder(name_or_path)
    if folder is None:
        patterns = TOKENIZER_PATTERNS
        folder = download_files(name_or_path, revision, download_dir, token, None, patterns, IGNORED_PATTERNS)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            "No tokenizer files in the model's folder",
            value=name_or_path,
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            fix="Name a folder or hub id that has them with --tokenizer, or use --skip-tokenizer-init",
            param="tokenizer",
        )
    return folder


def list_files(name: str, revision: str | None, token: str | None) -> list[str]:
    """The files of a hub id or URL; [] if the hub cannot be asked: a download then gives the reason."""
    if is_stored(name):
        return [each.name for each in list_objects(name)]
    from huggingface_hub import HfApi

    if local_folder(name) is not None:
        return []
    try:
        # `list_repo_files` would try for half a minute to reach a hub that does not answer.
        siblings = HfApi(token=token).model_info(name, revision=revision, timeout=10).siblings
    except Exception as error:  # errors of the HTTP client too; the library's versions have different ones
        logger.debug("%s cannot be listed: %s", name, error)
        return []
    return [sibling.rfilename for sibling in siblings or ()]


def cached_file(name: str, file: str, revision: str | None, download_dir: str | None) -> Path | None:
    """A file of a hub id in the cache; None: it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, cache_dir=download_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def local_path(name: str, param: str = "model") -> Path:
    """The path that a user's text means. The path need not exist.

    Raises ConfigError for a path that the system cannot look up: an unknown home, a long name, a closed folder.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"The path cannot be checked: {reason}", value=name, param=param) from error
    return path


def local_folder(name: str) -> Path | None:
    """The folder if the name is a local path; None if it can only be a hub id or a URL."""
    if is_stored(name):
        return None
    if not name or "\0" in name:
        raise _not_found(name, "A model name cannot be empty or contain a zero byte")
    path = local_path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError(
            "The model is a file",
            value=name,
            expected="a GGUF file, or the folder that holds config.json and *.safetensors",
            param="model",
        )
    looks_local = name.startswith((".", "~", "/")) or name.endswith("/") or (os.sep != "/" and os.sep in name)
    if looks_local or not _HUB_ID.fullmatch(name):
        raise _not_found(name, "No such folder")
    return None


def _not_found(name: str, what: str) -> ConfigError:
    near = _nearest_folder(name)
    return ConfigError(
        what,
        value=name,
        expected=_EXPECTED,
        fix=f"Did you mean {near}?" if near else None,
        param="model",
    )


def _nearest_folder(name: str) -> str | None:
    """The model folder with the most similar name, beside the missing folder."""
    try:
        path = Path(name.replace("\0", "")).expanduser()
        siblings = [entry.name for entry in path.parent.iterdir() if (entry / "config.json").is_file()]
    except (RuntimeError, OSError):
        return None
    match = difflib.get_close_matches(path.name, siblings, n=1)
    return str(path.parent / match[0]) if match else None


def _near_in_cache(name: str, download_dir: str | None) -> str | None:
    """At most three hub ids in the cache with a similar or longer name."""
    from huggingface_hub import constants

    folders = Path(download_dir or constants.HF_HUB_CACHE).glob("models--*--*")
    ids = sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    wanted = name.rpartition("/")[2].lower()
    names = [one.rpartition("/")[2].lower() for one in ids]
    like = difflib.get_close_matches(wanted, names, n=3)
    near = [one for one, own in zip(ids, names, strict=True) if one != name and (wanted in own or own in like)]
    return " or ".join(near[:3]) or None


def _demo_fix(name: str) -> str | None:
    return "`quire serve` without a model serves the bundled demo model" if name == DEMO_MODEL_NAME else None


def _no_config(name: str, folder: Path) -> ModelConfigError:
    if (folder / "adapter_config.json").is_file():
        fix = "This is a LoRA adapter: serve its base model and add the adapter with --lora-modules"
    elif inside := sorted(entry.name for entry in folder.glob("*") if (entry / "config.json").is_file()):
        fix = f"Did you mean {folder / inside[0]}?"
    elif any(folder.glob("*.gguf")):
        fix = f"The folder holds GGUF files: name one with --gguf-file, or its type, as {name}:Q4_K_M"
    else:
        fix = None
    files = sorted(entry.name for entry in folder.glob("*"))[:10]
    return ModelConfigError(
        f"{name} has no config.json",
        value=files,
        expected="the files of a Hugging Face model: config.json, *.safetensors, tokenizer.json",
        fix=fix,
        param="model",
    )


def download_files(
    name: str,
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    progress: Progress | None,
    patterns: list[str],
    ignored: Sequence[str] = (),
) -> Path:
    """The folder of a hub id with the files that match, in all its subfolders. Errors: see resolve_model.

    For a URL, it is the mirror of the folder. The mirror has holes unless there is a `download_dir`.
    """
    if is_stored(name):
        return mirror(name, patterns, ignored, download_dir, progress, with_holes=download_dir is None)
    from huggingface_hub import errors, snapshot_download

    logs.adopt("huggingface_hub")
    download = _Download(progress) if progress else None
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=list(ignored),
            tqdm_class=download.bar_class() if download else None,
        )
    except (errors.HfHubHTTPError, OSError) as error:
        raise _download_error(error, name, revision, download_dir) from error
    if download is not None:
        download.finish(Path(folder))
    return Path(folder)


def _download_error(error: Exception, name: str, revision: str | None, download_dir: str | None) -> ConfigError:
    """What a user can do about an error of the hub's library."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            "The model is gated: its owner asks for an agreement first",
            value=name,
            fix=f"Accept the terms at https://huggingface.co/{name}, then set HF_TOKEN or run `hf auth login`",
            param="model",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{name} has no such revision", value=revision, expected="a branch, tag or commit", param="revision"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        near = _nearest_folder(name) or _near_in_cache(name, download_dir)
        return ConfigError(
            "No folder and no model on the hub has this name",
            value=name,
            expected=_EXPECTED,
            fix=_demo_fix(name)
            or (f"Did you mean {near}?" if near else "If the model is private, set HF_TOKEN or run `hf auth login`"),
            param="model",
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        near = _near_in_cache(name, download_dir)
        advice = f"Download it where there is a network: `hf download {name}`, and copy the cache or the folder here"
        return ConfigError(
            "The model is not completely in the cache and the hub cannot be reached",
            value=name,
            expected=f"a network connection (HF_HUB_OFFLINE unset), or {_EXPECTED}",
            fix=_demo_fix(name) or (f"{advice}. Or did you mean {near}?" if near else advice),
            param="model",
        )
    details = str(error).partition("\n")[0]
    return ConfigError(
        f"Downloading {name} failed ({type(error).__name__}: {details})",
        fix="Start again: the download continues where it stopped",
        param="model",
    )


class _Download:
    """Reports the bytes of all files of one download."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()  # several threads fetch files
        self._start_time, self._start_bytes = time.monotonic(), 0  # at the first report: a download may continue
        self._most_bytes = 0  # the library drives several bars over the same files; the highest one counts
        self._is_finished = False  # bars report once more when they are garbage-collected

    def bar_class(self) -> type[Any]:
        """A tqdm class for the hub library that draws nothing."""
        from tqdm.std import tqdm

        report = self._report

        class ReportingBar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options | {"file": io.StringIO()})  # it ends with a line feed

            def display(self, msg: str | None = None, pos: int | None = None) -> bool:
                if self.unit == "B" and self.total:
                    report(int(self.n), int(self.total))
                return True

        return ReportingBar

    def _report(self, num_bytes: int, total: int) -> None:
        with self._lock:
            if num_bytes < self._most_bytes or self._is_finished:
                return
            if not self._most_bytes:
                self._start_time, self._start_bytes = time.monotonic(), num_bytes
            self._most_bytes = num_bytes
            self._progress("download", min(num_bytes / total, 1.0), f"{_shown(num_bytes, total)}{self._speed()}")

    def _speed(self) -> str:
        seconds, num_bytes = time.monotonic() - self._start_time, self._most_bytes - self._start_bytes
        return f", {num_bytes / seconds / 1e6:,.1f} MB/s" if num_bytes and seconds > 0 else ""

    def finish(self, folder: Path) -> None:
        """Report the end: the size of all files, and the speed or the cache that they came from."""
        with self._lock:
            self._is_finished = True
        total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        cache = str(folder.parents[2]).replace(str(Path.home()), "~", 1)
        size = _shown(total, total)
        self._progress("download", 1.0, f"{size}{self._speed()}" if self._most_bytes else f"cached: {cache}, {size}")


def _shown(num_bytes: int, total: int) -> str:
    """`412 of 988 MB`, or the total at the end. Units are powers of 1000, as on the hub."""
    scale, unit = (1e9, "GB") if total >= 1e10 else (1e6, "MB") if total >= 1e6 else (1e3, "kB")
    digits = 0 if total / scale >= 100 else 1
    done = f"{num_bytes / scale:,.{digits}f} of " if num_bytes < total else ""
    return f"{done}{total / scale:,.{digits}f} {unit}"
