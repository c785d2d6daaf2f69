"""A block of a rank's edges, with all in-edges of their targets, as the code of a conv sees it.

A function of messages gives for a block what it gives for these edges among all: rows keep their keys, and sizes are
those of the whole graph. A function that needs more than one edge, or one target's edges, at a time needs the group of
ranks that share the rows, which raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.sparse.csr import Block
from pyg_dist.errors import MixedRowsError
from pyg_dist.graph.edges import Edges
from pyg_dist.tensor.row_tensor import EdgeTensor
from pyg_dist.tensor.sharding import RowSharding


def _refuse(name: str) -> NoReturn:
    raise MixedRowsError(
        f"Messages by blocks were expected to look at their own edges (got {name}): set PYG_DIST_MESSAGE_MIB=inf"
    )


class _RowsApart(RowSharding):
    """Some rows of a rank, which stand for all."""

    def __init__(self, parent: RowSharding, rng_key: Tensor) -> None:
        super().__init__(parent.group, parent.kind, parent.size, rng_key)
        del self.group
        self.is_on_one_rank = False

    def __getattr__(self, name: str) -> NoReturn:
        if name != "group":
            raise AttributeError(name)
        _refuse("a question to all ranks")

    def copy_to_ranks(self, tensor: Tensor) -> Tensor:
        """Itself: operands of a block are copied to the ranks before the blocks."""
        return tensor

    def note(self, tensor: Tensor) -> None:
        """Nothing: as :meth:`copy_to_ranks`."""


class _BlockRows(_RowsApart):
    """The rows at some local places, int64 ``[k]``."""

    def __init__(self, parent: RowSharding, local_index: Tensor) -> None:
        key = on_device(parent.rng_key, local_index.device)
        super().__init__(parent, key.index_select(0, local_index))
        self._parent, self._local_index = parent, local_index

    @property
    def global_id(self) -> Tensor:
        return self._picked(self._parent.global_id)

    @property
    def position(self) -> Tensor:
        return self._picked(self._parent.position)

    def _picked(self, of_all: Tensor) -> Tensor:
        return on_device(of_all, self._local_index.device).index_select(0, self._local_index)


class _OwnDraws:
    """Stands for a group: code that draws numbers of its own would draw others for each block."""

    rank = None

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("a question to all ranks")


class _BlockGraph:
    """The graph of a block's edges, as far as they use it."""

    group = _OwnDraws()

    def __init__(self, targets: RowSharding, neighbour_id: Callable[[], Tensor], device: torch.device) -> None:
        self.targets, self._neighbour_id, self.device = targets, neighbour_id, device

    @property
    def num_local(self) -> int:
        return self.targets.num_local

    @property
    def neighbour_id(self) -> Tensor:
        return self._neighbour_id()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


class BlockEdges(Edges):
    """The edges of a block.

    Attributes:
        pieces: rows of nodes at these edges, by what stands for the nodes' tensor and by their end.
    """

    pieces: dict[tuple[int, int], EdgeTensor]

    @staticmethod
    def of_block(edges: Edges, block: Block, neighbour_id: Callable[[], Tensor]) -> BlockEdges:
        """The edges of ``block``.

        ``neighbour_id`` gives the ids of the graph's neighbours, for all blocks: to make them takes time by nodes.
        """
        graph = edges.graph
        targets = torch.arange(block.low, block.high, device=block.target.device)
        nodes = _BlockRows(graph.targets, targets)
        apart = _BlockGraph(nodes, neighbour_id, graph.device)
        return BlockEdges._of(apart, _BlockRows(edges.rows, block.place), block.source, block.target)

    @staticmethod
    def made_up(edges: Edges, num_edges: int, num_targets: int) -> BlockEdges:
        """Edges that stand for any, the same on all ranks, also where there are none."""
        number = torch.arange(num_edges, device=edges.graph.device)
        nodes = _RowsApart(edges.graph.targets, number[:num_targets])
        apart, none = _BlockGraph(nodes, lambda: number, number.device), torch.zeros_like(number)
        return BlockEdges._of(apart, _RowsApart(edges.rows, number), none, number % num_targets)

    @staticmethod
    def _of(graph: _BlockGraph, rows: RowSharding, source: Tensor, target: Tensor) -> BlockEdges:
        made = BlockEdges.of(graph, rows, source, target)  # type: ignore[arg-type]  # as far as blocks need a graph
        made.pieces = {}
        return made

    def lift(self, nodes: Tensor, end: int) -> EdgeTensor:
        """Each edge's row of what stands for ``nodes``."""
        piece = self.pieces.get((id(nodes), end))
        return _refuse("rows of other nodes") if piece is None else piece
