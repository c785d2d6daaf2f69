"""The in-edges of a rank's nodes, and draws from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.tensor import EdgeTensor


@dataclass(frozen=True, eq=False)
class InEdges:
    """The in-edges of a rank's nodes, or those of a relation; a node's are in the graph's order."""

    rowptr: Tensor  # int64 ``[n + 1]``
    col: Tensor  # the :class:`~pyg_dist.loader.columns.Columns` of their sources, int32 ``[e]``
    place: Tensor | None  # where each edge is stored, int32 or int64 ``[e]``; ``None``: in this order
    position: Tensor | None  # of each stored edge in the graph's order, int64; ``None``: as they are stored
    num_edges: int  # of the graph
    weight: Tensor | None = None  # of each edge in draws, not negative, float64 ``[e]``; ``None``: draws are uniform

    @staticmethod
    def of(graph: DistributedGraph, weight: EdgeTensor | None) -> InEdges:
        """The in-edges of a graph over ranks; ``col`` has numbers of neighbours in its edge view (collective)."""
        view = graph.edge_view
        csr = view.csr.on_host
        graph.edge_sharding.ordered_position  # noqa: B018  made here, where no thread does
        values = None
        if weight is not None:
            moved = weight.redistribute(view.edge_sharding).to_local()
            values = csr.values(moved.detach().cpu().double())
        place = csr.place if csr.first == 0 else csr.edge
        return InEdges(csr.rowptr, csr.col, place, view.edge_sharding.position, graph.edge_sharding.size, values)

    @staticmethod
    def of_edge_index(edge_index: Tensor, sizes: tuple[int, int], weight: Tensor | None) -> InEdges:
        """The in-edges of a plain graph, or of a relation; ``sizes``: numbers of sources and targets."""
        source, target = edge_index.cpu().long()
        csr = CSR.from_edges(target, source, None, sizes[1], sizes[0])
        if weight is not None:
            weight = csr.values(weight.detach().cpu().double())
        return InEdges(csr.rowptr, csr.col, csr.place, None, edge_index.shape[1], weight)

    def renumbered(self, column: Tensor) -> InEdges:
        """The same edges with ``column[c]`` in place of each source's number ``c``, int32."""
        if torch.equal(column, host.arange(column.numel(), dtype=torch.int32)):
            return self
        return replace(self, col=column.index_select(0, self.col))

    def draw(
        self, row: Tensor, tree: Tensor | None, key: Tensor, count: int, seed: int, replace: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw ``count`` in-edges of each row (-1: all): how many of each, ``[k]``; columns of sources; edge storages.

        ``row``, the ``key`` of each row's draw, and ``tree``, to which it belongs (``None``: all to one), are int64
        ``[k]``. The columns are int32 ``[m]``, the edges' places in storage int64 ``[m]``, row by row.
        """
        if self.weight is not None and count >= 0:
            return self._draw_weighted(self.weight, row, tree, count, seed, replace)
        starts, column, place = ops.sample_rows(
            self.rowptr, self.col, self.place, row, key, count, seed, replace and count >= 0
        )
        return starts.diff(), column, place

    def _draw_weighted(
        self, weight: Tensor, row: Tensor, tree: Tensor | None, count: int, seed: int, replace: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw by weights, one after another: the edges with the smallest keyed exponential times of rate ``weight``.

        Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006. O(degree) time for a row, with
        replacement for each draw. Edges of weight zero are never drawn.
        """
        starts, column, entry = ops.sample_rows(self.rowptr, self.col, None, row, row, -1, seed)
        of_row = torch.repeat_interleave(host.arange(row.numel()), starts.diff())
        some = host.flatnonzero(weight[entry] > 0)
        of_row, column, entry = of_row[some], column[some], entry[some]
        place = entry if self.place is None else self.place[entry].long()
        key = self.id_of(place)
        if tree is not None:
            key = key + tree[of_row] * self.num_edges
        first = torch.searchsorted(of_row, host.arange(row.numel()))
        within = host.arange(of_row.numel()) - first[of_row]  # the position in its row once rows are sorted
        taken = []
        for draw in range(count if replace else min(count, 1)):
            uniform = ops.keyed_uniform(key, 1, seed, draw, dtype=torch.float64).view(-1)
            time = -torch.log1p(-uniform) / weight[entry]
            order = torch.from_numpy(np.lexsort((time.numpy(), of_row.numpy())))
            taken.append(order[within < (1 if replace else count)])
        drawn = torch.cat([of_row[:0], *taken]).sort().values
        return torch.bincount(of_row[drawn], minlength=row.numel()), column[drawn], place[drawn]

    def id_of(self, place: Tensor) -> Tensor:
        """The global ids of the edges at some places of the edge storage."""
        return place if self.position is None else self.position.index_select(0, place)
