"""Functions with a form for tiles: element-wise functions and linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.grid.collectives import copy_to_replicas, reduce_from_replicas, reduce_scatter
from pyg_dist.grid.linear import replicated_linear
from pyg_dist.grid.plan.tiling import TileLayout
from pyg_dist.grid.sharding import Tile
from pyg_dist.grid.tile_tensor import TILES, TileTensor, as_tile, on_tiles
from pyg_dist.tensor.functions.layers import relu
from pyg_dist.tensor.functions.pointwise import cast, new, pointwise, pointwise_
from pyg_dist.tensor.layer_names import running_layer
from pyg_dist.tensor.picked_rows import PickedRows
from pyg_dist.tensor.registry import TABLE, Function, bind, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors


def _as_operand(operand: Any, tile: Tile) -> Any:
    """An operand as it meets the local tile; ``NotImplemented`` where only whole rows would do."""
    if isinstance(operand, RowTensor):
        if operand._sharding is tile:
            return operand
        if operand.dim() != 2 or operand.shape[1] not in (1, tile.width) or not _is_whole(operand, tile):
            return NotImplemented
        return as_tile(operand, tile) if operand.shape[1] == tile.width else _one_column(operand, tile)
    if not isinstance(operand, Tensor):
        return NotImplemented if isinstance(operand, (tuple, list)) else operand
    rows, columns = (1, 1, *operand.shape)[-2:]
    if operand.dim() > 2 or rows not in (1, tile.size) or columns not in (1, tile.width):
        return NotImplemented
    if operand.dim() < 2 or rows == 1:
        return tile.copy_to_ranks(operand) if columns == 1 else tile.slice_columns(operand)
    # One column beside a tile, or one for each of the tile's: a matrix of one column has both readings, alike.
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


def elementwise(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcasting functions: operands come to the layout of the first tile (collective where one has another)."""
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


elementwise.keeps_rows = True  # type: ignore[attr-defined]


def elementwise_(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place forms: what is written to must be the tile."""
    return elementwise(function, args, kwargs) if isinstance(args[0], TileTensor) else NotImplemented


TILES.update({function: elementwise for function, handler in TABLE.items() if handler in (pointwise, relu)})
TILES.update({function: elementwise_ for function, handler in TABLE.items() if handler is pointwise_})
TILES.update({function: handler for function, handler in TABLE.items() if handler in (cast, new)})


@on_tiles("prelu")
def prelu(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One slope, or one for each column."""
    return elementwise(function, args, kwargs)


def linear_sum(
    pairs: Sequence[tuple[TileTensor | Pending[TileTensor], Tensor]], bias: Tensor | None = None
) -> TileTensor:
    """``sum_k X_k W_k^T + bias`` over tiles of one layout, with one sum over the column axis (collective).

    Where the tiles have replicas along an axis, that axis splits the columns of the result and each W is cut both ways
    (Plexus, Alg. 1, lines 7-8); else the sum is scattered, and the columns stay on their axis. An X may be
    still under way: the products before it do not wait (ScaleGNN, V-D).

    Shapes:
        - X_k: ``[N, F_k]``; W_k: ``[G, F_k]``; bias: ``[G]``, or what else torch adds to ``[N, G]``, such as ``[1]``
        - output: ``[N, G]``

    Raises:
        DataError: On every rank: an X_k and its W_k have another number of columns, or the bias does not fit.
    """
    first = pairs[0][0] if isinstance(pairs[0][0], TileTensor) else pairs[0][0].wait()
    nodes = first._sharding.whole
    given = [first, *(x for x, _ in pairs[1:])]
    return _sum_of_products([(x, nodes.copy_to_ranks(w)) for x, (_, w) in zip(given, pairs, strict=True)], bias)


def _sum_of_products(
    pairs: Sequence[tuple[TileTensor | Pending[TileTensor], Tensor]], bias: Tensor | None = None
) -> TileTensor:
    """:func:`linear_sum` of weights that have entered, and whose first X is here."""
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
            local = x.as_subclass(Tensor)
            if replicas:
                part = part[after.columns.start : after.columns.stop]
                product = replicated_linear(local, part, grid.transport(*replicas))
            else:
                product = F.linear(local, part)
            total = product if total is None else total + product
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
    # A slice of the weight's columns would fit, or not fit on some ranks only.
    if weight.shape[1] != tile.width:
        raise DataError(
            f"Expected rows with {weight.shape[1]} columns (got shape {[tile.size, tile.width]}): make the layer with "
            f"in_channels={tile.width}{running_layer()}"
        )


def _is_linear_here(x: Any, weight: Any) -> bool:
    plain = isinstance(weight, Tensor) and not isinstance(weight, RowTensor) and weight.dim() == 2
    return isinstance(x, TileTensor) and plain


@on_tiles("linear")
def linear(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x W^T + b``; see :func:`linear_sum`."""
    bound = {"bias": None, **bind("input weight bias", args, kwargs)}
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    if not _is_linear_here(x, weight) or weight.shape[1] != x._sharding.width or isinstance(bias, RowTensor):
        return NotImplemented
    return linear_sum([(x, weight)], bias)


@on_tiles("matmul", "mm", "__matmul__")
def matmul(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tile @ plain matrix``."""
    x, weight = (*args, *kwargs.values())
    if not _is_linear_here(x, weight) or weight.shape[0] != x._sharding.width:
        return NotImplemented
    return _sum_of_products([(x, x._sharding.whole.copy_to_ranks(weight).t())])


@on_tiles("__getitem__")
def getitem(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch's rows; everything else needs whole rows."""
    x, index = args
    return index.fetch(x) if isinstance(index, PickedRows) else NotImplemented


@on_tiles("index_select")
def index_select(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch's rows; everything else needs whole rows."""
    bound = bind("x dim index", args, kwargs)
    picks = isinstance(bound["index"], PickedRows) and bound["dim"] in (0, -2)
    return bound["index"].fetch(bound["x"]) if picks else NotImplemented
