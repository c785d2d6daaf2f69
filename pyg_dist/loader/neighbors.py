"""Neighbour sampling: some in-edges of each node, hop by hop, drawn by the owners of the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.errors import DataError
from pyg_dist.graph.sample import CrossingEdges, DataGroup, KeptEdges, Subset
from pyg_dist.loader.columns import Columns
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import KnownNodes, SamplingRanks
from pyg_dist.loader.seeds import Seeds, Start

SubgraphType = Literal["directional", "induced", "bidirectional"]


@dataclass(frozen=True, eq=False)
class NeighborSampling:
    """Batches of nodes that are reached from seeds along drawn edges.

    A :class:`~pyg_dist.loader.sampler.Sampler`. Which in-edges of a node are kept is a function of the seed, the step,
    the hop, the data group and the node. The owner of a node draws them, and each hop sends the ids of the nodes that
    it reaches to their owners. A rank knows its own nodes of the batch and the edges that begin or end at them: O(B/P)
    memory and messages. Where the layout needs the whole subset on each rank, it is gathered at the end: O(B).

    Nodes are numbered by hop, seeds first as they are given, then ascending; in each hop data group after data group.
    Edges are ordered by the hop that draws them, and in it as in the graph.
    In a disjoint batch a node is one for each tree, and stands by its *code* ``tree * N + node``; else by its id.
    """

    in_edges: InEdges  # of this rank's nodes
    num_nodes: int  # N
    ranks: SamplingRanks  # those that sample
    seeds: Seeds  # what batches begin with
    num_neighbors: tuple[int, ...]  # in-edges of a node by hop; -1: all
    seed: int  # of the draws
    subgraph_type: SubgraphType = "directional"  # which edges a batch has
    replace: bool = False  # whether an edge may be drawn several times
    disjoint: bool = False  # whether each seed has nodes of its own

    @property
    def sends(self) -> bool:
        return self.ranks.everyone.group.size > 1

    @property
    def num_steps(self) -> int:
        return self.seeds.steps.num_steps

    @cached_property
    def options(self) -> dict[str, Any]:
        return {
            **self.seeds.options, "num_nodes": self.num_nodes, "num_neighbors": list(self.num_neighbors),
            "subgraph_type": self.subgraph_type, "replace": self.replace, "disjoint": self.disjoint,
            "is_weighted": self.in_edges.weight is not None,
        }  # fmt: skip

    @property
    def num_trees(self) -> int:
        """An upper bound of the trees of a step, all data groups together."""
        return self.seeds.max_seeds if self.disjoint else 1

    @property
    def repeats(self) -> bool:
        """Whether nodes or edges of the graph may be in a batch several times."""
        return self.disjoint or self.replace

    def sample(self, step: int) -> Subset:
        return _Batch(self, step).subset()


class _Edges(NamedTuple):
    """Edges to this rank's nodes, int64 ``[m]`` each.

    Attributes:
        source, target: places of their ends among the known nodes.
        stored: where each is in the graph's edge storage; those of one target together, in the graph's order.
    """

    source: Tensor
    target: Tensor
    stored: Tensor

    def some(self, which: Tensor) -> _Edges:
        return _Edges(*(at(x, which) for x in self))


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
        drawn, edges = [hop.stored.numel() for hop in hops], _Edges(*map(torch.cat, zip(*hops, strict=True)))
        is_directional = sampling.subgraph_type == "directional"
        every = edges if is_directional else self._in_edges(torch.cat(nodes.hops), -1, 0, False, False)
        num_seeds = sum(seed.numel() for seed in self.start.seeds)
        (counts,), num_edges = nodes.assign_numbers([num_seeds], drawn)
        known: dict[str, Any] = {"num_sampled_nodes": counts}
        if is_directional:
            known["num_sampled_edges"] = num_edges
        else:  # all sources of those that were drawn are nodes of the batch
            every = every.some((at(nodes.number, every.source) >= 0).nonzero().view(-1))
        if sampling.subgraph_type == "bidirectional":
            every = self._both_ways(edges, every, sum(counts))
        own = torch.cat(nodes.hops)
        code, number = nodes.common(own), at(nodes.number, own)
        kept = self._kept(every, drawn if is_directional else [])
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

    def _in_edges(self, place: Tensor, count: int, seed: int, replace: bool, reaches: bool) -> _Edges:
        """Some in-edges of this rank's nodes; whether their sources belong to the batch thereby (collective)."""
        nodes, in_edges = self.nodes, self.sampling.in_edges
        tree, row = self.columns.split(at(nodes.code, place))
        degree, column, stored = in_edges.draw(row, tree, nodes.common(place), count, seed, replace)
        code = self.columns.codes(None if tree is None else tree.repeat_interleave(degree), column)
        owner_of = lambda first: in_edges.owner_of(at(column, first))  # noqa: E731
        source = nodes.reach(code, owner_of) if reaches else nodes.meet(code, owner_of)[0]
        return _Edges(source, place.repeat_interleave(degree, output_size=stored.numel()), stored)

    def _ends(self, edges: _Edges) -> tuple[Tensor, Tensor]:
        """The numbers of sources and targets in the batch."""
        if self.nodes.stand_by_numbers:
            return edges.source, edges.target
        return at(self.nodes.number, edges.source), at(self.nodes.number, edges.target)

    def _both_ways(self, drawn: _Edges, every: _Edges, num_nodes: int) -> _Edges:
        """The edges that were drawn and their opposites (collective).

        With replacement, all edges between the same nodes as one that was drawn.

        Raises:
            DataError: An opposite edge is missing, on every rank.
        """
        source, target = self._ends(drawn)
        owner = at(self.nodes.owner, drawn.source)
        leaving = crossing_edges(self.sampling.ranks.part, source, target, owner).leaving
        is_here = owner == self.sampling.ranks.part.group.rank
        wanted = torch.cat([leaving[:, 1] * num_nodes + leaving[:, 0], (target * num_nodes + source)[is_here]])
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

    def _kept(self, edges: _Edges, edges_of_hops: list[int]) -> KeptEdges:
        """The edges by hop (collective). What is induced or goes both ways belongs to no hop."""
        sampling, group = self.sampling, self.sampling.ranks.part.group
        source, target = self._ends(edges)
        place, edge_id = edges.stored, sampling.in_edges.id_of(edges.stored)
        tree = self.nodes.common(edges.target) // sampling.num_nodes if sampling.disjoint else None
        copies = max(1, *sampling.num_neighbors) if sampling.replace else 1
        key, num_keys = edge_keys(
            edge_id, sampling.in_edges.num_edges, edges_of_hops or [edge_id.numel()], tree, sampling.num_trees,
            copies_of(edges.stored, edges.target) if sampling.replace else None, copies,
        )  # fmt: skip
        crossing = None
        if group.size > 1:
            crossing = crossing_edges(sampling.ranks.part, source, target, at(self.nodes.owner, edges.source))
        return KeptEdges(edge_id, place, key, source, target, num_keys, sampling.repeats, crossing)

    def _gathered(self, code: Tensor, number: Tensor, kept: KeptEdges) -> tuple[tuple[Tensor, Tensor], KeptEdges]:
        """Those of all ranks of the data group, edges by what stands for them (collective)."""
        part = self.sampling.ranks.part
        counts = part.gather([code.numel(), kept.key.numel()]).t().tolist()
        nodes = part.gather_rows(torch.stack([code, number], 1), counts[0])
        code, number = nodes[nodes[:, 1].argsort()].t().contiguous()
        mine = torch.stack([kept.edge_id, kept.key, kept.source, kept.target], 1)
        table = part.gather_rows(mine, counts[1])
        edge_id, key, source, target = table[table[:, int(kept.repeats)].argsort()].t().contiguous()
        kept = KeptEdges(edge_id, edge_id[:0], key, source, target, kept.num_keys, kept.repeats)
        return (code, number), kept


def at(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``, for which torch takes several times as long."""
    return values.index_select(0, index)


def crossing_edges(ranks: IdLists, source: Tensor, target: Tensor, owner: Tensor) -> CrossingEdges:
    """Tell the owners of sources of the edges from them (collective).

    ``source`` and ``target``, int64 ``[m]``, number the ends of this rank's edges; targets mostly ascend, as hops are
    drawn. ``owner`` has the ranks of the sources.
    """
    size, is_inside = ranks.group.size, owner == ranks.group.rank
    inside, arriving = (which.nonzero().view(-1) for which in (is_inside, ~is_inside))
    sender = at(owner, arriving)
    if size > 2:
        order = np.argsort(sender.to(torch.int16).numpy(), kind="stable")  # by digits, as 16 bits are sorted
        arriving, sender = (at(x, torch.from_numpy(order)) for x in (arriving, sender))
    rows = torch.stack([at(target, arriving), at(source, arriving)], 1)
    told, of_rank = ranks.exchange(rows, torch.bincount(sender, minlength=size).tolist(), kind="edges")
    receiver = torch.repeat_interleave(torch.arange(size), torch.tensor(of_rank))
    return CrossingEdges(inside, arriving, sender, torch.stack([told[:, 1], told[:, 0], receiver], 1))


def edge_keys(
    edge_id: Tensor,
    num_edges: int,
    edges_of_hops: list[int],
    tree: Tensor | None,
    num_trees: int,
    copy: Tensor | None,
    num_copies: int,
) -> tuple[Tensor, int]:
    """What puts edges in order, by hop, place in the graph, tree and copy, int64 ``[m]``; and an upper bound of it."""
    key = edge_id.clone()
    for hop, of_hop in enumerate(torch.split(key, edges_of_hops)):
        of_hop += hop * num_edges
    key = key if tree is None else key * num_trees + tree
    key = key if copy is None else key * num_copies + copy
    return key, len(edges_of_hops) * num_edges * num_trees * num_copies


def copies_of(stored: Tensor, target: Tensor) -> Tensor:
    """How many edges before each are the same one, ``stored``, to the same target; int64 ``[m]``."""
    number, is_new = torch.arange(stored.numel()), torch.ones_like(stored, dtype=torch.bool)
    is_new[1:] = (stored.diff() != 0) | (target.diff() != 0)
    return number - torch.where(is_new, number, 0).cummax(0).values


def _is_among(value: Tensor, some: Tensor) -> Tensor:
    """Whether each value is among some others, bool."""
    known = some[ops.distinct(some[:0], some)[0]]
    return ops.distinct(known, value)[1] < known.numel()
