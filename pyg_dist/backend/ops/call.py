"""How a wrapper calls its op: rows as two-dimensional, factors in the sum dtype, errors in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.ops import library as library
from pyg_dist.errors import DataError, UnsupportedError

native = torch.ops.pyg_dist

_meta = torch.library.Library("pyg_dist", "IMPL", "Meta")  # type: ignore[no-untyped-call]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of rows that the kernels know."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])
Out = TypeVar("Out")


def meta_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """The shapes and dtypes of an op's outputs, for FakeTensor and the device ``meta``: registers it for these ops.

    ``torch.library.register_fake`` would look through the files of all loaded modules to know who calls it, as long at
    the import as all other modules of the package take.
    """

    def register(kernel: Kernel) -> Kernel:
        for name in names:
            _meta.impl(name, kernel)  # type: ignore[no-untyped-call]
        return kernel

    return register


def like_first(x: Tensor, *others: object) -> Tensor:
    """The meta kernel of an op whose output is like its first argument."""
    return torch.empty_like(x)


def nothing(*args: object) -> None:
    """The meta kernel of an op that only writes into an argument."""


def call(op: Any, *args: object) -> Out:  # type: ignore[type-var]  # of what the schema says
    """Call a native op; its errors are one line that starts with the op's name (``csrc/ops/check.h``)."""
    try:
        made: Out = op(*args)
        return made
    except NotImplementedError:  # the dispatcher found no kernel; its own text lists all backends of torch
        for arg in args:
            if isinstance(arg, Tensor) and (arg.device.type != "cpu" or arg.layout is not torch.strided):
                name, is_dense = _name(op), arg.layout is torch.strided
                _require_kernels(name, args)
                why = f"no library for {arg.device.type} is loaded (python -m pyg_dist doctor); " if is_dense else ""
                raise UnsupportedError(
                    f"{name}: expected dense tensors on cpu, got one on {arg.device} ({arg.layout}); {why}"
                    "move it with .cpu() or .to_dense()"
                ) from None
        raise
    except RuntimeError as error:
        _require_kernels(_name(op), args)
        message = str(error)
        if ": expected" not in message:
            out_of_memory.explain(error)
            raise
        kind = UnsupportedError if ": expected tensors on " in message else DataError  # csrc/ops/device.cpp
        raise kind(message.splitlines()[0]) from None


def _name(op: Callable[..., object]) -> str:
    return op.__name__.removesuffix(".default")


def _require_kernels(name: str, args: tuple[object, ...]) -> None:
    """Raise why no kernel can take tensors of GPUs, where that is known: what went wrong else follows from it."""
    why = library.no_cuda()
    if why is not None and any(isinstance(arg, Tensor) and arg.is_cuda for arg in args):
        raise UnsupportedError(
            f"{name}: expected kernels for tensors on cuda, got none that run: {why}; "
            "or move tensors and data with .cpu()"
        ) from None


def as_rows(x: Tensor) -> Tensor:
    """View x as ``[N, F]`` with contiguous rows, or copy it there."""
    if x.ndim != 2:
        if x.ndim == 0:
            raise DataError("expected a tensor with rows, got one without dimensions")
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return x if x.layout is not torch.strided or x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def written_rows(out: Tensor) -> Tensor:
    """View ``out`` as ``[N, F]``; never a copy, since the op writes into it."""
    if out.ndim == 2:
        return out
    try:
        return out.view(out.shape[0], math.prod(out.shape[1:]))
    except (IndexError, RuntimeError):
        raise DataError(
            f"expected 'out' to have contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
        ) from None


def like_rows(y: Tensor, x: Tensor) -> Tensor:
    """Rows of an op's output in the shape that the rows of x have."""
    return y if x.ndim == 2 else y.view(y.shape[0], *x.shape[1:])


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums of ``x`` are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def factor_of(factor: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or scale in the sum dtype: those of 16 bits are widened."""
    if factor is None:
        return None
    return (factor.float() if x.dtype == factor.dtype and x.dtype.itemsize == 2 else factor).contiguous()


def signed(seed: int) -> int:
    """The seed modulo 2^64 as the signed integer that a schema can carry."""
    return (seed + 2**63) % 2**64 - 2**63
