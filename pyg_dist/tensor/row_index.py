"""Ids by which rows of a graph are fetched: ``RowIndex``, a node for each edge, and ``PickedRows`` of a subgraph."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from pyg_dist.backend.autograd.replicated import copy_to_ranks
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.dense import indexed_rows
from pyg_dist.backend.on_device import on_device
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, local_tensors, version_of
from pyg_dist.tensor.sharding import RowSharding


class RowIndex(EdgeTensor):
    """A node's global id for each edge; ``x[index]`` of a node tensor is one row for each edge."""

    def fetch(self, x: NodeTensor) -> EdgeTensor:
        """The row of ``x`` for each edge, ``[N, ...] -> [E, ...]``; differentiable (may be collective)."""
        raise NotImplementedError(f"{type(self).__name__}.fetch")  # by each kind of index

    def add_up(self, values: EdgeTensor) -> NodeTensor:
        """The sum of the values of each node's edges, ``[E, ...] -> [N, ...]``: the transpose of :meth:`fetch`."""
        raise NotImplementedError(f"{type(self).__name__}.add_up")  # likewise

    def selected(self, mask: RowTensor) -> RowIndex:
        """The ids of the edges where ``mask``, bool ``[E]``, holds (collective at the mask's first use)."""
        raise NotImplementedError(f"{type(self).__name__}.selected")  # likewise


P = TypeVar("P", bound="PickedRows")


class PickedRows(RowTensor):
    """Ids of the rows of a graph (``source``) that a subgraph has; ``place``: which local rows, int64, on the host.

    ``replicas`` are the ranks that hold the same rows of the graph, and pick others; ``None``: there are none.
    """

    source: RowSharding
    place: Tensor
    replicas: Group | None = None

    @classmethod
    def of(cls: type[P], ids: Tensor, rows: RowSharding, source: RowSharding, place: Tensor) -> P:
        made = ids.as_subclass(cls)
        made._sharding, made.source, made.place = rows, source, place
        return made

    def on(self: P, device: torch.device) -> P:
        """The same on another device."""
        moved = self.of(self.to_local().to(device), self._sharding, self.source, self.place)
        moved.replicas = self.replicas
        return moved

    def fetch(self, x: RowTensor) -> RowTensor:
        """The rows of ``x``, a tensor of the graph, ``[N, ...] -> [B, ...]``; differentiable, no communication.

        N rows in another order, as outputs of batches put together, first go where the graph's are (collective).
        """
        x = x.redistribute(self.source)
        with local_tensors():
            local = indexed_rows.select(self.entered(x), on_device(self.place, x.device))
            return self.noted(RowTensor.from_local(local, self._sharding), x)

    def noted(self, values: RowTensor, x: RowTensor) -> RowTensor:
        """``values``, noted as rows of ``x`` until they change (:func:`origin_of`)."""
        if x.is_leaf or x._attribute:  # what is computed goes when its last user does
            values._origin = version_of(values), x, self
        return values

    def entered(self, x: RowTensor) -> Tensor:
        """The local rows of ``x``; the backward sums over replicas (collective). To be called under `local_tensors`."""
        local = x.as_subclass(Tensor)
        return local if self.replicas is None else copy_to_ranks(local, self.replicas)


def origin_of(values: RowTensor | None) -> tuple[RowTensor, PickedRows] | None:
    """The tensor that a batch's values were picked from, and the ids; ``None``: unknown, or changed since."""
    if values is None or values._origin is None:
        return None
    version, origin, index = values._origin
    return (origin, index) if version is not None and version == version_of(values) else None


class PickedNodes(PickedRows, NodeTensor):
    """``n_id``: the nodes of a subgraph; ``listed`` says which of its subset's nodes the local ones are, int64."""

    listed: Tensor


class PickedEdges(PickedRows, EdgeTensor):
    """``e_id``: the edges of a subgraph."""
