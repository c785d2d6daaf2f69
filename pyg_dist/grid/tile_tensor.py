"""``TileTensor``: a node tensor whose columns are split over ranks, too.

Functions with a form for tiles are in a table of their own, :data:`TILES`. For every other function, such as losses and
argmax, the tensor is redistributed to whole rows once, and the table of row tensors is used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.errors import MixedRowsError
from pyg_dist.grid.plan.mesh_shape import WHOLE_ROWS, TileLayout
from pyg_dist.grid.sharding import Tile
from pyg_dist.tensor import row_tensor
from pyg_dist.tensor.calling_code import EdgeHandle
from pyg_dist.tensor.functions import autograd
from pyg_dist.tensor.functions.full_tensor import pickle, trace
from pyg_dist.tensor.functions.random import dropout, fill, initialise, random_like
from pyg_dist.tensor.functions.shapes import length, metadata, num_bytes, numel, shape
from pyg_dist.tensor.registry import TABLE, Args, Function, Kwargs, Table, mapped, public_name, writes
from pyg_dist.tensor.row_tensor import (
    COLUMNS,
    DerivedOperand,
    NodeTensor,
    RowTensor,
    as_row_tensor_,
    is_below_autograd,
    local_tensors,
    note_numbers,
    takes_out,
    version_of,
)
from pyg_dist.tensor.sharding import RowSharding


@dataclass(eq=False)
class LayerInput:
    """A layer's input at one version, and maybe its redistribution to another tile."""

    layer: weakref.ref[nn.Module]
    version: int | None
    target: Tile | None = None
    pending: Pending[Tensor] | None = None


@dataclass
class _Redistributed:
    """The layouts between which a layer's last input was redistributed, and the pending redistribution of this one."""

    before: TileLayout
    after: TileLayout
    under_way: LayerInput | None = None


_redistributed: weakref.WeakKeyDictionary[nn.Module, _Redistributed] = weakref.WeakKeyDictionary()


TILES = Table()
"""Handlers for tiles. One that returns ``NotImplemented`` leaves the call to the table of whole rows."""


class TileTensor(NodeTensor):
    """A ``[N, F]`` node tensor of which this rank holds some rows and some columns."""

    kind = "tile"  # type: ignore[assignment]
    _sharding: Tile
    _entry: LayerInput | None = None  # of the last layer whose input this was

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if len(types) > 1 and any(issubclass(type_, (DerivedOperand, EdgeHandle)) for type_ in types):
            return NotImplemented
        kwargs = kwargs or {}
        handler = TILES.get(func)
        if kwargs.get("out") is not None and not (handler and takes_out(handler, kwargs["out"])):
            raise MixedRowsError(f"{public_name(func)} of row tensors does not take 'out': assign the result")
        if noted().is_on:
            note_numbers(func, args, kwargs)
        if handler is not None:
            if not args and "input" in kwargs:
                args = (kwargs["input"],)
                kwargs = {name: value for name, value in kwargs.items() if name != "input"}
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        elif is_below_autograd(func):
            with local_tensors():
                return func(*args, **kwargs)
        if (writes(func) or kwargs.get("inplace")) and args and isinstance(args[0], TileTensor):
            return _write_rows(func, args, kwargs)
        return func(*_in_rows(args), **_in_rows(kwargs))

    def to_rows(self) -> NodeTensor:  # type: ignore[override]
        """The same values as whole rows (collective, unless they are cached).

        They are cached while they do not change; but not for a leaf that learns, as :class:`RowTensor` explains.
        """
        with local_tensors():
            version = version_of(self)
            records = self.requires_grad and torch.is_grad_enabled()
            state = (version, records, torch.is_inference_mode_enabled())
            if self._as_rows is not None and self._as_rows[0] == state:
                return self._as_rows[1]
            tile, grid = self._sharding, self._sharding.grid
            whole = grid.tile(WHOLE_ROWS, tile.width)
            local: Any = tile.to(self.as_subclass(Tensor), whole)
            rows: Any = as_row_tensor_(local.as_subclass(Tensor), grid.node_sharding)
            self._as_rows = None if version is None or (records and self.is_leaf) else (state, rows)
            if whole is not tile:
                local._copy_of = COLUMNS
            return cast(NodeTensor, rows)

    def note_layer_input(self, layer: nn.Module) -> None:
        """Note that this is a layer's input, which may become its residual.

        If the layer's last input was redistributed, start to redistribute this one (collective).
        """
        tile, way = self._sharding, _redistributed.get(layer)
        with local_tensors():
            local, version = self.as_subclass(Tensor), version_of(self)
        self._entry = entry = LayerInput(weakref.ref(layer), version)
        if way is None:
            return
        if way.under_way is not None:  # the last one was not used
            assert way.under_way.pending is not None
            way.under_way.pending.wait()
            del _redistributed[layer]
        elif tile.layout == way.before and version is not None:
            entry.target = tile.grid.tile(way.after, tile.width)
            entry.pending = tile.start_to(local, entry.target)
            way.under_way = entry

    def start_redistribution(self, sharding: RowSharding) -> Pending[Tensor]:
        tile, entry = self._sharding, self._entry
        if not isinstance(sharding, Tile) or sharding.grid is not tile.grid or sharding.width != tile.width:
            return super().start_redistribution(sharding)
        with local_tensors():
            local, pending = self.as_subclass(Tensor), None
            layer = None if entry is None else entry.layer()
            if entry is not None and layer is not None and sharding is not tile:
                way = _redistributed.setdefault(layer, _Redistributed(tile.layout, sharding.layout))
                way.before, way.after = tile.layout, sharding.layout
                is_of_now = entry.target is sharding and entry.version == version_of(self)
                if way.under_way is entry and is_of_now:
                    pending, way.under_way = entry.pending, None
            if pending is None and sharding is not tile:
                pending = tile.start_to(local, sharding)
            return Pending(lambda: tile.to(local, sharding, pending))


row_tensor.register_class("tile", TileTensor)


def as_tile(x: RowTensor, tile: Tile) -> TileTensor:
    """A ``[N, F]`` node tensor in the distribution ``tile`` (collective if it has another)."""
    return cast(TileTensor, x.redistribute(tile))


def _in_rows(value: Any) -> Any:
    """``value`` with every tile in it as whole rows."""
    return mapped(value, lambda item: item.to_rows() if isinstance(item, TileTensor) else item)


def _write_rows(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Apply an in-place function to a copy in whole rows, and copy the result into the tile (collective)."""
    x: TileTensor = args[0]
    rows = x.to_rows().clone()
    function(rows, *_in_rows(args[1:]), **_in_rows(kwargs))
    x.copy_(as_tile(cast(NodeTensor, rows), x._sharding))
    return None if public_name(function).endswith("__setitem__") else x


_SAME_FOR_TILES = (
    metadata, shape, numel, num_bytes, length, trace, pickle, dropout, random_like, fill, initialise,
    autograd.stored, autograd.store, autograd.data, autograd.detach, autograd.replace_data, autograd.unchanged,
    autograd.register_hook, autograd.backward_of_one, autograd.backward, autograd.grad, autograd.deepcopy,
    autograd.grad_fn,
)  # fmt: skip
TILES.update({function: handler for function, handler in TABLE.items() if handler in _SAME_FOR_TILES})


@TILES.implements("view_as")
def view_as(function: Function, x: Tensor, other: Tensor) -> object:
    """The tile itself, as ``autograd.Function`` returns an input, backward hooks included; else on whole rows."""
    if not isinstance(x, TileTensor) or x.shape != other.shape:
        return NotImplemented
    with local_tensors():
        local = x.as_subclass(Tensor)
        return as_row_tensor_(local.view_as(local), x._sharding)


@TILES.implements("__repr__", "__format__")
def representation(function: Function, x: TileTensor, *_: object, **__: object) -> str:
    """Global shape and local values; no communication."""
    with local_tensors():
        tile, local = x._sharding, x.as_subclass(Tensor)
        return f"NodeTensor(shape={list(tile.global_shape(x.shape))}, local tile of {tile}: {local!r})"
