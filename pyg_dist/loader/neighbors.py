"""Neighbour sampling: some in-edges of each node, hop by hop, drawn by the owners of the nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.ids import IdList
from pyg_dist.errors import DataError
from pyg_dist.graph.sample import CrossingEdges, DataGroup, KeptEdges, Subset
from pyg_dist.loader.columns import Columns
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import KnownNodes, SamplingRanks
from pyg_dist.loader.seeds import Seeds, Start

SubgraphType = Literal["directional", "induced", "bidirectional"]


@dataclass(frozen=True, eq=False, kw_only=True)
class HopSampling(ABC):
    """A :class:`~pyg_dist.loader.sampler.Sampler` of nodes that are reached from seeds along drawn edges, by hop.

    Which in-edges of a node are kept is a function of the seed, the step, the hop, the data group and the node. The
    owner of a node draws them, and each hop sends the ids of the nodes that it reaches to their owners: of H hops H + 2
    messages between two ranks, and in two levels one more within a machine. A rank keeps its own nodes of the batch and
    the edges that begin or end at them, O(B/P) memory; to number its nodes it is told the ids of all.
    """

    ranks: SamplingRanks  # those that sample
    seeds: Seeds  # what batches begin with
    seed: int  # of the draws
    replace: bool = False  # whether an edge may be drawn several times

    @property
    def sends(self) -> bool:
        return self.ranks.everyone.group.size > 1

    @property
    def num_steps(self) -> int:
        return self.seeds.steps.num_steps

    @cached_property
    def options(self) -> dict[str, Any]:
        return {**self.seeds.options, "replace": self.replace, **self._options}

    @property
    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """What subsets follow from beside seeds and replacement."""

    @abstractmethod
    def sample(self, step: int) -> Any:
        """The subset of a step (:class:`~pyg_dist.loader.sampler.Sampler`)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NeighborSampling(HopSampling):
    """That of a graph with one type of nodes.

    Where the layout needs the whole subset on each rank, it is gathered at the end: O(B) memory.

    Nodes are numbered by hop, seeds first as they are given, then ascending; in each hop data group after data group.
    Edges are ordered by the hop that draws them, and in it as in the graph.
    In a disjoint batch a node is one for each tree, and stands by its *code* ``tree * N + node``; else by its id.
    """

    in_edges: InEdges  # of this rank's nodes
    num_nodes: int  # N
    num_neighbors: tuple[int, ...]  # in-edges of a node by hop; -1: all
    subgraph_type: SubgraphType = "directional"  # which edges a batch has
    disjoint: bool = False  # whether each seed has nodes of its own

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "num_nodes": self.num_nodes, "num_neighbors": list(self.num_neighbors),
            "subgraph_type": self.subgraph_type, "disjoint": self.disjoint,
            "is_weighted": self.in_edges.weight is not None,
        }  # fmt: skip

    @property
    def num_trees(self) -> int:
        """An upper bound of the trees of a step, all data groups together."""
        return self.seeds.max_seeds if self.disjoint else 1

    def sample(self, step: int) -> Subset:
        return _Batch(self, step).subset()


class Drawn(NamedTuple):
    """Edges to this rank's nodes, int64 ``[m]`` each.

    Attributes:
        source, target: places of their ends among the known nodes.
        stored: where each is in the graph's edge storage; those of one target together, in the graph's order.
    """

    source: Tensor
    target: Tensor
    stored: Tensor

    @staticmethod
    def joined(pieces: Iterable[Drawn]) -> Drawn:
        """One list after another."""
        return Drawn(*map(torch.cat, zip(*pieces, strict=True)))

    def some(self, which: Tensor) -> Drawn:
        """Those at some places."""
        return Drawn(*(at(x, which) for x in self))


class _Batch:
    """This rank's part of a step's batch, while it is drawn (collective)."""

    def __init__(self, sampling: NeighborSampling, step: int) -> None:
        self.sampling, self.step = sampling, step
        self.start: Start = sampling.seeds.at(step, sampling.disjoint)
        group, seeds = sampling.ranks.index, self.start.seeds
        first = sum(seed.numel() for seed in seeds[:group])
        code = seeds[group]
        number = torch.arange(first, first + code.numel())
        if sampling.disjoint:
            code = number * sampling.num_nodes + code
        here = sampling.in_edges.find(seeds[group]) >= 0
        self.columns = Columns(sampling.in_edges, sampling.num_nodes, sampling.disjoint)
        span = sampling.num_trees * sampling.num_nodes
        self.nodes = KnownNodes(sampling.ranks, span, code[here], number[here], columns=self.columns)

    def subset(self) -> Subset:
        """The batch, as far as this rank has to know it."""
        sampling, nodes, groups = self.sampling, self.nodes, self.sampling.ranks
        hops = []
        for hop, count in enumerate(sampling.num_neighbors):
            seed = ops.mixed_seed(sampling.seed, self.step, hop, 5, groups.index)
            hops.append(self._in_edges(nodes.hops[-1], count, seed, sampling.replace, True))
        drawn, edges = [hop.stored.numel() for hop in hops], Drawn.joined(hops)
        is_directional = sampling.subgraph_type == "directional"
        every = edges if is_directional else self._in_edges(torch.cat(nodes.hops), -1, 0, False, False)
        num_seeds = sum(seed.numel() for seed in self.start.seeds)
        (counts,), num_edges = nodes.assign_numbers([num_seeds], drawn)
        (crossing,) = nodes.tell(edges.source, edges.target, [len(edges.stored)], numbers=True)
        known: dict[str, Any] = {"num_sampled_nodes": counts}
        if is_directional:
            known["num_sampled_edges"] = num_edges
        else:  # all sources of those that were drawn are nodes of the batch
            every = every.some((at(nodes.number, every.source) >= 0).nonzero().view(-1))
            if sampling.subgraph_type == "bidirectional":
                every = self._both_ways(edges, crossing, every, sum(counts))
            (crossing,) = nodes.tell(every.source, every.target, [len(every.stored)])
        own = torch.cat(nodes.hops)
        code, number = nodes.common(own), at(nodes.number, own)
        kept = kept_edges(
            sampling.in_edges,
            every,
            self._ends(every),
            drawn if is_directional else [len(every.stored)],  # what is induced or goes both ways belongs to no hop
            sampling.num_neighbors if sampling.replace else None,
            crossing,
            nodes.common(every.target) // sampling.num_nodes if sampling.disjoint else None,
            sampling.num_trees,
        )
        if groups.gathers:
            (code, number), kept = self._gathered(code, number, kept)
        return Subset(
            code % sampling.num_nodes if sampling.disjoint else code,
            kept,
            group=DataGroup(groups.index, 0, sum(counts)) if groups.count > 1 else None,
            number=number,
            num_nodes=sum(counts),
            attributes={**self.start.attributes, **known},
            node_attributes={"batch": self.start.tree[code // sampling.num_nodes]} if sampling.disjoint else {},
        )

    def _in_edges(self, place: Tensor, count: int, seed: int, replace: bool, reaches: bool) -> Drawn:
        """Some in-edges of this rank's nodes; whether their sources belong to the batch thereby (collective)."""
        nodes, in_edges = self.nodes, self.sampling.in_edges
        tree, row = self.columns.split(at(nodes.code, place))
        degree, column, stored = in_edges.draw(row, tree, nodes.common(place), count, seed, replace)
        code = self.columns.codes(None if tree is None else tree.repeat_interleave(degree), column)
        owner_of = lambda first: in_edges.owner_of(at(column, first))  # noqa: E731
        source = nodes.reach(code, owner_of) if reaches else nodes.meet(code, owner_of)[0]
        return Drawn(source, place.repeat_interleave(degree, output_size=stored.numel()), stored)

    def _ends(self, edges: Drawn) -> tuple[Tensor, Tensor]:
        """The numbers of sources and targets in the batch."""
        if self.nodes.stand_by_numbers:
            return edges.source, edges.target
        return at(self.nodes.number, edges.source), at(self.nodes.number, edges.target)

    def _both_ways(self, drawn: Drawn, crossing: CrossingEdges | None, every: Drawn, num_nodes: int) -> Drawn:
        """The edges that were drawn, which ``crossing`` is of, and their opposites (collective).

        With replacement, all edges between the same nodes as one that was drawn.

        Raises:
            DataError: An opposite edge is missing, on every rank.
        """
        source, target = self._ends(drawn)
        wanted = target * num_nodes + source
        if crossing is not None:
            there = crossing.leaving
            wanted = torch.cat([there[:, 1] * num_nodes + there[:, 0], at(wanted, crossing.inside)])
        source_of_every, target_of_every = self._ends(every)
        pair = source_of_every * num_nodes + target_of_every
        if self.sampling.replace:
            is_drawn = _is_among(pair, source * num_nodes + target)
        else:  # a parallel of an edge that was drawn is not one
            is_drawn = _is_among(every.stored * num_nodes + target_of_every, drawn.stored * num_nodes + target)
        is_missing = not bool(_is_among(wanted, pair).all())
        if int(self.sampling.ranks.everyone.gather([int(is_missing)]).sum()):
            raise DataError(
                "Expected an undirected graph for subgraph_type='bidirectional' (got an edge without its opposite): "
                "use T.ToUndirected() before, or subgraph_type='directional'"
            )
        return every.some((is_drawn | _is_among(pair, wanted)).nonzero().view(-1))

    def _gathered(self, code: Tensor, number: Tensor, kept: KeptEdges) -> tuple[tuple[Tensor, Tensor], KeptEdges]:
        """Those of all ranks of the data group, edges by what stands for them (collective)."""
        mine = torch.stack([code, number], 1), torch.stack([kept.edge_id, kept.key, kept.source, kept.target], 1)
        lists = [IdList(rows, is_ascending=False) for rows in mine]
        (nodes, _), (table, _) = self.sampling.ranks.part.exchange(*lists, kind="whole batch")
        code, number = nodes[nodes[:, 1].argsort()].t().contiguous()
        edge_id, key, source, target = table[table[:, int(kept.repeats)].argsort()].t().contiguous()
        kept = KeptEdges(edge_id[:0], lambda: (edge_id, key), source, target, kept.num_keys, kept.repeats)
        return (code, number), kept


def at(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``, for which torch takes several times as long."""
    return values.index_select(0, index)


def kept_edges(
    in_edges: InEdges,
    edges: Drawn,
    ends: tuple[Tensor, Tensor],
    edges_of_hops: list[int],
    counts: tuple[int, ...] | None,
    crossing: CrossingEdges | None,
    tree: Tensor | None = None,
    num_trees: int = 1,
) -> KeptEdges:
    """This rank's edges of a batch, in the order of hop, place in the graph, tree and copy.

    ``ends``: their numbers in the batch; ``counts``: with replacement, the in-edges that are drawn of a node, by hop;
    ``tree``: of each edge, int64 ``[m]``, in a disjoint batch.
    """
    num_copies = 1 if counts is None else max(1, *counts)

    def named() -> tuple[Tensor, Tensor]:
        edge_id = in_edges.id_of(edges.stored)
        key = edge_id.clone()
        for hop, of_hop in enumerate(torch.split(key, edges_of_hops)):
            of_hop += hop * in_edges.num_edges
        if tree is not None:
            key = key * num_trees + tree
        if counts is not None:  # how many edges before each are the same one
            number, is_new = torch.arange(len(key)), torch.ones(len(key), dtype=torch.bool)
            is_new[1:] = (edges.stored.diff() != 0) | (edges.target.diff() != 0)
            key = key * num_copies + number - torch.where(is_new, number, 0).cummax(0).values
        return edge_id, key

    num_keys = len(edges_of_hops) * in_edges.num_edges * num_trees * num_copies
    repeats = tree is not None or counts is not None
    return KeptEdges(edges.stored, named, *ends, num_keys, repeats, crossing)


def _is_among(value: Tensor, some: Tensor) -> Tensor:
    """Whether each value is among some others, bool."""
    known = some[ops.distinct(some[:0], some)[0]]
    return ops.distinct(known, value)[1] < known.numel()
