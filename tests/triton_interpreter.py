"""Triton's interpreter: whether kernels can run here, and the reason for skips if not; and a quicker interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from dataclasses import replace
from functools import cache
from typing import Any


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def why_not() -> str | None:
    """The reason why kernels cannot run; None where they can. They are interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it has wheels for Linux only"
    if os.environ.get("TRITON_INTERPRET") == "1" and _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 fails with numpy 2.4 and later"
    return None


def quicken() -> None:
    """Leave out the interpreter's repeated and unused work."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    # It replaces the functions of triton.language by interpreted ones: for a kernel, and again for each function that
    # the kernel calls, where the kernel's replacements are already in place.
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_in_place = not any(tl.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_in_place else patch(fn)

    interpreter._patch_lang = patch_once

    # It computes whether integers overflow, and then asserts nothing, because it does not debug.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # A row of a product must not depend on where it stands among others, as on a GPU. It does where BLAS adds up some
    # rows in another order, as on CPUs without AVX-512; sums in float64 are rounded to the same float32.
    dot = type(builder).create_dot

    def dot_in_float64(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f" or b.data.dtype.kind != "f":  # codes
            return dot(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    type(builder).create_dot = dot_in_float64

    # It lists all types for every look at one, and writes the shape of every value anew.
    np_dtype = cache(interpreter._get_np_dtype)
    addresses = np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda type: addresses if type.scalar.is_ptr() else np_dtype(type.scalar)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(sizes)), tl.core.tuple([tl.constexpr(size) for size in sizes])

    @cache
    def block_of(sizes: tuple[int, ...], name: str) -> dict[str, Any]:
        block = object.__new__(tl.block_type)
        make_block(block, tl.float32, list(sizes))
        return {"shape": block.shape, "numel": block.numel, "name": f"<{block.shape}, {name}>"}

    make_block = tl.block_type.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        self.__dict__ |= block_of(sizes, str(element_ty))
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    tl.block_type.__init__ = init_block
    tl.core.tensor.__init__ = init_tensor


if os.environ.get("TRITON_INTERPRET") == "1" and why_not() is None:
    quicken()
