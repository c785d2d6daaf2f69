"""Further edge sets of a script between distributed nodes: plain edges, reversed ones, sampled ones.

A script has such edges as a plain ``[2, E]`` tensor, the same on every rank. The first conv that gets them lays them
out over the nodes of its features.
"""

from __future__ import annotations

from torch import Tensor

from pyg_dist.errors import UnsupportedError
from pyg_dist.layout.graph import DistributedGraph, NodeSharding
from pyg_dist.layout.halo.graph import HaloGraph
from pyg_dist.layout.halo.sharding import HaloNodes
from pyg_dist.partition.edge_list import check_ends
from pyg_dist.plan import halo_share
from pyg_dist.plan.halo.plan import is_dense
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
    if not isinstance(nodes, HaloNodes):
        from pyg_dist.layout.grid.graph import GridGraph  # loaded where the nodes lie on a grid
        from pyg_dist.layout.grid.sharding import GridNodes

        assert isinstance(nodes, GridNodes)
        return GridGraph.of(nodes.grid, edge_index, loop_rule, ListedEdges)
    group = nodes.group
    share = halo_share(edge_index, nodes.parts(), group.rank, group.size, nodes.exchange, nodes.global_id)
    messages = sum(group.gather_counts(sum(count > 0 for count in share.sum_transfer.send_counts)))
    rows = ListedEdges(group, "edge", share.num_edges, share.edge_id)
    return HaloGraph(share, nodes, loop_rule, is_dense(messages, group.size), rows)
