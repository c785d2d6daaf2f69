"""Functions with a form for tiles: element-wise functions, linear maps, and norms.

Statistics of a row sum over the column axis, statistics of a column over the row axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.autograd.replicated import copy_to_ranks, reduce_from_ranks
from pyg_dist.backend.comm.transport import Pending, Transport
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.grid.collectives import (
    AllGather,
    ReduceScatter,
    copy_to_replicas,
    near_equal,
    reduce_from_replicas,
    reduce_scatter,
)
from pyg_dist.grid.plan.mesh_shape import TileLayout
from pyg_dist.grid.sharding import Tile
from pyg_dist.grid.tile_tensor import TILES, TileTensor, as_tile
from pyg_dist.tensor.calling_code import running_layer
from pyg_dist.tensor.functions.layers import batch_norm, product, relu
from pyg_dist.tensor.functions.pointwise import cast, new, pointwise, pointwise_
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import KEEPS_ROWS, TABLE, Function, bind, public_name
from pyg_dist.tensor.row_index import PickedRows
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, as_row_tensor_, local_tensors


def _as_operand(operand: object, tile: Tile) -> Any:
    """The local part of an operand beside a tile; ``NotImplemented`` where whole rows are needed."""
    if isinstance(operand, RowTensor):
        if operand._sharding is tile:
            return operand
        if operand.dim() != 2 or operand.shape[1] not in (1, tile.width) or not _is_whole(operand, tile):
            return NotImplemented
        return as_tile(operand, tile) if operand.shape[1] == tile.width else _one_column(operand, tile)
    if not isinstance(operand, Tensor) or isinstance(operand, DerivedOperand):
        return NotImplemented if isinstance(operand, (tuple, list, DerivedOperand)) else operand
    rows, columns = (1, 1, *operand.shape)[-2:]
    if operand.dim() > 2 or rows not in (1, tile.size) or columns not in (1, tile.width):
        return NotImplemented
    if operand.dim() < 2 or rows == 1:
        return tile.copy_to_ranks(operand) if columns == 1 else tile.slice_columns(operand)
    # As many columns as the tile's, or one for all of them; for a tile of one column both are the same.
    if columns == tile.width:
        return tile.slice(operand)
    return tile.copy_to_ranks(operand).index_select(0, on_device(tile.global_id, operand.device))


def _one_column(x: RowTensor, tile: Tile) -> Tensor:
    """One number for each of the tile's rows, on every rank of the column axis (collective)."""
    layout, grid = tile.layout, tile.grid
    local = as_tile(x, grid.tile(TileLayout(layout.rows, None, layout.order), 1)).to_local()
    with local_tensors():
        return local if layout.columns is None else copy_to_replicas(local, grid.transport(layout.columns, exact=True))


def _is_whole(x: RowTensor, tile: Tile) -> bool:
    return x._sharding is tile.grid.node_sharding or (isinstance(x, TileTensor) and x._sharding.grid is tile.grid)


def elementwise(function: Function, *args: object, **kwargs: Any) -> Any:
    """Broadcasting functions: operands get the layout of the first tile (collective where one has another)."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, TileTensor))
    tile = first._sharding
    if kwargs.get("out") is not None and kwargs["out"]._sharding is not tile:
        raise MixedRowsError(f"{public_name(function)} expected 'out' to lie as its operand does: assign the result")
    operands = [_as_operand(a, tile) for a in args]
    named = {name: _as_operand(a, tile) for name, a in kwargs.items()}
    if any(o is NotImplemented for o in (*operands, *named.values())):
        return NotImplemented
    with local_tensors():
        return as_row_tensor_(function(*operands, **named), tile)


KEEPS_ROWS.add(elementwise)


def elementwise_(function: Function, x: object, *args: object, **kwargs: object) -> object:
    """In-place forms, which write to a tile."""
    return elementwise(function, x, *args, **kwargs) if isinstance(x, TileTensor) else NotImplemented


TILES.update({function: elementwise for function, handler in TABLE.items() if handler in (pointwise, relu)})
TILES.update({function: elementwise_ for function, handler in TABLE.items() if handler is pointwise_})
TILES.update({function: handler for function, handler in TABLE.items() if handler in (cast, new, batch_norm)})


TILES.implements("prelu")(elementwise)  # one slope, or one for each column


def linear_sum(
    pairs: Sequence[tuple[TileTensor | Pending[TileTensor], Tensor]], bias: Tensor | None = None
) -> TileTensor:
    """``sum_k X_k W_k^T + bias`` over tiles of one layout, with one sum over the column axis (collective).

    Where the tiles have replicas along an axis, that axis splits the columns of the result and each W is cut both ways
    (Plexus, Alg. 1, lines 7-8); else the sum is scattered, and the columns stay on their axis. An X may be still under
    way: the products before it do not wait (ScaleGNN, V-D). Raises on every rank where shapes do not fit.

    Shapes: X_k ``[N, F_k]``, W_k ``[G, F_k]``, bias ``[G]`` or broadcast to ``[N, G]``; output ``[N, G]``.
    """
    first = pairs[0][0] if isinstance(pairs[0][0], TileTensor) else pairs[0][0].wait()
    nodes = first._sharding.whole
    given = [first, *(x for x, _ in pairs[1:])]
    return _sum_of_products([(x, nodes.copy_to_ranks(w)) for x, (_, w) in zip(given, pairs, strict=True)], bias)


def _sum_of_products(
    pairs: Sequence[tuple[TileTensor | Pending[TileTensor], Tensor]], bias: Tensor | None = None
) -> TileTensor:
    """:func:`linear_sum` of weights that :meth:`copy_to_ranks` has returned, with a first X that is not pending."""
    first = pairs[0][0]
    assert isinstance(first, TileTensor)
    layout, grid = first._sharding.layout, first._sharding.grid
    width = pairs[0][1].shape[0]
    assert layout.columns is not None
    column_transport = grid.transport(layout.columns)
    replicas = layout.replicas
    after = grid.tile(TileLayout(layout.rows, replicas[0] if replicas else layout.columns, layout.order), width)
    addend = None if bias is None else _as_operand(bias, after)
    if addend is NotImplemented:
        assert bias is not None
        raise DataError(
            f"Expected a bias of {width} values, or of one (got shape {list(bias.shape)}): one for each output column"
        )
    with local_tensors():
        total: Tensor | None = None
        for given, weight in pairs:
            x = given if isinstance(given, TileTensor) else given.wait()
            _require_width(x._sharding, weight)
            columns = x._sharding.columns
            part = weight[:, columns.start : columns.stop]
            if replicas:
                part = part[after.columns.start : after.columns.stop]
                term = replicated_linear(x, part, grid.transport(*replicas))
            else:
                term = product(x, part)
            total = term if total is None else total + term
        assert total is not None
        if replicas:
            out = reduce_from_replicas(total, column_transport)
        else:
            out = reduce_scatter(total, column_transport, after.column_sizes, 1)
        if addend is not None:
            # Autocast has narrowed the product, and narrows the bias.
            out = out + (addend.to(out.dtype) if torch.is_autocast_enabled(out.device.type) else addend)
        return as_row_tensor_(out.as_subclass(Tensor), after)  # type: ignore[return-value]


def _require_width(tile: Tile, weight: Tensor) -> None:
    # Checked on the whole: a slice of the weight may have a wrong width on some ranks only.
    if weight.shape[1] != tile.width:
        raise DataError(
            f"Expected rows with {weight.shape[1]} columns (got shape {[tile.size, tile.width]}): make the layer with "
            f"in_channels={tile.width}{running_layer()}"
        )


def _is_linear_here(x: object, weight: object) -> bool:
    plain = isinstance(weight, Tensor) and not isinstance(weight, RowTensor) and weight.dim() == 2
    return isinstance(x, TileTensor) and plain


@TILES.implements("linear")
def linear(function: Function, input: Any, weight: Tensor, bias: Tensor | None = None) -> object:
    """``x W^T + b``; see :func:`linear_sum`."""
    fits = _is_linear_here(input, weight) and weight.shape[1] == input._sharding.width
    return linear_sum([(input, weight)], bias) if fits and not isinstance(bias, RowTensor) else NotImplemented


@TILES.implements("matmul", "mm", "__matmul__")
def matmul(function: Function, *args: Any, **kwargs: Any) -> object:
    """``tile @ plain matrix``."""
    x, weight = (*args, *kwargs.values())
    if not _is_linear_here(x, weight) or weight.shape[0] != x._sharding.width:
        return NotImplemented
    return _sum_of_products([(x, x._sharding.whole.copy_to_ranks(weight).t())])


@TILES.implements("__getitem__")
def getitem(function: Function, x: TileTensor, index: object) -> object:
    """Rows by a batch's ``n_id``; other indices need whole rows."""
    return index.fetch(x) if isinstance(index, PickedRows) else NotImplemented


@TILES.implements("index_select")
def index_select(function: Function, x: TileTensor, dim: int, index: object) -> object:
    """Rows by a batch's ``n_id``; other indices need whole rows."""
    return index.fetch(x) if isinstance(index, PickedRows) and dim in (0, -2) else NotImplemented


class _ReplicatedLinear(LocalFunction[Tensor]):
    """``x W^T``, each replica of x times other rows of W (ScaleGNN, V-D).

    The sum over the replicas is a scattered sum and a gather, each under way during half of the other product.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, transport: Transport) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transport = transport
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        transport: Transport = ctx.transport
        if torch.is_grad_enabled():  # gradients of gradients
            return reduce_from_replicas(grad @ weight, transport), grad.t() @ x, None
        by_x = grad @ weight
        sizes = near_equal(by_x.numel(), transport.group.size)
        scattered = ReduceScatter(transport, sizes).start(by_x.view(-1))
        by_weight, half = weight.new_empty(weight.shape), weight.shape[0] // 2
        torch.mm(grad[:, :half].t(), x, out=by_weight[:half])
        gathered = AllGather(transport, sizes).start(scattered.wait())
        torch.mm(grad[:, half:].t(), x, out=by_weight[half:])
        return gathered.wait().view(by_x.shape), by_weight, None


def replicated_linear(x: TileTensor, weight: Tensor, transport: Transport) -> Tensor:
    """``x W^T`` of a replica of x and this rank's rows of W (backward by x: a sum over the replicas, collective).

    Exact: the bits are those of the sum made before the other product. Shapes: ``[n, F], [G, F] -> [n, G]``.
    """
    is_early = (
        transport.group.size > 1
        and x.requires_grad
        and weight.requires_grad
        and not torch.is_autocast_enabled(x.device.type)
    )
    if is_early:
        return _ReplicatedLinear.apply(x.as_subclass(Tensor), weight, transport)
    if not x.requires_grad:
        return product(x, weight)
    return F.linear(copy_to_replicas(x.as_subclass(Tensor), transport), weight)


@TILES.implements("layer_norm", "rms_norm")
def norm_of_each_row(
    function: Function, x: Tensor, normalized_shape: Sequence[int], *args: object, **kwargs: object
) -> object:
    """``(x - mean) / sqrt(var + eps)`` or ``x / sqrt(mean square + eps)`` (ScaleGNN, eq. 29) by row (collective)."""
    centres = function.__name__ == "layer_norm"
    bound = bind(function, "weight bias eps cudnn_enable" if centres else "weight eps", args, kwargs)
    parameters = [bound.get("weight"), bound.get("bias")]
    if not isinstance(x, TileTensor) or any(isinstance(p, RowTensor) for p in parameters):
        return NotImplemented
    tile = x._sharding
    if (*normalized_shape,) != (tile.width,):
        return NotImplemented
    with local_tensors():
        weight, bias = (None if p is None else tile.slice_columns(p) for p in parameters)
        local = x.to(accumulation_dtype(x.dtype))
        group = tile.column_group
        if centres:
            local = local - copy_to_ranks(reduce_from_ranks(local.sum(1, keepdim=True), group) / tile.width, group)
        mean_square = reduce_from_ranks(local.square().sum(1, keepdim=True), group) / tile.width
        eps = bound.get("eps", 1e-5 if centres else None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        out = local * copy_to_ranks(torch.rsqrt(mean_square + eps), group)
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return as_row_tensor_(out.to(x.dtype).as_subclass(Tensor), tile)
