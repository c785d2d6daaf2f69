"""``MovedRows``: a row tensor whose rows are in another dimension than the first: a batch ``[B, N, F]``, ``x.T`` ...

What it does is done on the tensor with rows first, and no row leaves its rank. Reducing the other dimensions, picking
from them, or moving the rows back gives a row tensor again. Products and other shapes are in
:mod:`~pyg_dist.tensor.functions.moved_shapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.pointwise import pointwise, pointwise_
from pyg_dist.tensor.functions.shapes import dims_of, global_shape
from pyg_dist.tensor.registry import TABLE, Args, Function, Kwargs, bind, functions, implements, public_name
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, local_tensors, on_rows

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
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if func in _SHAPES:
            with local_tensors():
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            of_rows = TABLE.get(func)
            handler = _pointwise if of_rows is pointwise else _pointwise_ if of_rows is pointwise_ else None
        if handler is None or any(issubclass(t, DerivedOperand) and t is not MovedRows for t in types):
            raise refuse_moved(func, next(iter(moved_in((args, tuple(kwargs.values()))))))
        return handler(func, args, kwargs)


def refuse_moved(function: Function, x: MovedRows) -> MixedRowsError:
    """The error for a function that would mix rows, or is not known for rows in this dimension."""
    return MixedRowsError(
        f"{public_name(function)} has no distributed form for rows in dimension {x.place} (of shape {list(x.shape)}): "
        f"move them first, x.movedim({x.place}, 0), stack along dim=1, or take x.full_tensor(), all rows"
    )


def moved_in(values: object) -> list[MovedRows]:
    """Those among the arguments of a call, and in lists of them."""
    if isinstance(values, (tuple, list)):
        return [x for value in values for x in moved_in(value)]
    return [values] if type(values) is MovedRows else []


def permuted(x: Any, order: Sequence[int]) -> Tensor:
    """``x.permute(order)`` of a row tensor, or of one with its rows moved."""
    of, place = (x.of, x.place) if type(x) is MovedRows else (x, 0)
    # Dimension d of what is seen is this one of the tensor with rows first.
    dims = [0 if d == place else d + 1 if d < place else d for d in order]
    rest = [d for d in dims if d]
    return MovedRows.make(of if rest == sorted(rest) else on_rows(torch.permute, of, [0, *rest]), dims.index(0))


_ORDERS = (
    "permute", "movedim", "moveaxis", "transpose", "swapaxes", "swapdims", "mT.__get__", "T.__get__", "t", "H.__get__",
    "mH.__get__",
)  # fmt: skip


@lru_cache(maxsize=256)
def _order(function: Function, num_dims: int, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> Any:
    """The order in which a function puts so many dimensions: it is told them apart by their sizes."""
    with local_tensors():
        seen = function(torch.empty(*range(1, num_dims + 1), device="meta"), *args, **dict(kwargs))
    return [size - 1 for size in seen.shape]


@implements(*_ORDERS)
def permute(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions in another order; rows may be any of them."""
    x, given = args[0], tuple(tuple(a) if isinstance(a, list) else a for a in args[1:])
    named = tuple((name, tuple(a) if isinstance(a, list) else a) for name, a in kwargs.items())
    return permuted(x, _order(function, x.dim(), given, named))


@implements("unsqueeze")
def unsqueeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Add a dimension within rows, or before them."""
    x, dim = (*args, *kwargs.values())
    of, place = (x.of, x.place) if type(x) is MovedRows else (x, 0)
    (dim,) = dims_of(dim, x.dim() + 1)
    return MovedRows.make(on_rows(torch.unsqueeze, of, dim if dim > place else dim + 1), place + (dim <= place))


def _dim(x: MovedRows, dim: int) -> int:
    """A dimension of what is seen, as one of the tensor with rows first."""
    return 0 if dim == x.place else dim + 1 if dim < x.place else dim


def rows_first(operand: object, like: MovedRows, function: Function) -> Any:
    """An operand that aligns at the right with ``like``, as it meets ``like.of``."""
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


def _pointwise(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Operands align at the right, as they are seen: each is brought to where rows are first."""
    first = moved_in((args, tuple(kwargs.values())))[0]
    args = tuple(rows_first(a, first, function) for a in args)
    kwargs = {name: rows_first(value, first, function) for name, value in kwargs.items()}
    return _each(function(*args, **kwargs), lambda t: MovedRows.make(t, first.place) if isinstance(t, RowTensor) else t)


def _where(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Of three operands: one alone asks for places."""
    if len(args) + len(kwargs) == 1:
        raise refuse_moved(function, moved_in((args, tuple(kwargs.values())))[0])
    return _pointwise(function, args, kwargs)


def _pointwise_(function: Function, args: Args, kwargs: Kwargs) -> object:
    """In place."""
    if type(args[0]) is not MovedRows:
        raise refuse_moved(function, moved_in((args, tuple(kwargs.values())))[0])
    _pointwise(function, args, kwargs)
    return args[0]


def _loss(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Losses that are a value per element, and then its sum or mean (collective)."""
    if kwargs.get("reduction") == "batchmean":
        raise refuse_moved(function, moved_in((args, tuple(kwargs.values())))[0])
    return _pointwise(function, args, kwargs)


def _of_classes(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Losses by class, which are in dimension 1 before the rows: ``[B, C, N]`` and targets ``[B, N]`` (collective)."""
    bound = bind("x target", args[:2], kwargs)
    x, target = bound.pop("x"), bound.pop("target")
    if type(x) is not MovedRows or x.place < 2 or target.dim() != x.dim() - 1:
        raise refuse_moved(function, moved_in((x, target))[0])
    of: Any = x.of
    of_targets: Any = MovedRows.make(of.select(2, 0), x.place - 1)
    out = function(of.movedim(2, 1), rows_first(target, of_targets, function), *args[2:], **bound)
    return MovedRows.make(out, x.place - 1) if isinstance(out, RowTensor) else out


def _reduce(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Over some dimensions; over rows, too, the result is plain (collective)."""
    x, *rest = args
    name = function.__name__
    bound = bind("x p dim keepdim" if name == "norm" else "x dim keepdim", args, kwargs)
    dim = bound.pop("dim", None)
    if type(x) is not MovedRows or isinstance(dim, Tensor) or "other" in bound:
        return _pointwise(function, args, kwargs)
    if dim is None:
        return function(x.of, *rest, **kwargs)
    dims = dims_of(dim, x.dim())
    bound = {key: value for key, value in bound.items() if key != "x"}
    mapped = tuple(_dim(x, d) for d in dims) if isinstance(dim, (tuple, list)) else _dim(x, dims[0])
    out = function(x.of, dim=mapped, **bound)
    place = x.place if bound.get("keepdim") else x.place - sum(d < x.place for d in dims)
    return _each(out, lambda t: MovedRows.make(t, place) if isinstance(t, RowTensor) else _plain(t, x, bound))


def _plain(out: Tensor, x: MovedRows, bound: dict[str, Any]) -> Tensor:
    return out.movedim(0, x.place) if bound.get("keepdim") else out


def _each(out: Any, turn: Callable[[Any], object]) -> object:
    """``turn`` of a result, or of each of several, such as values and indices."""
    if isinstance(out, Tensor):
        return turn(out)
    turned = [turn(item) for item in out]
    return tuple(turned) if type(out) in (tuple, list) else type(out)(turned)


_ALONG = {"normalize": "x p dim eps", "chunk": "x chunks dim", "split": "x split_size dim", "topk": "x k dim"}
_DEFAULT_DIMS = {"normalize": 1, "chunk": 0, "split": 0, "glu": -1, "topk": -1, "sort": -1, "argsort": -1}


def _along(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Functions along one dimension, of which the others keep their places; plain, what orders rows (collective)."""
    name = function.__name__
    x, bound = args[0], bind(_ALONG.get(name, "x dim"), args, kwargs)
    dim = bound.get("dim", _DEFAULT_DIMS.get(name))
    if dim is None:
        raise refuse_moved(function, x)
    (dim,) = dims_of(dim, x.dim())
    sizes = [bound.pop(size) for size in ("split_size", "k") if size in bound]
    rest = {key: value for key, value in bound.items() if key not in ("x", "dim")}
    out = function(x.of, *sizes, dim=_dim(x, dim), **rest)
    return _each(out, lambda t: MovedRows.make(t, x.place) if isinstance(t, RowTensor) else t.movedim(0, x.place))


def _index(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Positions, slices and a list in the other dimensions; whatever selects rows in theirs (collective at first)."""
    x, index = args
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


def _at(dim: int, position: object) -> tuple[object, ...]:
    return (*([slice(None)] * dim), position)


def _select(function: Function, args: Args, kwargs: Kwargs) -> object:
    bound = bind("x dim index", args, kwargs)
    x = bound["x"]
    (dim,) = dims_of(bound["dim"], x.dim())
    return x[_at(dim, bound["index"])]


def _unbind(function: Function, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    (dim,) = dims_of(bind("x dim", args, kwargs).get("dim", 0), x.dim())
    if dim == x.place:
        raise refuse_moved(function, x)
    return tuple(x[_at(dim, k)] for k in range(x.shape[dim]))


def _iterate(function: Function, args: Args, kwargs: Kwargs) -> object:
    return iter(_unbind(function, args, kwargs))


def on_last(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Layers of the last dimensions, and products with a plain matrix."""
    x, other = args[0], [*args[1:], *kwargs.values()]
    if type(x) is not MovedRows or any(isinstance(o, (RowTensor, MovedRows)) for o in other):
        raise refuse_moved(function, moved_in((args, tuple(kwargs.values())))[0])
    shape = other[0] if function in (F.layer_norm, F.rms_norm) else ()
    num_used = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    if x.place >= x.dim() - max(num_used, 1):
        raise refuse_moved(function, x)
    return MovedRows.make(function(x.of, *args[1:], **kwargs), x.place)


def _join(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Concatenate along another dimension than that of the rows, or stack along a new one."""
    bound = bind("tensors dim", args, kwargs)
    tensors = list(bound["tensors"])
    first = moved_in(tensors)[0]
    stacks = function is torch.stack
    (dim,) = dims_of(bound.get("dim", 0), first.dim() + stacks)
    if any(t.dim() != first.dim() for t in tensors) or (dim == first.place and not stacks):
        raise refuse_moved(function, first)
    given = [rows_first(t, first, function) for t in tensors]
    if stacks:
        place = first.place + (dim <= first.place)
        return MovedRows.make(torch.stack(given, dim=dim if dim > first.place else dim + 1), place)
    return MovedRows.make(torch.cat(given, dim=_dim(first, dim)), first.place)


def _as_table(function: Function, args: Args, kwargs: Kwargs) -> object:
    """What the table answers for rows and these alike."""
    return TABLE[function](function, args, kwargs)


def _of_rows(function: Function, args: Args, kwargs: Kwargs) -> object:
    return function(args[0].of, *args[1:], **kwargs)


def _grad(function: Function, args: Args, kwargs: Kwargs) -> object:
    grad = args[0].of.grad
    return grad if grad is None else MovedRows.make(grad, args[0].place)


def _set_grad(function: Function, args: Args, kwargs: Kwargs) -> object:
    function(args[0].of, *args[1:], **kwargs)
    return args[0]


def named(*names: str) -> set[Function]:
    """Every function of torch with one of these names."""
    return {*functions(*names)}


_SHAPES = named(
    "shape.__get__", "size", "dim", "ndim.__get__", "numel", "__len__", "__hash__", "dtype.__get__",
    "is_floating_point", "layout.__get__", "is_sparse.__get__", "is_nested.__get__", "is_complex",
)  # fmt: skip
_HANDLER = Callable[[Function, tuple[object, ...], dict[str, object]], object]
HANDLERS: dict[Function, _HANDLER] = {
    **dict.fromkeys(
        named("device.__get__", "is_cuda.__get__", "requires_grad.__get__", "grad_fn.__get__", "is_leaf.__get__"),
        _of_rows,
    ),
    **dict.fromkeys(named("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), _of_rows),
    **dict.fromkeys(named("requires_grad_", "retain_grad"), _set_grad),
    **dict.fromkeys(named(*_ORDERS), permute),
    **dict.fromkeys(named("unsqueeze"), unsqueeze),
    **dict.fromkeys(named("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"), _reduce),
    **dict.fromkeys(named("std", "var", "logsumexp", "norm", "nansum", "nanmean", "median"), _reduce),
    **dict.fromkeys(
        named("softmax", "log_softmax", "cumsum", "normalize", "chunk", "split", "glu", "topk", "sort", "argsort"),
        _along,
    ),
    **dict.fromkeys(named("__getitem__"), _index),
    **dict.fromkeys(named("select", "index_select"), _select),
    **dict.fromkeys(named("where"), _where),
    **dict.fromkeys(named("unbind"), _unbind),
    **dict.fromkeys(named("__iter__"), _iterate),
    **dict.fromkeys((F.linear, F.layer_norm, F.rms_norm), on_last),
    **dict.fromkeys(named("cat", "concat", "concatenate", "stack"), _join),
    **dict.fromkeys(named("lstm", "gru", "view_as", "reshape_as", "expand_as"), _as_table),
    **dict.fromkeys(named("grad.__get__"), _grad),
    **dict.fromkeys(named("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"), _loss),
    **dict.fromkeys(named("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"), _loss),
    **dict.fromkeys(named("cross_entropy", "nll_loss"), _of_classes),
    **dict.fromkeys(named("poisson_nll_loss", "gaussian_nll_loss"), _loss),
    **dict.fromkeys((*named("relu", "to", "type_as", "contiguous", "clone", "detach"), F.dropout), _pointwise),
}
