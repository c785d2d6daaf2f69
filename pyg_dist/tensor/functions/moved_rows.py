"""``MovedRows``: a row tensor whose rows are in another dimension than the first: a batch ``[B, N, F]``, ``x.T`` ...

Functions run on the tensor with rows first, and no row leaves its rank. Reducing the other dimensions, picking from
them, or moving the rows back gives a row tensor again. Functions :mod:`~.along` a dimension and of :mod:`~.shapes` have
one handler for rows in any dimension; :mod:`~.products` have a general form for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.calling_code import EdgeHandle
from pyg_dist.tensor.functions.pointwise import pointwise, pointwise_
from pyg_dist.tensor.registry import (
    TABLE,
    Args,
    Function,
    H,
    Kwargs,
    Table,
    as_torch_names,
    dims_of,
    functions,
    implements,
    public_name,
)
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, global_shape, local_tensors

T = TypeVar("T", bound=Tensor)


class MovedRows(DerivedOperand):
    """A tensor with its rows in dimension ``place``, which is not 0.

    Attributes:
        of: the same with rows first, the other dimensions in their order.
        place: where rows are.
    """

    of: RowTensor
    place: int

    @staticmethod
    def make(of: T, place: int) -> T:
        """``of.movedim(0, place)``: a row tensor again for place 0."""
        if place == 0:
            return of
        whole = global_shape(cast(RowTensor, of))
        shape = [*whole[1 : place + 1], whole[0], *whole[place + 1 :]]
        # On the meta device: functions that torch does not dispatch to __torch_function__ find no values to read.
        moved: Any = torch.empty(shape, dtype=of.dtype, device="meta").as_subclass(MovedRows)
        moved.of, moved.place = of, place
        return cast(T, moved)

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank; differentiable (collective)."""
        return self.of.full_tensor().movedim(0, self.place)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, rows in dimension {self.place})"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if any(issubclass(type_, EdgeHandle) for type_ in types):
            return NotImplemented
        kwargs = dict(as_torch_names(kwargs or {}))
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if func in _SHAPES:
            with local_tensors():
                return func(*args, **kwargs)
        handler = MOVED.get(func)
        if handler is None:
            of_rows = TABLE.get(func)
            handler = on_moved if of_rows is pointwise else _on_moved_ if of_rows is pointwise_ else None
        if handler is None or any(issubclass(t, DerivedOperand) and t is not MovedRows for t in types):
            raise refuse_moved(func, moved_in((args, *kwargs.values()))[0])
        return handler(func, *args, **kwargs)


MOVED = Table()
"""Of tensors with rows in another dimension than the first."""


def implements_anywhere(*names: str) -> Callable[[H], H]:
    """Decorator: the handler answers for rows in any dimension."""
    return lambda handler: implements(*names)(MOVED.implements(*names)(handler))


def refuse_moved(function: Function, x: MovedRows) -> MixedRowsError:
    """The error for a function that would mix rows, or is not known for rows in this dimension."""
    return MixedRowsError(
        f"{public_name(function)} has no distributed form for rows in dimension {x.place} (of shape {list(x.shape)}): "
        f"move them first, x.movedim({x.place}, 0), stack along dim=1, or take x.full_tensor(), all rows"
    )


def moved_in(values: object) -> list[MovedRows]:
    """The moved rows among the arguments of a call, and in lists of these."""
    if isinstance(values, (tuple, list)):
        return [x for value in values for x in moved_in(value)]
    return [values] if type(values) is MovedRows else []


def rows_and_place(x: Tensor) -> tuple[RowTensor, int]:
    """The tensor with its rows first, and the dimension in which they are seen."""
    return (x.of, x.place) if isinstance(x, MovedRows) else (cast(RowTensor, x), 0)


def dim_of_rows_first(dim: int, place: int) -> int:
    """A dimension of what is seen, as one of the tensor with rows first."""
    return 0 if dim == place else dim + 1 if dim < place else dim


def rows_first(operand: object, like: MovedRows, function: Function) -> Any:
    """An operand that aligns at the right with ``like``, in the form for ``like.of``."""
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    if type(operand) is MovedRows:
        if (operand.place, operand.dim()) != (like.place, like.dim()):
            raise refuse_moved(function, operand)
        return operand.of
    if isinstance(operand, RowTensor):
        if operand.dim() != like.dim() - like.place:
            raise refuse_moved(function, like)
        return operand.view(operand.shape[0], *[1] * like.place, *operand.shape[1:])
    if operand.dim() > like.dim():
        raise refuse_moved(function, like)
    return operand.view(*[1] * (like.dim() - operand.dim()), *operand.shape).movedim(like.place, 0)


def as_seen(out: Any, seen: Callable[[Tensor], object]) -> object:
    """``seen`` of a result's rows, or of each result of several, such as values and indices."""
    if isinstance(out, Tensor):
        return seen(out)
    turned = [seen(item) for item in out]
    return tuple(turned) if type(out) in (tuple, list) else type(out)(turned)


@MOVED.implements("relu", "to", "type_as", "contiguous", "clone", "detach")
@MOVED.implements("dropout", namespaces=(F,))
def on_moved(function: Function, *args: object, **kwargs: object) -> Any:
    """Element by element. Operands align at the right, as they are seen: each is brought to where rows are first.

    Of all pairs of rows, ``x[:, None] - x[None]``: rows of the operand that has them first (gathers the other).
    """
    given = (*args, *kwargs.values())
    first = moved_in(given)[0]
    if first.shape[0] == 1 and any(isinstance(a, RowTensor) and a.dim() == first.dim() for a in given):
        whole = [a.full_tensor() if type(a) is MovedRows else a for a in given]
        return function(*whole[: len(args)], **dict(zip(kwargs, whole[len(args) :], strict=True)))
    return _element_by_element(function, first, args, kwargs)


def _element_by_element(function: Function, first: MovedRows, args: Args, kwargs: Kwargs) -> Any:
    """The function of operands that all have their rows in the dimension where ``first`` has them."""
    args = tuple(rows_first(a, first, function) for a in args)
    kwargs = {name: rows_first(value, first, function) for name, value in kwargs.items()}
    out = function(*args, **kwargs)
    return as_seen(out, lambda t: MovedRows.make(t, first.place) if isinstance(t, RowTensor) else t)


@MOVED.implements("where")
def _where(function: Function, *args: object, **kwargs: object) -> object:
    """Element by element, for three operands; ``where(condition)`` alone lists places."""
    if len(args) + len(kwargs) == 1:
        raise refuse_moved(function, moved_in((args, *kwargs.values()))[0])
    return on_moved(function, *args, **kwargs)


def _on_moved_(function: Function, x: object, *args: object, **kwargs: object) -> object:
    if type(x) is not MovedRows:
        raise refuse_moved(function, moved_in((args, *kwargs.values()))[0])
    _element_by_element(function, x, (x, *args), kwargs)
    return x


@MOVED.implements(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "gaussian_nll_loss",
)  # fmt: skip
def _loss(function: Function, *args: object, **kwargs: object) -> object:
    """Losses that are a value per element, and then its sum or mean (collective)."""
    first = moved_in((args, *kwargs.values()))[0]
    if kwargs.get("reduction") == "batchmean":
        raise refuse_moved(function, first)
    return _element_by_element(function, first, args, kwargs)


@MOVED.implements("cross_entropy", "nll_loss")
def _loss_of_classes(function: Function, x: object, target: Tensor, *args: object, **kwargs: object) -> object:
    """Losses by class, which are in dimension 1 before the rows: ``[B, C, N]`` and targets ``[B, N]`` (collective)."""
    if type(x) is not MovedRows or x.place < 2 or target.dim() != x.dim() - 1:
        raise refuse_moved(function, moved_in((x, target))[0])
    of_targets: Any = MovedRows.make(x.of.select(2, 0), x.place - 1)
    out = function(x.of.movedim(2, 1), rows_first(target, of_targets, function), *args, **kwargs)
    return MovedRows.make(out, x.place - 1) if isinstance(out, RowTensor) else out


@MOVED.implements("__getitem__")
def _index(function: Function, x: MovedRows, index: Any) -> object:
    """Positions, slices and a list in the other dimensions, and any selection of rows (collective at first)."""
    is_mask = type(index) is Tensor and index.dtype == torch.bool and index.dim() == 2
    if is_mask and x.place == 1 and index.shape == (1, x.shape[1]):  # of a batch of one, as of PyG's to_dense_batch
        rows = x.of[:, 0]
        return rows if bool(index.all()) else rows[index[0]]
    index = index if isinstance(index, tuple) else (index,)
    if index == (None,):
        return x.unsqueeze(0)
    if any(i is None or isinstance(i, bool) for i in index):
        raise refuse_moved(function, x)
    for k, item in enumerate(index):
        if item is Ellipsis:
            index = (*index[:k], *[slice(None)] * (x.dim() - len(index) + 1), *index[k + 1 :])
            break
    index = (*index, *[slice(None)] * (x.dim() - len(index)))
    of_rows, of_others = index[x.place], [i for d, i in enumerate(index) if d != x.place]
    dropped = [isinstance(i, int) for i in index]
    num_lists = sum(not isinstance(i, (int, slice)) for i in index)
    mixes = any(isinstance(i, RowTensor) or getattr(i, "dtype", None) == torch.bool for i in of_others)
    if len(index) > x.dim() or dropped[x.place] or mixes or num_lists > 1 or (num_lists and any(dropped)):
        raise refuse_moved(function, x)
    if isinstance(of_rows, Tensor) and of_rows.dim() != 1:
        raise refuse_moved(function, x)
    rows = x.of if isinstance(of_rows, slice) and of_rows == slice(None) else x.of[of_rows]
    picked = (slice(None), *of_others)
    return MovedRows.make(rows[picked], x.place - sum(dropped[: x.place]))


@MOVED.implements("__setitem__")
def _assign(function: Function, x: Tensor, index: Any, value: MovedRows) -> None:
    """All rows, to a plain tensor, as ``queue[:, first:last] = z.T`` (collective)."""
    if isinstance(x, (RowTensor, MovedRows)) or type(value) is not MovedRows:
        raise refuse_moved(function, moved_in((x, index, value))[0])
    x[index] = value.full_tensor()


@MOVED.implements("select", "index_select")
def _select(function: Function, x: MovedRows, dim: int, index: Any) -> object:
    places = (*[slice(None)] * dims_of(dim, x.dim())[0], index)
    return x[places]


@MOVED.implements("__iter__")
def _iterate(function: Function, x: MovedRows) -> object:
    return iter(x.unbind())


def on_last(function: Function, x: object, *args: object, **kwargs: object) -> Tensor:
    """Layers of the last dimensions, and products with a plain matrix."""
    other = [*args, *kwargs.values()]
    if type(x) is not MovedRows or any(isinstance(o, (RowTensor, MovedRows)) for o in other):
        raise refuse_moved(function, moved_in((x, *other))[0])
    shape = other[0] if function in (F.layer_norm, F.rms_norm) else ()
    num_used = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    if x.place >= x.dim() - max(num_used, 1):
        raise refuse_moved(function, x)
    out: Tensor = function(x.of, *args, **kwargs)
    return MovedRows.make(out, x.place)


MOVED.update(dict.fromkeys((F.layer_norm, F.rms_norm), on_last))


@MOVED.implements("cat", "concat", "concatenate", "stack")
def _join(function: Function, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate, also along the dimension of the rows, or stack along a new one."""
    first = moved_in([*tensors])[0]
    stacks = function is torch.stack
    (dim,) = dims_of(dim, first.dim() + stacks)
    if any(t.dim() != first.dim() for t in tensors):
        raise refuse_moved(function, first)
    given = [rows_first(t, first, function) for t in tensors]
    if stacks:
        place = first.place + (dim <= first.place)
        return MovedRows.make(torch.stack(given, dim=dim if dim > first.place else dim + 1), place)
    return MovedRows.make(torch.cat(given, dim=dim_of_rows_first(dim, first.place)), first.place)


@MOVED.implements("device.__get__", "is_cuda.__get__", "requires_grad.__get__", "grad_fn.__get__", "is_leaf.__get__")
@MOVED.implements("new_zeros", "new_ones", "new_full", "new_empty")
def _of_rows(function: Function, x: MovedRows, *args: object, **kwargs: object) -> object:
    return function(x.of, *args, **kwargs)


@MOVED.implements("grad.__get__")
def _grad(function: Function, x: MovedRows) -> Tensor | None:
    return None if x.of.grad is None else MovedRows.make(x.of.grad, x.place)


@MOVED.implements("requires_grad_", "retain_grad")
def _set_grad(function: Function, x: MovedRows, *args: object, **kwargs: object) -> object:
    function(x.of, *args, **kwargs)
    return x


_SHAPES = {
    *functions(
        "shape.__get__", "size", "dim", "ndim.__get__", "numel", "__len__", "__hash__", "dtype.__get__",
        "is_floating_point", "layout.__get__", "is_sparse.__get__", "is_nested.__get__", "is_complex",
    )
}  # fmt: skip
