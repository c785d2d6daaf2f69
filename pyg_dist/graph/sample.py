"""A sampler's draws: nodes of a graph, the same on every rank of a data group, and edges between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.backend import host


@dataclass(frozen=True, eq=False)
class PairProbability:
    r"""The probability that a node is in the sample, given that another one is.

    Of B nodes out of N, drawn without replacement, :math:`p = (B - 1) / (N - 1)` for every pair (ScaleGNN, eq. 23).
    Where nodes of two kinds are drawn by themselves, :math:`B_a` of :math:`N_a`, it is
    :math:`(B_a - 1) / (N_a - 1)` within a kind and :math:`B_b / N_b` between them.
    """

    table: Tensor  # float64 ``[2, 2]``, by the kinds of the given node and of the other one
    kind: Tensor | None = None  # bool ``[N]``, the kind of each node; ``None``: all are of the first

    @staticmethod
    def uniform(batch_size: int, num_nodes: int) -> PairProbability:
        """One kind."""
        p = _within(batch_size, num_nodes)
        return PairProbability(host.full((2, 2), p, dtype=torch.float64))

    @staticmethod
    def of_kinds(batch_sizes: tuple[int, int], sizes: tuple[int, int], kind: Tensor) -> PairProbability:
        """Two kinds: how many are drawn of each, and how many there are."""
        within = [_within(b, n) for b, n in zip(batch_sizes, sizes, strict=True)]
        alone = [b / n if n else 1.0 for b, n in zip(batch_sizes, sizes, strict=True)]
        table = host.tensor([[within[0], alone[1]], [alone[0], within[1]]], dtype=torch.float64)
        return PairProbability(table, kind)

    @property
    def uniform_p(self) -> float | None:
        """The probability of every pair; ``None``: there are two kinds of nodes."""
        return float(self.table[0, 0]) if self.kind is None else None

    def factor(self, source: Tensor, target: Tensor, dtype: torch.dtype, node_id: Tensor | None = None) -> Tensor:
        """One over the probability of each edge's source, given its target; one for self loops, which are not drawn.

        ``source`` and ``target`` are numbers of nodes, whose global ids are in ``node_id``; ``None``: they are global
        ids.

        Shapes: source, target int64 ``[k]``; output ``[k]``.
        """
        if self.kind is None:
            return host.full(source.shape, 1 / float(self.table[0, 0]), dtype=dtype).masked_fill_(source == target, 1)
        if node_id is not None:
            source, target = node_id[source], node_id[target]
        factor = self.table.reciprocal()[self.kind[target].long(), self.kind[source].long()]
        return factor.masked_fill_(source == target, 1).to(dtype)


def _within(batch_size: int, num_nodes: int) -> float:
    return (batch_size - 1) / (num_nodes - 1) if num_nodes > 1 else 1.0


@dataclass(frozen=True)
class DataGroup:
    """Where a group's sample stands in the disjoint union of the samples of several data groups."""

    index: int  # the number of the group
    first: int  # nodes of the groups before it
    size: int  # nodes of all groups


class LeavingEdges(NamedTuple):
    """Edges that begin on a rank and end on others, by these: numbers of the ends, and the ranks, int64 ``[l]``."""

    source: Tensor
    target: Tensor
    receiver: Tensor


@dataclass(frozen=True, eq=False)
class CrossingEdges:
    """Which edges of a batch end on a rank, and begin there or elsewhere."""

    inside: Tensor  # which of the edges that end here begin here, int64 ``[i]``
    arriving: Tensor  # which of them begin on other ranks, by rank, int64 ``[k]``
    sender: Tensor  # the ranks of these, ascending, int64 ``[k]``
    # sends each rank its rows of some :class:`~pyg_dist.backend.comm.ids.IdList`; those that arrive, and how many of
    # each rank (collective)
    send: Callable[..., list[tuple[Tensor, list[int]]]]
    # where those between machines go in two levels, all ranks of a machine know them:
    leaving: LeavingEdges | None = None  # of the rank, that end elsewhere
    between_machines: Tensor | None = None  # source, target and their ranks, int64 ``[c, 4]``


@dataclass(frozen=True, eq=False)
class KeptEdges:
    """The edges of a batch that has not all between its nodes, as far as a rank has to do with them."""

    place: Tensor  # where the rank's edge view stores each of the edges that end here, int64 ``[m]``
    named: Callable[[], tuple[Tensor, Tensor]]  # makes edge_id and key, which most layouts do not need of a batch
    source: Tensor  # numbers of their ends in the batch, int64 ``[m]``
    target: Tensor
    num_keys: int  # an upper bound of the keys, exclusive
    repeats: bool = False  # whether an edge may be there several times: keys stand for them then
    crossing: CrossingEdges | None = None  # ``None``: ranks are not told apart, as where there is one

    @cached_property
    def _names(self) -> tuple[Tensor, Tensor]:
        return self.named()

    @property
    def edge_id(self) -> Tensor:
        """The place of each in the graph's order, int64 ``[m]``."""
        return self._names[0]

    @property
    def key(self) -> Tensor:
        """The key of each edge: distinct, and in the order of the batch's edges, int64 ``[m]``."""
        return self._names[1]

    def edge_index(self, order: Tensor) -> Tensor:
        """The edges in some order, int64 ``[2, m]``."""
        return torch.stack([self.source[order], self.target[order]])

    @staticmethod
    def between(node_id: Tensor, num_nodes: int, ends: tuple[Tensor, Tensor], edge_id: Tensor, num_edges: int) -> (
        KeptEdges
    ):  # fmt: skip
        """The edges with both ends in a list, of those with these ``ends``; ends are places in the list, on the host.

        Args:
            node_id: distinct ids of nodes, in any order, int64 ``[b]``.
            num_nodes: of the graph.
            ends: ids of sources and targets, int64 ``[e]`` each.
            edge_id: the place of each in the graph's order.
            num_edges: of the graph.
        """
        number = host.full((num_nodes,), -1, dtype=torch.int64)
        number[node_id] = host.arange(node_id.numel())
        source, target = (number.index_select(0, end) for end in ends)
        place = host.flatnonzero((source >= 0) & (target >= 0))
        place = place[edge_id[place].argsort()]
        key = edge_id[place]
        return KeptEdges(place, lambda: (key, key), source[place], target[place], num_edges)


@dataclass(frozen=True, eq=False)
class Subset:
    """A mini-batch as a sampler draws it for a rank.

    Attributes:
        node_id: global ids of nodes in the batch's order, int64 ``[b]``. Without ``kept``: all of the data group's,
            ascending and distinct. With it: at least those that the rank has.
        kept: which edges; ``None``: all between the nodes.
        scale: by what the weights of edges are divided so that sums are unbiased; ``None``: they are not.
        group: the place in the union of all groups' subsets; ``None``: there is one group.
        number: of each node in the batch, ascending, int64 ``[b]``; ``None``: its place in ``node_id``.
        num_nodes: of the batch; ``None``: as many as there are in ``node_id``.
        attributes: plain attributes of the batch, by name.
        node_attributes: attributes with a value for each of ``node_id``, ``[b, ...]``, by name.
        repeats: whether a node may be there several times: what stands for it is its place.
    """

    node_id: Tensor
    kept: KeptEdges | None = None
    scale: PairProbability | None = None
    group: DataGroup | None = None
    number: Tensor | None = None
    num_nodes: int | None = None
    attributes: dict[str, object] = field(default_factory=dict)
    node_attributes: Mapping[str, Tensor] = field(default_factory=dict)
    repeats: bool = False

    @property
    def pairs(self) -> PairProbability:
        """``scale``, where it is known to be given."""
        assert self.scale is not None
        return self.scale

    @property
    def size(self) -> int:
        """Nodes of the batch."""
        if self.num_nodes is not None:
            return self.num_nodes
        return self.node_id.numel() if self.group is None else self.group.size

    @property
    def first(self) -> int:
        """The offset, in the union of all groups, of places in ``node_id`` that have no number."""
        return 0 if self.group is None or self.number is not None else self.group.first


@dataclass(frozen=True, eq=False)
class TypedSubset:
    """A mini-batch of a graph with types, as a sampler draws it for a rank."""

    nodes: Mapping[str, Subset]  # of each type, without edges
    edges: Mapping[EdgeType, KeptEdges]  # of each relation
    # plain attributes of each relation, by name; of that of the seeds, too, which may be none of the graph's
    edge_attributes: Mapping[EdgeType, Mapping[str, object]]
