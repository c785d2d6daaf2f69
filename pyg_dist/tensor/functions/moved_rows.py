"""``MovedRows``: a row tensor whose rows are in another dimension than the first, such as ``torch.stack(hops)``.

What it does is done on the tensor with rows first, and no row leaves its rank. Reducing the other dimensions, picking
from them, or moving the rows back gives a row tensor again. ``Transposed``, of a matrix, is an operand of products
only: ``x.T @ y`` sums over rows and gives a plain matrix, ``x @ y.T`` has a row for each row of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.pointwise import pointwise
from pyg_dist.tensor.functions.shapes import dims_of, global_shape, refuse
from pyg_dist.tensor.registry import TABLE, Args, Function, Kwargs, bind, functions, implements, public_name
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, as_row_tensor_, like_rows, local_tensors, on_rows


class MovedRows(DerivedOperand):
    """A tensor with its rows in dimension ``place``, which is not 0; of two dimensions it is :class:`Transposed`.

    Attributes:
        of: the same with rows first, the other dimensions in their order.
        place: where rows are.
    """

    of: RowTensor
    place: int

    @staticmethod
    def make(of: RowTensor, place: int) -> Any:
        """``of.movedim(0, place)``: a row tensor again for place 0, the transpose of a matrix for 1."""
        if place == 0:
            return of
        whole = global_shape(of)
        shape = [*whole[1 : place + 1], whole[0], *whole[place + 1 :]]
        # On the meta device: functions that torch does not dispatch to __torch_function__ find no values to read.
        result: Any = torch.empty(shape, dtype=of.dtype, device="meta").as_subclass(
            Transposed if of.dim() == 2 else MovedRows
        )
        result.of, result.place = of, place
        return result

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
        handler = _HANDLERS.get(func)
        if handler is None and TABLE.get(func) is pointwise:
            handler = _pointwise
        if handler is None or any(issubclass(t, DerivedOperand) and t is not MovedRows for t in types):
            raise _refuse(func, next(iter(_moved_in((args, tuple(kwargs.values()))))))
        return handler(func, args, kwargs)


def _refuse(function: Function, x: MovedRows) -> MixedRowsError:
    return MixedRowsError(
        f"{public_name(function)} has no distributed form for rows in dimension {x.place} (of shape {list(x.shape)}): "
        f"move them first, x.movedim({x.place}, 0), or stack along dim=1"
    )


def _moved_in(values: Any) -> list[MovedRows]:
    if isinstance(values, (tuple, list)):
        return [x for value in values for x in _moved_in(value)]
    return [values] if type(values) is MovedRows else []


def permuted(x: Any, order: Sequence[int]) -> Any:
    """``x.permute(order)`` of a row tensor, or of one with its rows moved."""
    of, place = (x.of, x.place) if type(x) is MovedRows else (x, 0)
    # Dimension d of what is seen is this one of the tensor with rows first.
    dims = [0 if d == place else d + 1 if d < place else d for d in order]
    rest = [d for d in dims if d]
    return MovedRows.make(on_rows(torch.permute, of, [0, *rest]), dims.index(0))


def order_of(function: Function, num_dims: int, args: Args, kwargs: Kwargs) -> list[int]:
    """The order in which a function puts the dimensions of a tensor that has so many."""
    with local_tensors():
        seen = function(torch.empty(*range(1, num_dims + 1), device="meta"), *args, **kwargs)
    return [size - 1 for size in seen.shape]


@implements("permute", "movedim", "moveaxis")
def permute(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions in another order; rows may be any of them."""
    x = args[0]
    return permuted(x, order_of(function, x.dim(), args[1:], kwargs))


@implements("unsqueeze")
def unsqueeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Add a dimension within rows, or before them."""
    x, dim = (*args, *kwargs.values())
    if 0 in dims_of(dim, x.dim() + 1):
        return MovedRows.make(on_rows(torch.unsqueeze, x, 1), 1)
    return on_rows(function, x, dim)


def _dim(x: MovedRows, dim: int) -> int:
    """A dimension of what is seen, as one of the tensor with rows first."""
    return 0 if dim == x.place else dim + 1 if dim < x.place else dim


def _pointwise(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Operands align at the right, as they are seen: each is brought to where rows are first."""
    first = _moved_in((args, tuple(kwargs.values())))[0]

    def turned(operand: Any) -> Any:
        if not isinstance(operand, Tensor) or operand.dim() == 0:
            return operand
        if type(operand) is MovedRows:
            if (operand.place, operand.dim()) != (first.place, first.dim()):
                raise _refuse(function, operand)
            return operand.of
        if isinstance(operand, RowTensor):
            if operand.dim() != first.dim() - first.place:
                raise _refuse(function, first)
            return operand.view(operand.shape[0], *[1] * first.place, *operand.shape[1:])
        if operand.dim() > first.dim():
            raise _refuse(function, first)
        return operand.view(*[1] * (first.dim() - operand.dim()), *operand.shape).movedim(first.place, 0)

    args, kwargs = tuple(map(turned, args)), {name: turned(value) for name, value in kwargs.items()}
    return MovedRows.make(function(*args, **kwargs), first.place)


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


def _each(out: Any, turn: Callable[[Any], Any]) -> Any:
    """``turn`` of a result, or of each of several, such as values and indices."""
    if isinstance(out, Tensor):
        return turn(out)
    turned = [turn(item) for item in out]
    return tuple(turned) if type(out) in (tuple, list) else type(out)(turned)


def _along(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Functions along one dimension that keep the shape."""
    x, bound = args[0], bind("x dim", args, kwargs)
    if bound.get("dim") is None:
        raise _refuse(function, x)
    (dim,) = dims_of(bound["dim"], x.dim())
    rest = {key: value for key, value in bound.items() if key not in ("x", "dim")}
    return MovedRows.make(function(x.of, dim=_dim(x, dim), **rest), x.place)


def _index(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Positions, slices and a list in the other dimensions."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if any(i is None or isinstance(i, (RowTensor, bool)) for i in index):
        raise _refuse(function, x)
    for k, item in enumerate(index):
        if item is Ellipsis:
            index = (*index[:k], *[slice(None)] * (x.dim() - len(index) + 1), *index[k + 1 :])
            break
    index = (*index, *[slice(None)] * (x.dim() - len(index)))
    dropped = [isinstance(i, int) for i in index]
    num_lists = sum(not isinstance(i, (int, slice)) for i in index)
    if index[x.place] != slice(None) or num_lists > 1 or (num_lists and any(dropped)):
        raise _refuse(function, x)
    of_rows = (slice(None), *(i for d, i in enumerate(index) if d != x.place))
    return MovedRows.make(x.of[of_rows], x.place - sum(dropped[: x.place]))


def _at(dim: int, position: Any) -> tuple[Any, ...]:
    return (*([slice(None)] * dim), position)


def _select(function: Function, args: Args, kwargs: Kwargs) -> Any:
    bound = bind("x dim index", args, kwargs)
    x = bound["x"]
    (dim,) = dims_of(bound["dim"], x.dim())
    return x[_at(dim, bound["index"])]


def _unbind(function: Function, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    (dim,) = dims_of(bind("x dim", args, kwargs).get("dim", 0), x.dim())
    if dim == x.place:
        raise _refuse(function, x)
    return tuple(x[_at(dim, k)] for k in range(x.shape[dim]))


def _iterate(function: Function, args: Args, kwargs: Kwargs) -> object:
    return iter(_unbind(function, args, kwargs))


def _squeeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions of size one other than the rows'."""
    x = args[0]
    dims = [d for d in dims_of(bind("x dim", args, kwargs).get("dim"), x.dim()) if d != x.place and x.shape[d] == 1]
    return x[tuple(0 if d in dims else slice(None) for d in range(x.dim()))]


def _on_last(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Layers of the last dimensions, and products with a plain matrix."""
    x, other = args[0], [*args[1:], *kwargs.values()]
    if type(x) is not MovedRows or any(isinstance(o, (RowTensor, MovedRows)) for o in other):
        raise _refuse(function, _moved_in((args, tuple(kwargs.values())))[0])
    shape = other[0] if function is F.layer_norm else ()
    num_used = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    if x.place >= x.dim() - max(num_used, 1):
        raise _refuse(function, x)
    return MovedRows.make(function(x.of, *args[1:], **kwargs), x.place)


def _product(function: Function, args: Args, kwargs: Kwargs) -> object:
    """With a plain matrix, or with one for each entry of the first dimension (``[H, N, C] @ [H, C, D]``)."""
    x, other = (*args, *kwargs.values())
    is_of_each = type(x) is MovedRows and x.dim() == 3 and x.place == 1 and isinstance(other, Tensor)
    if is_of_each and other.dim() == 3 and type(other) in (Tensor, torch.nn.Parameter):
        return MovedRows.make(cast(RowTensor, torch.einsum("nhc,hcd->nhd", x.of, other.expand(x.shape[0], -1, -1))), 1)
    if isinstance(other, Tensor) and other.dim() == 2 and function is not torch.bmm:
        return _on_last(function, args, kwargs)
    raise _refuse(function, _moved_in((args, tuple(kwargs.values())))[0])


def _join(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Concatenate along another dimension than that of the rows."""
    bound = bind("tensors dim", args, kwargs)
    tensors = list(bound["tensors"])
    first = _moved_in(tensors)[0]
    (dim,) = dims_of(bound.get("dim", 0), first.dim())
    if dim == first.place or any(type(t) is not MovedRows or t.place != first.place for t in tensors):
        raise _refuse(function, first)
    return MovedRows.make(torch.cat([t.of for t in tensors], dim=_dim(first, dim)), first.place)  # type: ignore[arg-type]


def _as_table(function: Function, args: Args, kwargs: Kwargs) -> object:
    """What the table answers for rows and these alike."""
    return TABLE[function](function, args, kwargs)


def _of_rows(function: Function, args: Args, kwargs: Kwargs) -> object:
    return function(args[0].of, *args[1:], **kwargs)


def _attention(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``nn.MultiheadAttention`` with a sequence for each row: ``batch_first=True`` of ``[N, L, F]``."""
    names = (
        "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
        "dropout_p out_proj_weight out_proj_bias"
    )
    bound = {"training": True, **bind(names, args, kwargs)}
    sequences = [bound[name] for name in ("query", "key", "value")]
    if any(type(s) is not MovedRows or s.dim() != 3 or s.place != 1 for s in sequences):
        raise MixedRowsError(
            f"{public_name(function)} is row-wise only for one sequence per row: expected query, key and value "
            f"[N, L, F] with batch_first=True"
        )
    if bound["dropout_p"] and bound["training"]:
        raise MixedRowsError(f"{public_name(function)} draws dropout for all rows: pass dropout=0, and use F.dropout")
    with local_tensors():
        (query, key, value), rows = like_rows(function, *(s.of for s in sequences))
        local = {
            id(s): t.as_subclass(Tensor).transpose(0, 1) for s, t in zip(sequences, (query, key, value), strict=True)
        }
        for name, given in bound.items():
            if type(given) is MovedRows:
                bound[name] = local[id(given)]
            elif isinstance(given, RowTensor):  # a padding mask
                bound[name] = given.redistribute(rows).as_subclass(Tensor)
            elif isinstance(given, Tensor):
                bound[name] = rows.copy_to_ranks(given)
        out, weights = function(**bound)
        of = as_row_tensor_(out.transpose(0, 1).contiguous(), rows)
        return MovedRows.make(of, 1), weights if weights is None else as_row_tensor_(weights, rows)


def _named(*names: str) -> set[Function]:
    return {*functions(*names)}


_SHAPES = _named(
    "shape.__get__", "size", "dim", "ndim.__get__", "numel", "__len__", "__hash__", "dtype.__get__",
    "is_floating_point", "layout.__get__", "is_sparse.__get__", "is_nested.__get__", "is_complex",
)  # fmt: skip
_HANDLERS: dict[Function, Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_named("device.__get__", "requires_grad.__get__", "grad_fn.__get__", "is_leaf.__get__"), _of_rows),
    **dict.fromkeys(_named("transpose", "swapaxes", "swapdims", "mT.__get__"), permute),
    **dict.fromkeys(_named("permute", "movedim", "moveaxis"), permute),
    **dict.fromkeys(_named("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"), _reduce),
    **dict.fromkeys(_named("std", "var", "logsumexp", "norm", "nansum", "nanmean", "median"), _reduce),
    **dict.fromkeys(_named("softmax", "log_softmax", "cumsum"), _along),
    **dict.fromkeys(_named("__getitem__"), _index),
    **dict.fromkeys(_named("select"), _select),
    **dict.fromkeys(_named("unbind"), _unbind),
    **dict.fromkeys(_named("__iter__"), _iterate),
    **dict.fromkeys(_named("squeeze"), _squeeze),
    **dict.fromkeys((F.linear, F.layer_norm), _on_last),
    **dict.fromkeys(_named("matmul", "__matmul__", "bmm"), _product),
    **dict.fromkeys(_named("cat", "concat", "concatenate"), _join),
    **dict.fromkeys(_named("lstm", "gru"), _as_table),
    **dict.fromkeys((*_named("relu", "to", "type_as", "contiguous", "clone"), F.dropout), _pointwise),
    F.multi_head_attention_forward: _attention,
}


class Transposed(MovedRows):
    """The ``[F, N]`` transpose of rows ``[N, F]``: takes part in products, and turns back; everything else raises."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
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
            return _transposed_product(other, x) if func is Tensor.__rmatmul__ else _transposed_product(x, other)
        raise MixedRowsError(
            f"{public_name(func)} of transposed rows would mix rows, which take part in x.T @ y and x @ y.T only: call "
            f"it before .T, or on .full_tensor() (all rows, collective)"
        )


def _transposed_product(x: Any, other: Any) -> Any:
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
    return MovedRows.make(product, 1) if x.dim() == 2 else product


_OF_ROWS = {*functions("device.__get__", "requires_grad.__get__", "grad_fn.__get__", "is_leaf.__get__")}
_TURNS = {*functions("t", "T.__get__", "mT.__get__", "transpose", "swapaxes", "swapdims")}
_RESHAPES = {*functions("reshape", "view", "contiguous")}
_PRODUCTS = {*functions("matmul", "mm", "mv", "__matmul__", "__rmatmul__")}


@implements("t", "T.__get__", "H.__get__", "mH.__get__")
def turn(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """The transpose of a matrix."""
    x: RowTensor = args[0]
    if x.dim() > 2:
        raise refuse(function, f"of {x.dim()} dimensions would move rows")
    return MovedRows.make(x, 1) if x.dim() == 2 else x


@implements("mT.__get__")
def matrix_transpose(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Swap the last two dimensions."""
    return args[0].transpose(-2, -1)


@implements("transpose", "swapaxes", "swapdims")
def transpose(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Swap two dimensions, those of a matrix or others."""
    x, *dims = (*args, *kwargs.values())
    first, second = dims_of(dims, x.dim())
    if 0 in (first, second) and first != second:
        order = [second if d == first else first if d == second else d for d in range(x.dim())]
        return MovedRows.make(x, 1) if x.dim() == 2 else permuted(x, order)
    return on_rows(function, x, first, second)
