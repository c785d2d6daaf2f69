"""Further edge sets of a script between distributed nodes: plain edges, reversed ones, drawn ones."""

from __future__ import annotations

from functools import singledispatch

from torch import Tensor

from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.partition.inputs import check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.sharding import RowSharding, lasting


class ListedEdges(RowSharding):
    """Edges by their places in a script's list: values that lie elsewhere pair with them by position."""

    is_indexed = True


@lasting
def graph_over(edge_index: Tensor, nodes: NodeSharding, loop_rule: LoopRule) -> DistributedGraph:
    """The graph with these edges over nodes of a ``DistributedData``, whose layout it has (collective).

    Args:
        edge_index: int64 ``[2, E]``, equal on every rank.
        nodes: the nodes.
        loop_rule: see :data:`~pyg_dist.store.manifest.LoopRule`.

    Raises:
        DataError: They are no edges between these nodes.
        UnsupportedError: The nodes are those of several data groups' samples.
    """
    if nodes.is_union:
        raise UnsupportedError(
            "Expected the edges of a batch of several data groups (got edges of the script's own): put them into the "
            "graph before the batch is taken"
        )
    check_ends(edge_index, nodes.size, "edge_index")
    return in_layout_of(nodes, edge_index, loop_rule)


@singledispatch
def in_layout_of(nodes: NodeSharding, edge_index: Tensor, loop_rule: LoopRule) -> DistributedGraph:
    """:func:`graph_over` in the layout of the nodes, which registers it here."""
    raise NotImplementedError(type(nodes))  # a layout that registers nothing above
