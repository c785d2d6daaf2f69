"""Neighbour sampling: some in-edges of each node, hop by hop, drawn by the owners of the nodes."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.ids import Arrived, Call, IdList, side_by_side
from pyg_dist.errors import DataError
from pyg_dist.graph.sample import CrossingEdges, DataGroup, KeptEdges, Subset, TypedSubset
from pyg_dist.loader.columns import Columns, split
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import Edges, KnownNodes, SamplingRanks
from pyg_dist.loader.seeds import Seeds, Start

SubgraphType = Literal["directional", "induced", "bidirectional"]
ONE_TYPE: EdgeType = ("", "", "")
"""The relation of a graph without types, whose nodes are of type ``""``."""

_ENDS = {"src_index": 0, "dst_pos_index": -1, "dst_neg_index": -1}
"""Attributes of the seeds that belong to the type at an end of their relation."""

_WINDOW, _EDGES_AT_ONCE = 8, 1 << 20
"""The most steps that are drawn at once, and the most edges of a rank: messages of larger batches weigh little."""

_NUMBERS = ("edge_label_index", *_ENDS)
"""Attributes of the seeds that are numbers of nodes in the batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NeighborSampling:
    """A :class:`~pyg_dist.loader.batches.Sampler` of nodes that are reached from seeds along drawn edges, by hop.

    A hop draws, for each relation, in-edges of the nodes of its targets' type that the hop before has reached. Which
    in-edges of a node are kept is a function of the seed, the step, the hop, the data group, the relation and the node.
    The owner of a node draws them, and sends the ids of their sources to the owners of these: for H hops H + 1 messages
    between two ranks, which several steps with small batches share. The halo layout's plan takes one message more for
    each relation; in two levels one more for the edges, and one within a machine. A rank keeps its own nodes of the
    batch and the edges that end at them, O(B/P) memory; to number nodes it is sent the ids of all. Where the layout
    needs the whole subset on each rank, it is gathered at the end: O(B) memory.

    Nodes of a type are numbered by hop, seeds first as given, then ascending by id and tree; in each hop data group
    after data group. Edges are ordered by the hop that draws them, then as in the graph. Ids count through all types.
    In a disjoint batch a node of the graph is another node in each tree.
    """

    ranks: SamplingRanks  # the ranks that sample
    columns: Columns  # the nodes that this rank may meet
    in_edges: Mapping[EdgeType, InEdges]  # of this rank's nodes, by relation
    types: Mapping[str, range]  # ids of each type's nodes
    seeds: Seeds  # from which batches begin
    input_type: str | EdgeType  # of the seeds: a type, or a relation whose ends they are
    num_neighbors: Mapping[EdgeType, tuple[int, ...]]  # in-edges of a node by hop; -1: all
    seed: int  # of the draws
    replace: bool = False  # whether an edge may be drawn several times
    subgraph_type: SubgraphType = "directional"  # which edges a batch has
    disjoint: bool = False  # whether each seed has nodes of its own
    _ahead: _Ahead = field(default_factory=lambda: _Ahead(), init=False)

    @property
    def sends(self) -> bool:
        return self.ranks.everyone.group.size > 1

    @property
    def num_steps(self) -> int:
        return self.seeds.steps.num_steps

    @property
    def is_typed(self) -> bool:
        """Whether the graph has types."""
        return ONE_TYPE not in self.in_edges

    @cached_property
    def options(self) -> dict[str, object]:
        return {
            **self.seeds.options, "replace": self.replace, "subgraph_type": self.subgraph_type,
            "disjoint": self.disjoint, "input_type": str(self.input_type),
            "num_nodes": self._by_name({(kind,): len(ids) for kind, ids in self.types.items()}),
            "num_neighbors": self._by_name({key: list(counts) for key, counts in self.num_neighbors.items()}),
            "is_weighted": self._by_name({key: edges.weight is not None for key, edges in self.in_edges.items()}),
        }  # fmt: skip

    def _by_name(self, values: Mapping[tuple[str, ...], object]) -> object:
        """Values by names of types and relations; the only value where there are no types."""
        return {"__".join(key): x for key, x in values.items()} if self.is_typed else next(iter(values.values()))

    @property
    def num_hops(self) -> int:
        """The number of hops, the same for all relations."""
        return max(map(len, self.num_neighbors.values()), default=0)

    @cached_property
    def window(self) -> int:
        """The most steps that are drawn at once."""
        counts = [of_hop for of_hops in self.num_neighbors.values() for of_hop in of_hops]
        if not self.sends or self.subgraph_type != "directional" or min(counts, default=0) < 0:
            return 1
        ranks = self.ranks
        reached = edges = self.seeds.max_seeds / ranks.count / (1 if ranks.gathers else ranks.part.group.size)
        for hop in range(self.num_hops):
            reached *= sum(of_hops[hop] for of_hops in self.num_neighbors.values())
            edges += reached
        return int(max(1, min(_WINDOW, _EDGES_AT_ONCE // max(edges, 1))))

    def sample(self, step: int) -> Subset | TypedSubset:
        self.prepare(step)
        return self._ahead.drawn.pop(step)

    def prepare(self, step: int) -> None:
        """Draw ``sample(step)``, unless it is drawn, and steps after it: more each time that steps are taken in turn.

        Collective where messages are sent.
        """
        ahead = self._ahead
        if step in ahead.drawn:
            return
        if step == ahead.end:
            ahead.size = min(2 * ahead.size, self.window)
            ahead.drawn.clear()
        else:
            ahead.size = 1
        steps = range(step, step + ahead.size)
        drawn = side_by_side(_Batch(self, each).subset() for each in steps)
        ahead.end = steps.stop
        ahead.drawn.update(zip(steps, drawn, strict=True))


@dataclass
class _Ahead:
    """Steps that were drawn and have not been taken yet."""

    drawn: dict[int, Subset | TypedSubset] = field(default_factory=dict)
    end: int = -1  # the step after those that were drawn last
    size: int = 1  # how many were drawn last


class Drawn(NamedTuple):
    """In-edges of some nodes, those of a node together, in the graph's order."""

    degree: Tensor  # how many each node has, int64 ``[n]``
    source: Tensor  # places of their sources among the known nodes, int32 or int64 ``[m]``
    stored: Tensor  # places in the graph's edge storage, int64 ``[m]``


class _Batch:
    """This rank's part of a step's batch, while it is drawn (collective)."""

    def __init__(self, sampling: NeighborSampling, step: int) -> None:
        self.sampling, self.step = sampling, step
        self.trees = sampling.seeds.max_seeds if sampling.disjoint else 1  # upper bound, all data groups together
        self.start: Start = sampling.seeds.at(step, sampling.disjoint)
        group, seeds = sampling.ranks.index, torch.cat(self.start.seeds)
        ends = host.tensor([ids.stop for ids in sampling.types.values()])
        self.kinds = list(sampling.types)
        kind = torch.searchsorted(ends, seeds, right=True)
        self.num_seeds: list[int] = torch.bincount(kind, minlength=len(self.kinds)).tolist()
        order = kind.argsort(stable=True)  # by type, those of a type as given
        first = host.tensor([0, *accumulate(self.num_seeds)])
        self.seed_number = torch.empty_like(order).scatter_(0, order, host.arange(order.numel())) - first[kind]
        first_seed = sum(of_group.numel() for of_group in self.start.seeds[:group])
        part = slice(first_seed, first_seed + self.start.seeds[group].numel())
        seeds, kind, number = seeds[part], kind[part], self.seed_number[part]
        tree = host.arange(part.start, part.stop) if sampling.disjoint else torch.zeros_like(seeds)
        column, order = sampling.columns.find(seeds), kind.argsort(stable=True)
        here = at(order, host.flatnonzero(at(column, order) >= 0))
        code = at(column, here) * self.trees + at(tree, here)
        sizes = torch.bincount(at(kind, here), minlength=len(self.kinds)).tolist()
        known = seeds * self.trees + tree, number
        self.nodes = KnownNodes(sampling.ranks, sampling.columns, self.trees, known, code, at(number, here), sizes)

    def subset(self) -> Generator[Call, Arrived, Subset | TypedSubset]:
        """This rank's part of the batch, or all of it where the layout needs that."""
        sampling, nodes, relations = self.sampling, self.nodes, list(self.sampling.in_edges)
        hops = []
        for hop in range(sampling.num_hops):
            hops.append((yield from self._in_edges(nodes.hops[-1], nodes.keys[-1], hop)))
        sizes = [[drawn.stored.numel() for drawn in hop] for hop in hops]  # by hop and relation
        is_directional = sampling.subgraph_type == "directional"
        counts, totals = yield from nodes.assign_numbers(self.num_seeds, [size for hop in sizes for size in hop])
        keys, self.own_number = (
            [_joined(of_hops) for of_hops in zip(*x, strict=True)] for x in (nodes.keys, nodes.numbers)
        )
        every = edges = self._edges(hops, nodes.numbers)
        if not is_directional:  # all sources of those that were drawn are nodes of the batch
            own = [_joined(of_hops) for of_hops in zip(*nodes.hops, strict=True)]
            every = self._edges([(yield from self._in_edges(own, keys, None))], [self.own_number])
            every = [found.some(host.flatnonzero(nodes.numbers_at(found.source) >= 0)) for found in every]
            if sampling.subgraph_type == "bidirectional":
                every = [self._both_ways(edges[0], every[0], sum(counts[0]))]
        crossing = [None] * len(every) if sampling.ranks.gathers else nodes.crossing(every)
        kept: dict[EdgeType, KeptEdges] = {}
        known: dict[EdgeType, dict[str, object]] = {relation: {} for relation in relations}
        for k, relation in enumerate(relations):
            if is_directional:
                known[relation]["num_sampled_edges"] = totals[k :: len(relations)]
            # edges that are induced or go both ways belong to no hop
            of_hops = [hop[k] for hop in sizes] if is_directional else [every[k].stored.numel()]
            kept[relation] = self._kept(relation, every[k], of_hops, crossing[k])
        nodes.give_table_back()
        found = dict(
            zip(self.kinds, map(self._nodes, sampling.types.values(), keys, self.own_number, counts), strict=True)
        )
        if sampling.is_typed:
            for name, value in self.start.attributes.items():
                self._store_of(name, found, known)[name] = self.seed_number[value] if name in _NUMBERS else value
            return TypedSubset(found, kept, known)
        (whole,) = found.values()
        return (yield from self._whole(whole, kept[ONE_TYPE], {**self.start.attributes, **known[ONE_TYPE]}))

    def _in_edges(
        self, code: Sequence[Tensor], key: Sequence[Tensor], hop: int | None
    ) -> Generator[Call, Arrived, list[Drawn]]:
        """In-edges of this rank's nodes, of each relation: those that a hop draws (collective), or with ``None`` all.

        ``code``, ``key``: codes of the nodes by type, on this rank and between ranks. Sources of drawn edges join the
        batch.
        """
        sampling, columns = self.sampling, self.sampling.columns
        by_type, found = dict(zip(self.kinds, zip(code, key, strict=True), strict=True)), list[Drawn]()
        for number, (relation, in_edges) in enumerate(sampling.in_edges.items()):
            target, of_draw = by_type[relation[-1]]
            tree, column = split(target, self.trees) if sampling.disjoint else (None, target)
            count = -1 if hop is None else sampling.num_neighbors[relation][hop]
            seed = ops.mixed_seed(sampling.seed, self.step, hop or 0, 5, sampling.ranks.index, number)
            row = columns.row_of(column)
            degree, source, stored = in_edges.draw(row, tree, of_draw, count, seed, sampling.replace)
            if tree is not None:
                source = source.long() * self.trees + tree.repeat_interleave(degree)
            found.append(Drawn(degree, source, stored))
        met = _joined([drawn.source for drawn in found])
        place = self.nodes.around(met) if hop is None else (yield from self.nodes.reach(met))
        of_relations = place.split([drawn.source.numel() for drawn in found])
        return [drawn._replace(source=place) for drawn, place in zip(found, of_relations, strict=True)]

    def _edges(self, draws: Sequence[Sequence[Drawn]], numbers: Sequence[Sequence[Tensor]]) -> list[Edges]:
        """The edges of several draws, by relation; ``numbers``: of the nodes of each draw, by type."""
        found = []
        for k, relation in enumerate(self.sampling.in_edges):
            kind, drawn = self.kinds.index(relation[-1]), [of_relations[k] for of_relations in draws]
            target = [
                of_types[kind].repeat_interleave(degree, output_size=stored.numel())
                for of_types, (degree, _, stored) in zip(numbers, drawn, strict=False)
            ]
            source, stored = (_joined(columns) for columns in list(zip(*drawn, strict=True))[1:] or ((), ()))
            found.append(Edges(source, _joined(target), stored))
        return found

    def _nodes(self, ids: range, code: Tensor, number: Tensor, counts: list[int]) -> Subset:
        """The nodes of a type, given this rank's codes between ranks and numbers."""
        sampling, of_nodes = self.sampling, {}
        if sampling.disjoint:
            tree, code = split(code, self.trees)
            of_nodes["batch"] = self.start.tree[tree]
        return Subset(
            code - ids.start if ids.start else code,
            number=number,
            num_nodes=sum(counts),
            attributes={"num_sampled_nodes": counts},
            node_attributes=of_nodes,
            repeats=sampling.disjoint,
        )

    def _whole(self, nodes: Subset, kept: KeptEdges, attributes: dict[str, object]) -> Generator[Call, Arrived, Subset]:
        """The subset of a graph with one type (collective where each rank has to know all)."""
        ranks = self.sampling.ranks
        nodes = replace(
            nodes,
            kept=kept,
            group=DataGroup(ranks.index, 0, nodes.size) if ranks.count > 1 else None,
            attributes={**attributes, **nodes.attributes},
        )
        return (yield from self._gathered(nodes, kept)) if ranks.gathers else nodes

    def _kept(
        self, relation: EdgeType, edges: Edges, edges_of_hops: list[int], crossing: CrossingEdges | None
    ) -> KeptEdges:
        """This rank's edges of a relation, in the order of hop, place in the graph, tree and copy."""
        sampling, in_edges = self.sampling, self.sampling.in_edges[relation]
        counts = sampling.num_neighbors[relation] if sampling.replace else None
        num_copies = 1 if counts is None else max(1, *counts)
        trees = self.trees
        tree = None
        if sampling.disjoint:
            kind = self.kinds.index(relation[-1])
            own = torch.cat([hop[kind] for hop in self.nodes.hops])
            tree = split(at(own, ops.find_sorted(self.own_number[kind], edges.target)), trees)[0]

        def named() -> tuple[Tensor, Tensor]:
            edge_id = in_edges.id_of(edges.stored)
            key = edge_id.clone()
            for hop, of_hop in enumerate(torch.split(key, edges_of_hops)):
                of_hop += hop * in_edges.num_edges
            if tree is not None:
                key = key * trees + tree
            if counts is not None:  # how many edges before each are the same one
                number, is_new = host.arange(len(key)), host.ones(len(key), dtype=torch.bool)
                is_new[1:] = (edges.stored.diff() != 0) | (edges.target.diff() != 0)
                key = key * num_copies + number - torch.where(is_new, number, 0).cummax(0).values
            return edge_id, key

        num_keys = len(edges_of_hops) * in_edges.num_edges * trees * num_copies
        repeats = tree is not None or counts is not None
        return KeptEdges(edges.stored, named, *self._ends(edges), num_keys, repeats, crossing)

    def _store_of(self, name: str, nodes: dict[str, Subset], edges: dict[EdgeType, dict[str, object]]) -> Any:
        """The attributes of the type or relation that the seeds' attribute ``name`` belongs to."""
        given = self.sampling.input_type
        if not isinstance(given, str) and name not in _ENDS:
            return edges.setdefault(given, {})  # maybe no relation of the graph
        return nodes[given if isinstance(given, str) else given[_ENDS[name]]].attributes

    def _ends(self, edges: Edges) -> tuple[Tensor, Tensor]:
        return self.nodes.numbers_at(edges.source), edges.target

    def _both_ways(self, drawn: Edges, every: Edges, num_nodes: int) -> Edges:
        """The edges that were drawn, and their opposites (collective).

        With replacement, all edges between the same nodes as one that was drawn.

        Raises:
            DataError: An opposite edge is missing, on every rank.
        """
        source, target = self._ends(drawn)
        wanted = target * num_nodes + source
        (crossing,) = self.nodes.crossing([drawn])
        if crossing is not None:
            begins, ends, _ = crossing.leaving or self.nodes.leaving(drawn, crossing)
            wanted = torch.cat([ends * num_nodes + begins, at(wanted, crossing.inside)])
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
        return every.some(host.flatnonzero(is_drawn | _is_among(pair, wanted)))

    def _gathered(self, nodes: Subset, kept: KeptEdges) -> Generator[Call, Arrived, Subset]:
        """The subset of all ranks of the data group (collective)."""
        assert nodes.number is not None
        trees = [nodes.node_attributes["batch"]] if nodes.node_attributes else []
        lists = [
            IdList(torch.stack([nodes.node_id, nodes.number, *trees], 1), is_ascending=False),
            IdList(torch.stack([kept.edge_id, kept.key, kept.source, kept.target], 1), is_ascending=False),
        ]
        (rows, _), (table, _) = yield Call(self.sampling.ranks.part, lists, "whole batch")
        node_id, number, *trees = rows[rows[:, 1].argsort()].t().contiguous()
        edge_id, key, source, target = table[table[:, int(kept.repeats)].argsort()].t().contiguous()
        kept = KeptEdges(edge_id[:0], lambda: (edge_id, key), source, target, kept.num_keys, kept.repeats)
        of_nodes = {"batch": trees[0]} if trees else {}
        return replace(nodes, node_id=node_id, number=number, kept=kept, node_attributes=of_nodes)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces one after another; of no pieces an empty tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces]) if pieces else host.arange(0)


def at(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``, several times as fast."""
    return values.index_select(0, index)


def _is_among(value: Tensor, some: Tensor) -> Tensor:
    """Whether each value is among some others, bool."""
    known = some[ops.distinct(some[:0], some)[0]]
    return ops.distinct(known, value)[1] < known.numel()
