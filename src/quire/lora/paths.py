"""The folders from which clients may load adapters. No torch.

Every illegal path gives the same error as a missing one: a client learns nothing about files outside the allowed roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.errors import AdapterNotFoundError
from quire.lora.adapter_config import CONFIG_NAME

TENSORS_NAME = "adapter_model.safetensors"


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """The adapter folder that a client names, without symbolic links. A relative path is looked for in every root.

    Raises AdapterNotFoundError: the path is in no root, leaves its root by `..` or a symbolic link, is malformed, or
    has no files.
    """
    for root in roots:
        try:
            real_root, folder = root.resolve(strict=True), (root / path).resolve(strict=True)
            if ".." in Path(path).parts or not folder.is_relative_to(real_root):
                continue
            files = [folder / name for name in (CONFIG_NAME, TENSORS_NAME)]
            if folder.is_dir() and all(file.resolve().is_relative_to(real_root) for file in files):
                return folder
        except (OSError, ValueError, RuntimeError):  # missing, forbidden, a null byte or a surrogate, a loop of links
            continue
    raise AdapterNotFoundError(
        "There is no adapter at this path",
        value=path,
        expected="a folder below one of the roots of --lora-dir",
        fix="Check the path, or ask the operator of the server to allow its folder",
    )
