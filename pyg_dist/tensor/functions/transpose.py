"""``Transposed``: the transpose of a row tensor, which exists only as an operand of a product.

``x.T @ y`` sums over rows and gives a plain matrix, ``x @ y.T`` has a row for each row of x. No communication
before the product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.moved_rows import permuted
from pyg_dist.tensor.functions.shapes import dims_of, refuse
from pyg_dist.tensor.registry import Function, functions, implements, public_name
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, local_tensors, on_rows


class Transposed(DerivedOperand):
    """The ``[F, N]`` transpose of a row tensor ``[N, F]``.

    It takes part in products with rows and with plain matrices, and turns back; everything else raises.

    Attributes:
        of: the row tensor.
    """

    of: RowTensor

    @staticmethod
    def make(of: RowTensor) -> Transposed:
        """The transpose of ``of``, which has two dimensions."""
        # On the meta device: functions that torch does not dispatch to __torch_function__ find no values to read.
        result: Any = torch.empty(*reversed(of.shape), dtype=of.dtype, device="meta").as_subclass(Transposed)
        result.of = of
        return cast(Transposed, result)

    def full_tensor(self) -> Tensor:
        """The whole matrix on every rank; differentiable (collective)."""
        return self.of.full_tensor().t()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Transposed({list(self.shape)})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        first = args[0] if args else None
        if func in _SHAPES:
            with local_tensors():
                return func(*args, **kwargs)
        if func in _OF_ROWS and isinstance(first, Transposed):
            return func(first.of, *args[1:], **kwargs)
        if func in _TURNS and isinstance(first, Transposed):
            return first.of if set(dims_of((*args[1:], *kwargs.values()), 2)) == {0, 1} else first
        if func in _RESHAPES and isinstance(first, Transposed):
            with local_tensors():
                keeps_shape = func(*args, **kwargs).shape == first.shape
            if keeps_shape:
                return first
        if func in _PRODUCTS:
            x, other = (*args, *kwargs.values())
            return _product(other, x) if func is Tensor.__rmatmul__ else _product(x, other)
        raise MixedRowsError(
            f"{public_name(func)} of transposed rows would mix rows, which take part in x.T @ y and x @ y.T only: call "
            f"it before .T, or on .full_tensor() (all rows, collective)"
        )


def _product(x: Any, other: Any) -> Tensor:
    """A product of two factors, one of which at least is transposed (collective)."""
    if isinstance(x, Transposed):
        if isinstance(other, Transposed) or other.dim() > 2:
            raise MixedRowsError(
                f"A product of transposed rows with a {type(other).__name__} of shape {list(other.shape)} would mix "
                f"rows: expected x.T @ y or x @ y.T; use .full_tensor()"
            )
        return torch.einsum("nf,ng->fg" if other.dim() == 2 else "nf,n->f", x.of, other)
    if isinstance(x, RowTensor):
        return torch.matmul(x, other.of.full_tensor().t())
    if x.dim() > 2:
        raise MixedRowsError(
            f"A product of shape {list(x.shape)} with transposed rows would mix rows: expected x.T @ y or x @ y.T"
        )
    product: Any = torch.matmul(other.of, x.t())  # of a vector, t() is the vector
    return Transposed.make(product) if x.dim() == 2 else product


_SHAPES = {
    *functions("shape.__get__", "size", "dim", "ndim.__get__", "numel", "__len__", "__hash__", "dtype.__get__"),
    *functions("is_floating_point", "layout.__get__", "is_sparse.__get__"),
}
_OF_ROWS = {*functions("device.__get__", "requires_grad.__get__", "grad_fn.__get__", "is_leaf.__get__")}
_TURNS = {*functions("t", "T.__get__", "mT.__get__", "transpose", "swapaxes", "swapdims")}
_RESHAPES = {*functions("reshape", "view", "contiguous")}
_PRODUCTS = {*functions("matmul", "mm", "mv", "__matmul__", "__rmatmul__")}


@implements("t", "T.__get__", "H.__get__", "mH.__get__")
def turn(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The transpose of a matrix."""
    x: RowTensor = args[0]
    if x.dim() > 2:
        raise refuse(function, f"of {x.dim()} dimensions would move rows")
    return Transposed.make(x) if x.dim() == 2 else x


@implements("mT.__get__")
def matrix_transpose(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Swap the last two dimensions."""
    return args[0].transpose(-2, -1)


@implements("transpose", "swapaxes", "swapdims")
def transpose(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Swap two dimensions, those of a matrix or others."""
    x, *dims = (*args, *kwargs.values())
    first, second = dims_of(dims, x.dim())
    if 0 in (first, second) and first != second:
        order = [second if d == first else first if d == second else d for d in range(x.dim())]
        return Transposed.make(x) if x.dim() == 2 else permuted(x, order)
    return on_rows(function, x, first, second)
