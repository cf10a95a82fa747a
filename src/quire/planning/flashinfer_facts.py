"""Whether FlashInfer can do a model's attention here. This module does not import torch, because `quire explain` uses
it too.

Written against FlashInfer 0.6.14: docs.flashinfer.ai/api/attention.html.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
CODE_DTYPES = ("float8_e4m3fn", "float8_e5m2")  # dtypes of a KV cache other than the model's dtype


def flashinfer_version() -> str | None:
    """The version that is installed, or None."""
    if find_spec("flashinfer") is None:
        return None
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "of unknown version"


def why_not_flashinfer(
    head_dims: Collection[int], dtype: str, cache_dtype: str, is_deterministic: bool, others: Collection[str] = ()
) -> str | None:
    """Why FlashInfer does not do such attention on a GPU here, or None.

    Args:
        head_dims: elements of a head, of all layers.
        dtype, cache_dtype: torch's names of dtypes.
        others: further properties of the layers: some of "chunks", "sinks", "latent rows".
    """
    if flashinfer_version() is None:
        return "it is not installed (pip install flashinfer-python)"
    if not _can_build():
        return "it builds its kernels with nvcc, which is not found, and flashinfer-jit-cache is not installed"
    if is_deterministic:
        return "it splits sequences by the batch, and --deterministic is set"
    if others:
        return f"our attention with {' and '.join(sorted(others))} does not run on it"
    if unknown := [head_dim for head_dim in sorted(head_dims) if head_dim not in HEAD_DIMS]:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {', '.join(map(str, unknown))}"
    if dtype not in DTYPES:
        return f"it takes {' and '.join(DTYPES)}, not {dtype}"
    if cache_dtype != dtype and cache_dtype not in CODE_DTYPES:
        return f"it does not read a KV cache of {cache_dtype}"
    return None


def _can_build() -> bool:
    if find_spec("flashinfer_jit_cache") is not None or shutil.which("nvcc") is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return (Path(home) / "bin" / "nvcc").exists()
