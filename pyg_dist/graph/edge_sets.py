"""Edge sets beside a graph's own: plain edges of a script, reversed or drawn ones, and those between sampled nodes."""

from __future__ import annotations

from functools import cached_property, singledispatch

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.protocol import DistributedGraph, EdgeView, NodeSharding
from pyg_dist.graph.sample import Subset
from pyg_dist.partition.inputs import check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedNodes
from pyg_dist.tensor.sharding import RowSharding, lasting


class ListedEdges(RowSharding):
    """Edges by their places in a script's list: values that lie elsewhere pair with them by position."""

    is_indexed = True


@lasting
def graph_over(
    edge_index: Tensor, sources: NodeSharding, targets: NodeSharding, loop_rule: LoopRule
) -> DistributedGraph:
    """The graph with these edges over nodes of a ``DistributedData``, whose layout it has (collective).

    ``edge_index``: int64 ``[2, E]``, equal on every rank.
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


@lasting
def pick(nodes: NodeSharding, node_id: Tensor, device: torch.device) -> PickedNodes:
    """Ids that select rows of some nodes, as a list does, int64 ``[b]``, distinct (not collective).

    ``node_id``: the same on every rank.
    """
    picked = sampled_nodes(nodes, Subset(node_id.cpu()), device)
    picked._sharding.is_indexed = True
    return picked


@singledispatch
def sampled_nodes(nodes: NodeSharding, subset: Subset, device: torch.device) -> PickedNodes:
    """The ids of a subset of nodes; each layout registers its own here."""
    raise NotImplementedError(type(nodes))  # a layout that registers nothing above


class SampledEdges(RowSharding):
    """The edges between sampled nodes. They are counted when their number is first read (collective), and not before.

    ``place`` and ``parent_key`` are places and keys of the local ones among the ``parent``'s. Where ``subset`` names
    its edges, ``which`` are the local ones' numbers among these; where it has edges twice, its keys count, not the
    parent's. All int64 ``[e]``.
    """

    counts_selections = False

    def __init__(
        self,
        parent: RowSharding,
        place: Tensor,
        parent_key: Tensor,
        ranks: Group,
        subset: Subset,
        which: Tensor | None = None,
    ) -> None:
        group, kept = 0 if subset.group is None else subset.group.index, subset.kept
        key, num_keys = parent_key, parent.num_rng_keys
        if kept is not None and which is not None and kept.repeats:
            key, num_keys = kept.key.index_select(0, which), kept.num_keys
        super().__init__(ranks, "edge", None, key + group * num_keys if group else key)
        self.parent, self.place, self.parent_key = parent, place, parent_key
        self._which, self._subset, self._num_keys = which, subset, num_keys * (group + 1)

    def __repr__(self) -> str:
        return f"{self.num_local} sampled edges of this rank"

    @property
    def num_rng_keys(self) -> int:
        return self._num_keys

    @cached_property
    @lasting
    def position(self) -> Tensor:
        """Where each edge stands among those of all ranks, which keep the graph's order (collective)."""
        kept = self._subset.kept
        if kept is None or self._which is None:
            mine, num_keys = self.parent.position[self.place], self.parent.size
        else:
            mine, num_keys = kept.key[self._which], kept.num_keys
        if self._subset.group is not None:
            mine = mine + self._subset.group.index * num_keys
        return torch.searchsorted(self.group.gather_rows(mine, self.counts).sort().values, mine)


class EdgesAndLoops(RowSharding):
    """Edges, and behind them a self loop for each node: the places and numbers that PyG gives them."""

    def __init__(self, edges: RowSharding, graph: DistributedGraph | EdgeView) -> None:
        loops = graph.node_sharding
        key = torch.cat([edges.rng_key, graph.edge_sharding.num_rng_keys + loops.rng_key])
        super().__init__(edges.group, "edge", None, key)
        self._edges, self._loops = edges, loops
        self.counts_selections = edges.counts_selections

    def __repr__(self) -> str:
        return f"{self._edges} and {self._loops.size} self loops"

    @cached_property
    def size(self) -> int:
        """Number of edges and loops over all ranks (collective at the first use, where the edges' is)."""
        return self._edges.size + self._loops.size

    @cached_property
    @lasting
    def position(self) -> Tensor:
        return torch.cat([self._edges.position, self._edges.size + self._loops.position])


def refuse_other_weights() -> UnsupportedError:
    """The error of GCN's norm on a batch, with weights of which the rest of the graph is not known."""
    return UnsupportedError(
        "Expected edge weights of a batch to be an attribute of its graph, whose degrees GCN's norm needs (got other "
        "ones): put them into data before the loader is made"
    )


def refuse_learning_weights() -> UnsupportedError:
    """The error of GCN's norm on a batch, with weights that learn."""
    return UnsupportedError(
        "Expected constant edge weights in GCN's norm on a batch (got weights that learn): the degrees would need all "
        "of them; train on the whole graph, or normalize=False"
    )
