"""Every parameter of a Triton function is read: an unread constant would only make more variants to compile. Kernels
are launched with arguments by name: two strides in the wrong order would be read as each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

import quire.kernels
from quire.kernels.triton.launch import row_strides, strides

FOLDER = Path(quire.kernels.__file__).parent / "triton"


def unread(source: str) -> Iterator[str]:
    """`function.parameter` of each parameter that the body of a jitted function does not read."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(each) for each in function.decorator_list
        ):
            read = {
                node.id
                for statement in function.body
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            }
            yield from (f"{function.name}.{each.arg}" for each in function.args.args if each.arg not in read)


def test_an_unread_parameter_is_found() -> None:
    assert list(unread("@triton.jit\ndef f(x, N):\n    N = 1\n    return x\n")) == ["f.N"]


def test_kernels_read_all_their_parameters() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 10
    assert [f"{file.name}: {name}" for file in files for name in unread(file.read_text())] == []


def by_position(source: str) -> list[str]:
    """The launches that give arguments by position."""
    return [
        ast.unparse(call.func)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and call.args
    ]


def test_a_launch_by_position_is_found() -> None:
    launches = "norm_kernel[(T,)](x_ptr=x)\njoin[grid](x, **strides('t', x=x))\ndraw_kernel[(R,)](*kept, R=R)"
    assert by_position(launches) == ["join[grid]", "draw_kernel[R,]"]


def test_kernels_are_launched_by_name() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len([file for file in files if "_kernel[" in file.read_text()]) > 9
    assert [f"{file.name}: {launch}" for file in files for launch in by_position(file.read_text())] == []


def test_strides_have_the_names_of_their_tensor_and_dimension() -> None:
    q_THE, out_PMN = torch.empty(3, 5, 7), torch.empty(2, 3, 11)
    of_heads = strides("th", q=q_THE, k=q_THE.transpose(0, 1))
    assert of_heads == {"q_stride_t": 35, "q_stride_h": 7, "k_stride_t": 7, "k_stride_h": 35}
    of_rows = row_strides(out=out_PMN, x=q_THE[0], residual=None)
    assert of_rows == {"out_stride": 11, "x_stride": 7, "residual_stride": 0}
    assert strides("b", scales=None) == {"scales_stride_b": 0}
