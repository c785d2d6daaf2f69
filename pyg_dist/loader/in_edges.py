"""The in-edges of a rank's nodes, and the draw of some of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.tensor import EdgeTensor


@dataclass(frozen=True, eq=False)
class InEdges:
    """The in-edges of a rank's nodes, those of one node in the graph's order.

    Attributes:
        node_id: the nodes, ascending, int64 ``[n]``; ``None``: all nodes of the graph, by row.
        row: the row of each, int64 ``[n]``.
        rowptr: int64 ``[n + 1]``.
        col: which of ``source_id`` each edge's source is, int32 ``[e]``.
        place: where each edge is stored, int32 or int64 ``[e]``; ``None``: in the order of the entries.
        position: of each stored edge in the graph's order, int64; ``None``: as they are stored.
        source_id: global ids, int64 ``[s]``; ``None``: ``col`` has them.
        owner: the rank of each of ``source_id``, int64 ``[s]``; ``None``: this one.
        num_edges: of the graph.
        weight: of each edge in draws, not negative, float64 ``[e]``; ``None``: draws are uniform.
    """

    node_id: Tensor | None
    row: Tensor
    rowptr: Tensor
    col: Tensor
    place: Tensor | None
    position: Tensor | None
    source_id: Tensor | None
    owner: Tensor | None
    num_edges: int
    weight: Tensor | None = None

    @staticmethod
    def of(graph: DistributedGraph, weight: EdgeTensor | None) -> InEdges:
        """Those of a graph over ranks (collective)."""
        view = graph.edge_view
        csr, ids = view.csr.on_host, view.neighbour_id.cpu()
        node_id, row = view.targets.global_id.sort()
        is_whole = view.group.size == 1 and torch.equal(row, node_id)  # all nodes, by row
        graph.edge_sharding.ordered_position  # noqa: B018  of which batches take theirs, in a thread
        values = None
        if weight is not None:
            moved = view.edge_sharding.from_sharding(weight.to_local(), weight._sharding)
            assert moved is not None
            values = csr.values(moved.detach().cpu().double())
        return InEdges(
            None if is_whole else node_id,
            row,
            csr.rowptr,
            csr.col,
            csr.place if csr.first == 0 else csr.edge,
            view.edge_sharding.position,
            None if is_whole else ids,
            None if is_whole else view.neighbour_rank,
            graph.edge_sharding.size,
            values,
        )

    @staticmethod
    def of_edge_index(edge_index: Tensor, sizes: tuple[int, int], weight: Tensor | None) -> InEdges:
        """Those of a plain graph, or of a relation, with so many sources and targets."""
        source, target = edge_index.cpu().long()
        csr = CSR.from_edges(target, source, None, sizes[1], sizes[0])
        if weight is not None:
            weight = csr.values(weight.detach().cpu().double())
        return InEdges(
            None, torch.arange(0), csr.rowptr, csr.col, csr.place, None, None, None, edge_index.shape[1], weight
        )  # fmt: skip

    def find(self, node: Tensor) -> Tensor:
        """The row of each node, or -1 where another rank has it."""
        if self.node_id is None:
            return node
        at = ops.find_sorted(self.node_id, node)
        return self.row[at].masked_fill_(at < 0, -1) if self.row.numel() else at

    def draw(
        self, row: Tensor, tree: Tensor | None, key: Tensor, count: int, seed: int, replace: bool
    ) -> tuple[Tensor, Tensor]:
        """Some in-edges of rows: how many of each, int64 ``[k]``, and their entries, row by row, int64 ``[m]``.

        Args:
            row: int64 ``[k]``.
            tree: which tree each row belongs to, int64 ``[k]``; ``None``: all to one.
            key: of each row's draw, int64 ``[k]``.
            count: in-edges of a row; -1: all.
            seed: of the draws.
            replace: whether an edge may come several times.
        """
        if self.weight is not None and count >= 0:
            return self._draw_weighted(row, tree, count, seed, replace)
        starts, entry = ops.sample_rows(self.rowptr, row, key, count, seed, replace and count >= 0)
        return starts.diff(), entry

    def _draw_weighted(
        self, row: Tensor, tree: Tensor | None, count: int, seed: int, replace: bool
    ) -> tuple[Tensor, Tensor]:
        """By weights, one after another: those whose keyed exponential times of rate ``weight`` are the first.

        Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006. O(degree) time for a row; with
        replacement, for each draw. Of weight zero none is drawn.
        """
        assert self.weight is not None
        starts, entry = ops.sample_rows(self.rowptr, row, row, -1, seed, False)
        of_row = torch.repeat_interleave(torch.arange(row.numel()), starts.diff())
        weight = self.weight[entry]
        some = (weight > 0).nonzero().view(-1)
        of_row, entry, weight = of_row[some], entry[some], weight[some]
        key = self.id_of(self.place_of(entry))
        if tree is not None:
            key = key + tree[of_row] * self.num_edges
        first = torch.searchsorted(of_row, torch.arange(row.numel()))
        within = torch.arange(of_row.numel()) - first[of_row]  # what stands there once a row's are sorted
        taken = []
        for draw in range(count if replace else min(count, 1)):
            uniform = ops.keyed_uniform(key, 1, seed, draw, dtype=torch.float64).view(-1)
            time = -torch.log1p(-uniform) / weight
            order = torch.from_numpy(np.lexsort((time.numpy(), of_row.numpy())))
            taken.append(order[within < (1 if replace else count)])
        drawn = torch.cat([of_row[:0], *taken]).sort().values
        return torch.bincount(of_row[drawn], minlength=row.numel()), entry[drawn]

    def place_of(self, entry: Tensor) -> Tensor:
        """Where each entry's edge is stored."""
        return entry if self.place is None else self.place.index_select(0, entry).long()

    def id_of(self, place: Tensor) -> Tensor:
        """The place in the graph's order of edges that are stored at some places."""
        return place if self.position is None else self.position.index_select(0, place)

    def source_of(self, entry: Tensor) -> Tensor:
        """The source of each entry's edge."""
        source = self.col.index_select(0, entry).long()
        return source if self.source_id is None else self.source_id.index_select(0, source)

    def owner_of(self, entry: Tensor) -> Tensor:
        """The rank of each entry's source."""
        return torch.zeros_like(entry) if self.owner is None else self.owner[self.col[entry].long()]
