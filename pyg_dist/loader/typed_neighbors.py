"""Neighbour sampling in graphs of several types: some in-edges of each node and relation, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.backend import ops
from pyg_dist.graph.sample import KeptEdges, Subset, TypedSubset
from pyg_dist.halo.plan.share import LocalRows
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import KnownNodes, SamplingRanks
from pyg_dist.loader.neighbors import NO_EDGES, at, copies_of, edge_keys, leaving_edges
from pyg_dist.loader.seeds import Seeds

_OF_SOURCES, _OF_TARGETS = ("src_index",), ("dst_pos_index", "dst_neg_index")
_NUMBERS = ("edge_label_index", *_OF_SOURCES, *_OF_TARGETS)  # attributes of the seeds that number nodes


class NodeTypes:
    """Ids of nodes, counted through all types in their order.

    ``sizes``: the number of nodes of each type.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.names = dict(sizes), list(sizes)
        self.first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

    def ids(self, kind: str) -> range:
        """Those of a type."""
        return range(self.first[kind], self.first[kind] + self.sizes[kind])

    def number_of(self, ids: Tensor) -> Tensor:
        """The place of the type of each among all types, int64."""
        ends = torch.tensor([self.first[kind] + size for kind, size in self.sizes.items()])
        return torch.searchsorted(ends, ids, right=True)


@dataclass(frozen=True, eq=False)
class TypedNeighborSampling:
    """Batches of nodes that are reached from seeds along drawn edges of several relations.

    A :class:`~pyg_dist.loader.sampler.Sampler`, as :class:`~pyg_dist.loader.neighbors.NeighborSampling` is for one
    type: a hop draws, for each relation, in-edges of the nodes of its targets' type that the hop before has reached.
    All relations of a hop share one message between two ranks.

    Nodes of a type are numbered by hop, seeds first, then ascending. A node stands by its *code*: types one after
    another, in a disjoint batch tree after tree in a type.
    """

    in_edges: Mapping[EdgeType, InEdges]  # of this rank's nodes, ids counted within types
    rows: Mapping[str, LocalRows]  # this rank's nodes
    types: NodeTypes
    ranks: SamplingRanks
    seeds: Seeds  # ids counted through all types
    input_type: str | EdgeType  # of the seeds: a type, or a relation whose ends they are
    num_neighbors: Mapping[EdgeType, tuple[int, ...]]  # in-edges of a node by hop; -1: all
    seed: int  # of the draws
    replace: bool = False
    disjoint: bool = False

    @property
    def sends(self) -> bool:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return self.ranks.everyone.group.size > 1

    @property
    def num_steps(self) -> int:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return self.seeds.steps.num_steps

    @cached_property
    def options(self) -> dict[str, Any]:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        relations = ["__".join(relation) for relation in self.num_neighbors]
        counts = dict(zip(relations, map(list, self.num_neighbors.values()), strict=True))
        return {
            **self.seeds.options, "num_nodes": self.types.sizes, "num_neighbors": counts,
            "input_type": self.input_type, "replace": self.replace, "disjoint": self.disjoint,
            "is_weighted": [name for name, edges in zip(relations, self.in_edges.values(), strict=True)
                            if edges.weight is not None],
        }  # fmt: skip

    @property
    def num_hops(self) -> int:
        """Alike for all relations."""
        return max((len(counts) for counts in self.num_neighbors.values()), default=0)

    @property
    def num_trees(self) -> int:
        """An upper bound of the trees of a step."""
        return self.seeds.max_seeds if self.disjoint else 1

    @property
    def repeats(self) -> bool:
        """Whether nodes or edges of the graph may be in a batch several times."""
        return self.disjoint or self.replace

    def sample(self, step: int) -> TypedSubset:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return _TypedBatch(self, step).subset()


class _Drawn(NamedTuple):
    """Edges of a relation to this rank's nodes, int64 ``[m]`` each."""

    source: Tensor  # places of the ends among the known nodes
    target: Tensor
    stored: Tensor  # where each is in the edge storage of its relation


class _TypedBatch:
    """This rank's part of a step's batch, while it is drawn (collective)."""

    def __init__(self, sampling: TypedNeighborSampling, step: int) -> None:
        self.sampling, self.step = sampling, step
        self.types, self.relations = sampling.types, list(sampling.in_edges)
        self.start = sampling.seeds.at(step, sampling.disjoint)
        (seeds,) = self.start.seeds
        kinds, trees = self.types.number_of(seeds), torch.arange(seeds.numel()) if sampling.disjoint else None
        self.num_seeds = torch.bincount(kinds, minlength=len(self.types.names)).tolist()
        order = kinds.argsort(stable=True)
        begin = torch.tensor([0, *accumulate(self.num_seeds)])[kinds]
        self.seed_number = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel())) - begin
        code, is_here = torch.empty_like(seeds), torch.zeros_like(seeds, dtype=torch.bool)
        for number, kind in enumerate(self.types.names):
            some = (kinds == number).nonzero().view(-1)
            ids = at(seeds, some) - self.types.first[kind]
            code[some] = self._code(kind, ids, None if trees is None else at(trees, some))
            is_here[some] = sampling.rows[kind].find(ids) >= 0
        span = sampling.num_trees * sum(self.types.sizes.values())
        first = [sampling.num_trees * first for first in self.types.first.values()]
        self.nodes = KnownNodes(sampling.ranks, span, code[is_here], self.seed_number[is_here], first)

    def _code(self, kind: str, ids: Tensor, tree: Tensor | None) -> Tensor:
        types, first = self.types, self.sampling.num_trees * self.types.first[kind]
        return ids + first if tree is None else tree * types.sizes[kind] + ids + first

    def _decoded(self, kind: str, code: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids within the type, and the trees of a disjoint batch."""
        code = code - self.sampling.num_trees * self.types.first[kind]
        size = max(self.types.sizes[kind], 1)
        return (code % size, code // size) if self.sampling.disjoint else (code, None)

    def _of_types(self, place: Tensor) -> dict[str, Tensor]:
        """Known nodes by type, in their order."""
        trees, code = self.sampling.num_trees, at(self.nodes.code, place)
        return {
            kind: at(place, ((code >= trees * ids.start) & (code < trees * ids.stop)).nonzero().view(-1))
            for kind, ids in ((kind, self.types.ids(kind)) for kind in self.types.names)
        }

    def subset(self) -> TypedSubset:
        """The batch, as far as this rank has to know it."""
        sampling, nodes = self.sampling, self.nodes
        hops = [self._hop(hop) for hop in range(sampling.num_hops)]
        sizes = [[drawn.stored.numel() for drawn in hop] for hop in hops]  # by hop and relation
        counts, totals = nodes.assign_numbers(self.num_seeds, [size for hop in sizes for size in hop])
        of_nodes: dict[str, dict[str, Any]] = {
            kind: {"num_sampled_nodes": count} for kind, count in zip(self.types.names, counts, strict=True)
        }
        of_edges: dict[EdgeType, dict[str, Any]] = {
            relation: {"num_sampled_edges": totals[k :: len(self.relations)]}
            for k, relation in enumerate(self.relations)
        }
        self._add_inputs(of_nodes, of_edges)
        found, every = {}, self._of_types(torch.cat(nodes.hops))
        for (kind, own), count in zip(every.items(), counts, strict=True):
            ids, tree = self._decoded(kind, at(nodes.code, own))
            of_trees = {} if tree is None else {"batch": at(self.start.tree, tree)}
            found[kind] = Subset(
                ids, number=at(nodes.number, own), num_nodes=sum(count), attributes=of_nodes[kind],
                node_attributes=of_trees,
            )  # fmt: skip
        drawn = [_Drawn(*map(torch.cat, zip(*pieces, strict=True))) for pieces in zip(*hops, strict=True)]
        kept = self._kept(drawn, sizes, max((subset.size for subset in found.values()), default=0))
        return TypedSubset(found, dict(zip(self.relations, kept, strict=True)), of_edges)

    def _add_inputs(self, of_nodes: dict[str, dict[str, Any]], of_edges: dict[EdgeType, dict[str, Any]]) -> None:
        """The attributes of the seeds go to their type, or relation, and number nodes within their types."""
        given = self.sampling.input_type
        for name, value in self.start.attributes.items():
            value = self.seed_number[value] if name in _NUMBERS else value
            if isinstance(given, str):
                of_nodes[given][name] = value
            elif name in (*_OF_SOURCES, *_OF_TARGETS):
                of_nodes[given[0] if name in _OF_SOURCES else given[-1]][name] = value
            else:
                of_edges[given][name] = value

    def _hop(self, hop: int) -> list[_Drawn]:
        """In-edges of the nodes that the hop before has reached, by relation (collective)."""
        sampling, nodes = self.sampling, self.nodes
        reached, pieces = self._of_types(nodes.hops[-1]), []
        sources, owners = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for number, relation in enumerate(self.relations):
            source, target = relation[0], relation[-1]
            in_edges, place = sampling.in_edges[relation], reached[target]
            code = at(nodes.code, place)
            ids, tree = self._decoded(target, code)
            row = sampling.rows[target].local_id(ids).long()
            seed = ops.mixed_seed(sampling.seed, self.step, hop, 7, number)
            count = sampling.num_neighbors[relation][hop]
            degree, column, stored = in_edges.draw(row, tree, code, count, seed, sampling.replace)
            of_edges = None if tree is None else tree.repeat_interleave(degree)
            sources.append(self._code(source, in_edges.node_of(column), of_edges))
            owners.append(in_edges.owner_of(column))
            pieces.append((place.repeat_interleave(degree), stored))
        owner = torch.cat(owners)
        met = nodes.reach(torch.cat(sources), lambda first: at(owner, first))
        split = torch.split(met, [stored.numel() for _, stored in pieces])
        return [_Drawn(source, *piece) for source, piece in zip(split, pieces, strict=True)]

    def _kept(self, drawn: list[_Drawn], sizes: list[list[int]], num_nodes: int) -> list[KeptEdges]:
        """The edges of each relation, by hop (collective)."""
        sampling, nodes, group = self.sampling, self.nodes, self.sampling.ranks.part.group
        alone, ends = [], []
        for number, (relation, edges) in enumerate(zip(self.relations, drawn, strict=True)):
            in_edges = sampling.in_edges[relation]
            place, edge_id, tree, copy = edges.stored, in_edges.id_of(edges.stored), None, None
            if sampling.disjoint:
                _, tree = self._decoded(relation[-1], at(nodes.code, edges.target))
            if sampling.replace:
                copy = copies_of(edges.stored, edges.target)
            key, num_keys = edge_keys(
                edge_id, in_edges.num_edges, [hop[number] for hop in sizes], tree, sampling.num_trees, copy,
                max(1, *sampling.num_neighbors[relation]),
            )  # fmt: skip
            source, target = at(nodes.number, edges.source), at(nodes.number, edges.target)
            ends.append((source + number * num_nodes, target, at(nodes.owner, edges.source)))
            alone.append(
                KeptEdges(edge_id, place, key, source, target, NO_EDGES[:, 0], NO_EDGES, num_keys, sampling.repeats)
            )
        if group.size == 1 or not alone:
            return alone
        # One message for all relations, which are told by the sources' numbers.
        source, target, owner = (torch.cat(column) for column in zip(*ends, strict=True))
        away, leaving = leaving_edges(sampling.ranks.part, source, target, owner)
        first, found = 0, []
        of_relation = leaving[:, 0] // max(num_nodes, 1)
        for number, kept in enumerate(alone):
            size = kept.key.numel()
            some = away[(away >= first) & (away < first + size)] - first
            told = leaving[of_relation == number] - torch.tensor([number * num_nodes, 0, 0])
            found.append(kept.by_sender(owner[first : first + size], group.rank, some, told))
            first += size
        return found
