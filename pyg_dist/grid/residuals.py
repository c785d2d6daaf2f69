"""Residuals: a layer's input is redistributed to the sharding of its output while the layer works (ScaleGNN, IV-C4).

A product's tiles have another sharding than its input's, so a residual has to be redistributed before it is added. That
it will be added is known only then, but a model does the same in every step: a layer remembers how its last input was
redistributed, and starts that early the next time. Every rank decides alike, by the calls before. A redistribution that
was started and not used is waited for at the layer's next call, which then starts none.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor, nn

from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.session.settings import GRID_EARLY_RESIDUAL
from pyg_dist.grid.plan.tiling import TileLayout
from pyg_dist.grid.sharding import Tile


@dataclass(eq=False)
class LayerInput:
    """A tile's values at one version as the input of a layer, and maybe on their way to another tile."""

    layer: weakref.ref[nn.Module]
    version: int | None
    target: Tile | None = None
    pending: Pending[Tensor] | None = None


@dataclass
class _Redistributed:
    """What became of a layer's last input: how it lay, how that lay which it was added to, what is under way."""

    before: TileLayout
    after: TileLayout
    under_way: LayerInput | None = None


_redistributed: weakref.WeakKeyDictionary[nn.Module, _Redistributed] = weakref.WeakKeyDictionary()


def note_layer_input(local: Tensor, tile: Tile, version: int | None, layer: nn.Module) -> LayerInput | None:
    """Note a layer's input, and start its way if the last one took one (collective then)."""
    if not GRID_EARLY_RESIDUAL.value():
        return None
    entry, way = LayerInput(weakref.ref(layer), version), _redistributed.get(layer)
    if way is None:
        return entry
    if way.under_way is not None:  # started, and not used
        assert way.under_way.pending is not None
        way.under_way.pending.wait()
        del _redistributed[layer]
    elif tile.layout == way.before and version is not None:
        entry.target = tile.grid.tile(way.after, tile.width)
        entry.pending = tile.start_to(local, entry.target)
        way.under_way = entry
    return entry


def start_redistribution(
    local: Tensor, tile: Tile, version: int | None, entry: LayerInput | None, target: Tile
) -> Pending[Tensor]:
    """The piece of another tile, under way; differentiable once it is waited for (collective where they differ).

    Args:
        local: the piece of ``tile``.
        tile: its sharding.
        version: of its values.
        entry: what :func:`note_layer_input` has returned for it, if it was a layer's input.
        target: of the same grid and width.
    """
    pending: Pending[Tensor] | None = None
    layer = None if entry is None else entry.layer()
    if entry is not None and layer is not None and target is not tile:
        way = _redistributed.setdefault(layer, _Redistributed(tile.layout, target.layout))
        way.before, way.after = tile.layout, target.layout
        if way.under_way is entry and entry.target is target and entry.version == version:
            pending, way.under_way = entry.pending, None
    if pending is None and target is not tile:
        pending = tile.start_to(local, target)
    return Pending(lambda: tile.to(local, target, pending))
