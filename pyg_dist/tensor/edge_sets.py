"""Edges of a script's own between nodes that are distributed already: further edge sets, reversed ones, drawn ones.

A script has such edges as a plain ``[2, E]`` tensor, the same on every rank. The first conv that gets them lays them
out over the nodes of its features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dist.errors import DataError
from pyg_dist.plan import halo_share
from pyg_dist.plan.plan import is_dense
from pyg_dist.tensor.grid_graph import GridGraph
from pyg_dist.tensor.halo_graph import HaloGraph
from pyg_dist.tensor.halo_nodes import HaloNodes
from pyg_dist.tensor.rows import Rows, lasting
from pyg_dist.tensor.self_loops import LoopRule
from pyg_dist.tensor.tile import GridNodes

Graph = HaloGraph | GridGraph
"""The runtime form of a graph, in one layout or the other."""


class ListedEdges(Rows):
    """Edges by their places in a script's list: values that lie elsewhere pair with them by position."""

    is_list = True


@lasting
def graph_over(edge_index: Tensor, nodes: HaloNodes | GridNodes, loop_rule: LoopRule) -> Graph:
    """The graph with these edges over nodes of a ``DistributedData``, whose layout it has (collective).

    Args:
        edge_index: int64 ``[2, E]``, equal on every rank.
        nodes: the nodes.
        loop_rule: see :data:`~pyg_dist.tensor.self_loops.LoopRule`.

    Raises:
        DataError: They are no edges between these nodes.
    """
    check_ends(edge_index, nodes.size, "edge_index")
    if isinstance(nodes, GridNodes):
        return GridGraph.of(nodes.grid, edge_index, loop_rule, ListedEdges)
    axis = nodes.axis
    share = halo_share(edge_index, nodes.parts(), axis.rank, axis.size, nodes.exchange, nodes.key.cpu())
    messages = sum(axis.gather_counts(sum(count > 0 for count in share.sums.send_counts)))
    rows = ListedEdges(axis, "edge", share.num_edges, share.edge_id.to(nodes.key.device))
    return HaloGraph(share, nodes, loop_rule, is_dense(messages, axis.size), rows)


def as_edges(edge_index: Any) -> Tensor:
    """A plain int64 tensor ``[2, E]`` on the CPU.

    Raises:
        DataError: It has another shape, or no integers.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        shape = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise DataError(f"Expected 'edge_index' of shape [2, num_edges] (got {shape}): transpose or stack it")
    if edge_index.dtype.is_floating_point or edge_index.dtype == torch.bool:
        raise DataError(f"Expected 'edge_index' to hold integer node ids (got {edge_index.dtype}): use .long()")
    return edge_index.detach().to("cpu", torch.int64)


def check_ends(edge_index: Tensor, num_nodes: int, name: str) -> None:
    """Check that edges lie between nodes that exist.

    Raises:
        DataError: They do not.
    """
    if edge_index.numel() == 0:
        return
    low, high = edge_index.aminmax()
    if low < 0:
        raise DataError(f"Expected '{name}' to hold node ids from 0 (got {int(low)}): drop edges to missing nodes")
    if high >= num_nodes:
        raise DataError(
            f"Expected '{name}' to hold node ids below num_nodes={num_nodes} (got {int(high)}): one row of x per node"
        )
