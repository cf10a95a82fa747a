"""Files that are kept between starts. They are used only if nobody else could have written them. No torch."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from quire import envs
from quire.errors import ConfigError


def cache_folder(name: str, what: str) -> Path:
    """A folder in QUIRE_CACHE_DIR, or else in `quire` in the user's cache. Raises ConfigError if both are missing.

    Args:
        what: the content of the folder, for the error.
    """
    given, caches = envs.CACHE_DIR.get(), envs.XDG_CACHE_HOME.get()
    try:
        root = Path(given).expanduser() if given else Path(caches or Path.home() / ".cache") / "quire"
    except RuntimeError as error:
        raise ConfigError(
            f"There is no home folder to keep {what} in", fix=f"Set {envs.CACHE_DIR.name} to a folder"
        ) from error
    return root / name


def check_private(path: Path) -> None:
    """Raise PermissionError for a folder that others may write to."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"other users may write to {path}; it has to belong to this user, with mode 0700")


def open_private(path: Path) -> BinaryIO:
    """Open a regular file of this user for reading. Raises OSError, or ValueError if others may have written it."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        file.close()
        raise ValueError("other users may have written it")
    return file


def file_identity(path: Path) -> list[Any]:
    """A value that changes with the file."""
    status = path.stat()
    return [path.name, status.st_ino, status.st_size, status.st_mtime_ns]


def code_identity(*extensions: str) -> str:
    """A value that changes with Quire's code, so that files of another version are not used.

    Args:
        extensions: files of compiled code.
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return digest(repr([file_identity(path) for path in [*files, *map(Path, extensions)]]))


def digest(text: str) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
