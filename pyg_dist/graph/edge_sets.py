"""Further edge sets of a script between distributed nodes: plain edges, reversed ones, drawn ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.partition.inputs import check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.sharding import RowSharding, lasting


class ListedEdges(RowSharding):
    """Edges by their places in a script's list: values that lie elsewhere pair with them by position."""

    is_indexed = True


class JoinedNodes(NodeSharding):
    """Nodes of several sets one after another, a set as often as it is named: where the edges of relations begin.

    Args:
        pieces: the sets, over the same ranks.
    """

    def __init__(self, pieces: Sequence[NodeSharding]) -> None:
        self.first_of = [0, *accumulate(piece.size for piece in pieces)]
        ids = [piece.global_id + first for piece, first in zip(pieces, self.first_of, strict=False)]
        super().__init__(pieces[0].group, self.first_of[-1], torch.cat(ids))
        self._pieces = pieces

    def parts(self) -> Tensor:
        """See :class:`~pyg_dist.graph.protocol.NodeSharding` (collective)."""
        return torch.cat([piece.parts() for piece in self._pieces])


@lasting
def graph_over(
    edge_index: Tensor, sources: NodeSharding, targets: NodeSharding, loop_rule: LoopRule
) -> DistributedGraph:
    """The graph with these edges over nodes of a ``DistributedData``, whose layout it has (collective).

    Args:
        edge_index: int64 ``[2, E]``, equal on every rank.
        sources: the nodes where they begin.
        targets: those where they end.
        loop_rule: see :data:`~pyg_dist.store.manifest.LoopRule`.

    Raises:
        DataError: They are no edges between these nodes.
        UnsupportedError: The nodes are those of several data groups' samples, or two sets of a layout that has one.
    """
    if sources.is_union or targets.is_union:
        raise UnsupportedError(
            "Expected the edges of a batch of several data groups (got edges of the script's own): put them into the "
            "graph before the batch is taken"
        )
    if sources is targets:
        check_ends(edge_index, targets.size, "edge_index")
    else:
        for end, nodes in enumerate((sources, targets)):
            check_ends(edge_index[end], nodes.size, f"edge_index[{end}]")
    return in_layout_of(targets, edge_index, loop_rule, sources)


@singledispatch
def in_layout_of(
    targets: NodeSharding, edge_index: Tensor, loop_rule: LoopRule, sources: NodeSharding
) -> DistributedGraph:
    """:func:`graph_over` in the layout of the nodes, which registers it here."""
    raise NotImplementedError(type(targets))  # a layout that registers nothing above
