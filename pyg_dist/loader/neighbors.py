"""Neighbour sampling: some in-edges of each node, hop by hop, drawn by the owners of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.errors import DataError
from pyg_dist.graph.sample import DataGroup, KeptEdges, Subset
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.own_nodes import OwnNodes, SamplingRanks, ascending_unique
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

    Attributes:
        in_edges: of this rank's nodes.
        num_nodes: N.
        ranks: those that sample.
        seeds: what batches begin with.
        num_neighbors: in-edges of a node by hop; -1: all.
        seed: of the draws.
        subgraph_type: which edges a batch has.
        replace: whether an edge may be drawn several times.
        disjoint: whether each seed has nodes of its own.
    """

    in_edges: InEdges
    num_nodes: int
    ranks: SamplingRanks
    seeds: Seeds
    num_neighbors: tuple[int, ...]
    seed: int
    subgraph_type: SubgraphType = "directional"
    replace: bool = False
    disjoint: bool = False

    @property
    def sends(self) -> bool:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return self.ranks.everyone.group.size > 1

    @property
    def num_steps(self) -> int:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return self.seeds.num_steps

    @cached_property
    def options(self) -> dict[str, Any]:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return {
            **self.seeds.options, "num_nodes": self.num_nodes, "num_neighbors": list(self.num_neighbors),
            "subgraph_type": self.subgraph_type, "replace": self.replace, "disjoint": self.disjoint,
            "is_weighted": self.in_edges.weight is not None,
        }  # fmt: skip

    @property
    def num_trees(self) -> int:
        """An upper bound of the trees of a step, all data groups together."""
        return self.seeds.max_seeds if self.disjoint else 1

    def sample(self, step: int) -> Subset:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return _Batch(self, step).subset()


@dataclass(frozen=True, eq=False)
class _Edges:
    """Edges to this rank's nodes, int64 ``[m]`` each: codes of the ends, the source's rank, the entry in `InEdges`.

    ``copy`` counts what else is the same.
    """

    source: Tensor
    target: Tensor
    owner: Tensor
    entry: Tensor
    copy: Tensor

    @staticmethod
    def joined(hops: Sequence[_Edges]) -> _Edges:
        none = torch.empty(0, dtype=torch.int64)
        fields = [[none] * 5, *((e.source, e.target, e.owner, e.entry, e.copy) for e in hops)]
        return _Edges(*(torch.cat(pieces) for pieces in zip(*fields, strict=True)))

    def some(self, which: Tensor) -> _Edges:
        return _Edges(*(x[which] for x in (self.source, self.target, self.owner, self.entry, self.copy)))


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
        self.nodes = OwnNodes(sampling.ranks, sampling.num_trees * sampling.num_nodes, code[here], number[here])

    def subset(self) -> Subset:
        """The batch, as far as this rank has to know it."""
        sampling = self.sampling
        hops = []
        for hop, count in enumerate(sampling.num_neighbors):
            seed = ops.mixed_seed(sampling.seed, self.step, hop, 5, sampling.ranks.index)
            hops.append(self._in_edges(self.nodes.hops[-1], count, seed, sampling.replace))
            self.nodes.reach(hops[-1].source, hops[-1].owner)
        num_edges, edges, fails = [hop.entry.numel() for hop in hops], _Edges.joined(hops), False
        if sampling.subgraph_type != "directional":
            every = self._in_edges(self.nodes.code, -1, 0, False)
            edges, fails = (every, False) if sampling.subgraph_type == "induced" else self._both_ways(edges, every)
        num_seeds = [seed.numel() for seed in self.start.seeds]
        counts, num_edges, failures = self.nodes.number(num_seeds, num_edges, fails)
        if failures:
            raise DataError(
                "Expected an undirected graph for subgraph_type='bidirectional' (got an edge without its opposite): "
                "use T.ToUndirected() before, or subgraph_type='directional'"
            )
        known: dict[str, Any] = {"num_sampled_nodes": counts}
        if sampling.subgraph_type == "directional":
            known["num_sampled_edges"] = num_edges
        code, number = self.nodes.by_number
        kept, groups = self._kept(edges, counts), sampling.ranks
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

    def _in_edges(self, code: Tensor, count: int, seed: int, replace: bool) -> _Edges:
        """Some in-edges of this rank's nodes."""
        sampling, n = self.sampling, self.sampling.num_nodes
        tree = code // n if sampling.disjoint else None
        row = sampling.in_edges.find(code if tree is None else code % n)
        of_row, entry = sampling.in_edges.draw(row, tree, code, count, seed, replace)
        source, owner = sampling.in_edges.source_of(entry)
        if tree is not None:
            source = source + tree[of_row] * n
        copy = torch.zeros_like(entry)
        if replace and entry.numel():
            place, is_new = torch.arange(entry.numel()), torch.ones_like(entry, dtype=torch.bool)
            is_new[1:] = (entry.diff() != 0) | (of_row.diff() != 0)
            copy = place - torch.where(is_new, place, 0).cummax(0).values
        return _Edges(source, code[of_row], owner, entry, copy)

    def _both_ways(self, drawn: _Edges, every: _Edges) -> tuple[_Edges, bool]:
        """The edges that were drawn and their opposites, and whether one of these is missing (collective).

        With replacement, all edges between the same nodes as one that was drawn.
        """
        order = (drawn.owner * self.nodes.span + drawn.source).argsort(stable=True)
        there = torch.stack([drawn.source, drawn.target], 1)[order]
        ranks = self.sampling.ranks.part
        counts = torch.bincount(drawn.owner, minlength=ranks.group.size).tolist()
        wanted, _ = ranks.exchange(there, counts)
        span, size = self.nodes.span, max(len(self.nodes), 1)
        ends = ascending_unique(torch.cat([every.source, wanted[:, 1], drawn.source]), span)
        num_pairs = ends.numel() * size

        def pairs(source: Tensor, target: Tensor) -> Tensor:
            return ops.find_sorted(ends, source) * size + ops.find_sorted(self.nodes.code, target)

        pair = pairs(every.source, every.target)
        opposite = ascending_unique(pairs(wanted[:, 1], wanted[:, 0]), num_pairs)
        if self.sampling.replace:
            is_drawn = ops.find_sorted(ascending_unique(pairs(drawn.source, drawn.target), num_pairs), pair) >= 0
        else:  # a parallel of an edge that was drawn is not one

            def edge(e: _Edges) -> Tensor:
                tree = e.target // self.sampling.num_nodes if self.sampling.disjoint else 0
                return e.entry + tree * self.sampling.in_edges.col.numel()

            is_drawn = ops.find_sorted(edge(drawn).sort().values, edge(every)) >= 0
        is_opposite = ops.find_sorted(opposite, pair) >= 0
        is_missing = bool((ops.find_sorted(ascending_unique(pair, num_pairs), opposite) < 0).any())
        return every.some(is_drawn | is_opposite), is_missing

    def _kept(self, edges: _Edges, counts_of_hops: list[int]) -> KeptEdges:
        """The edges between nodes of the batch, by hop; owners of sources learn of theirs (collective).

        What is induced or goes both ways belongs to no hop.
        """
        sampling, ranks = self.sampling, self.sampling.ranks.part
        rank, size = ranks.group.rank, ranks.group.size
        if size == 1:
            source, target = self.nodes.find(edges.source), self.nodes.find(edges.target)
            leaving = torch.empty(0, 3, dtype=torch.int64)
        else:
            edges = edges.some((edges.owner * self.nodes.span + edges.source).argsort(stable=True))
            target, is_other = self.nodes.find(edges.target), edges.owner != rank
            counts = torch.bincount(edges.owner[is_other], minlength=size).tolist()
            begin_here, of_rank = ranks.exchange(torch.stack([edges.source, target], 1)[is_other], counts)
            at_source = self.nodes.find(begin_here[:, 0])
            reply, _ = ranks.exchange(at_source.view(-1, 1) + 1, of_rank, is_ascending=False)
            source = torch.empty_like(target)
            source[~is_other] = self.nodes.find(edges.source[~is_other])
            source[is_other] = reply.view(-1) - 1
            receiver = torch.repeat_interleave(torch.arange(size), torch.tensor(of_rank))
            leaving = torch.stack([at_source, begin_here[:, 1], receiver], 1)[at_source >= 0]
        if sampling.subgraph_type == "induced":  # else all sources are nodes of the batch
            inside = (source >= 0).nonzero().view(-1)
            edges, source, target = edges.some(inside), source[inside], target[inside]
        place = sampling.in_edges.place_of(edges.entry)
        edge_id = sampling.in_edges.id_of(place)
        hops, trees = len(sampling.num_neighbors), sampling.num_trees
        copies = max(1, *sampling.num_neighbors) if sampling.replace else 1
        hop = torch.zeros_like(target)
        if sampling.subgraph_type == "directional":
            hop = torch.bucketize(target, torch.tensor(counts_of_hops).cumsum(0), right=True)
        key = hop * sampling.in_edges.num_edges + edge_id
        if sampling.disjoint:
            key = key * trees + edges.target // sampling.num_nodes
        return KeptEdges(
            edge_id,
            place,
            key * copies + edges.copy,
            source,
            target,
            edges.owner,
            leaving,
            hops * sampling.in_edges.num_edges * trees * copies,
            sampling.disjoint or sampling.replace,
        )

    def _gathered(self, code: Tensor, number: Tensor, kept: KeptEdges) -> tuple[tuple[Tensor, Tensor], KeptEdges]:
        """Those of all ranks of the data group, edges by what stands for them (collective)."""
        part = self.sampling.ranks.part
        counts = part.gather([code.numel(), kept.key.numel()]).t().tolist()
        nodes = part.gather_rows(torch.stack([code, number], 1), counts[0])
        code, number = nodes[nodes[:, 1].argsort()].t().contiguous()
        mine = torch.stack([kept.edge_id, kept.key, kept.source, kept.target], 1)
        table = part.gather_rows(mine, counts[1])
        edge_id, key, source, target = table[table[:, int(kept.repeats)].argsort()].t().contiguous()
        none = kept.leaving[:0]
        sender = torch.zeros_like(key)
        return (code, number), KeptEdges(
            edge_id, none[:, 0], key, source, target, sender, none, kept.num_keys, kept.repeats
        )
