"""Neighbour sampling in graphs of several types: some in-edges of each node and relation, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.backend import ops
from pyg_dist.graph.sample import CrossingEdges, KeptEdges, Subset, TypedSubset
from pyg_dist.halo.plan.share import LocalRows
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import KnownNodes, SamplingRanks
from pyg_dist.loader.neighbors import at, copies_of, crossing_edges, edge_keys
from pyg_dist.loader.seeds import Seeds

_ENDS = {"src_index": 0, "dst_pos_index": -1, "dst_neg_index": -1}
"""Attributes of the seeds that belong to the type at an end of their relation."""

_NUMBERS = ("edge_label_index", *_ENDS)
"""Those that number nodes."""


@dataclass(frozen=True, eq=False)
class TypedNeighborSampling:
    """Batches of nodes that are reached from seeds along drawn edges of several relations.

    A :class:`~pyg_dist.loader.sampler.Sampler`, as :class:`~pyg_dist.loader.neighbors.NeighborSampling` is for one
    type: a hop draws, for each relation, in-edges of the nodes of its targets' type that the hop before has reached.
    All relations of a hop share one message between two ranks. Nodes stand by their ids, counted through all types; in
    the batch those of a type are numbered by hop, seeds first, then ascending.
    """

    in_edges: Mapping[EdgeType, InEdges]  # of this rank's nodes, ids counted within types
    rows: Mapping[str, LocalRows]  # this rank's nodes
    types: Mapping[str, range]  # ids of each type's nodes, counted through all types
    ranks: SamplingRanks
    seeds: Seeds  # ids counted through all types
    input_type: str | EdgeType  # of the seeds: a type, or a relation whose ends they are
    num_neighbors: Mapping[EdgeType, tuple[int, ...]]  # in-edges of a node by hop; -1: all
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
        return {
            **self.seeds.options, "input_type": str(self.input_type), "replace": self.replace,
            "num_nodes": {kind: len(ids) for kind, ids in self.types.items()},
            "num_neighbors": {"__".join(key): list(counts) for key, counts in self.num_neighbors.items()},
            "is_weighted": ["__".join(key) for key, edges in self.in_edges.items() if edges.weight is not None],
        }  # fmt: skip

    def sample(self, step: int) -> TypedSubset:
        return _TypedBatch(self, step).subset()


class _Drawn(NamedTuple):
    """Edges of a relation to this rank's nodes, int64 ``[m]`` each."""

    source: Tensor  # places of the ends among the known nodes
    target: Tensor
    stored: Tensor  # where each is in the edge storage of its relation


class _TypedBatch:
    """This rank's part of a step's batch, while it is drawn (collective)."""

    def __init__(self, sampling: TypedNeighborSampling, step: int) -> None:
        self.sampling, self.step, self.types = sampling, step, sampling.types
        self.start = sampling.seeds.at(step, is_disjoint=False)
        (seeds,) = self.start.seeds
        kinds = self._type_of(seeds)
        self.num_seeds = torch.bincount(kinds, minlength=len(self.types)).tolist()
        order = kinds.argsort(stable=True)
        begin = torch.tensor([0, *accumulate(self.num_seeds)])[kinds]
        self.seed_number = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel())) - begin
        is_here = torch.zeros_like(seeds, dtype=torch.bool)
        for kind, some in self._by_type(seeds).items():
            is_here[some] = sampling.rows[kind].find(at(seeds, some) - self.types[kind].start) >= 0
        first, size = [ids.start for ids in self.types.values()], sum(map(len, self.types.values()))
        self.nodes = KnownNodes(sampling.ranks, size, seeds[is_here], self.seed_number[is_here], first)

    def _type_of(self, ids: Tensor) -> Tensor:
        """The place of the type of each among all types, int64."""
        return torch.searchsorted(torch.tensor([known.stop for known in self.types.values()]), ids, right=True)

    def _by_type(self, ids: Tensor) -> dict[str, Tensor]:
        """Which of some ids are of each type."""
        kinds = self._type_of(ids)
        return {kind: (kinds == number).nonzero().view(-1) for number, kind in enumerate(self.types)}

    def _known(self, place: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Known nodes by type: their places, and their ids within the type."""
        ids = at(self.nodes.code, place)
        return {
            kind: (at(place, some), at(ids, some) - self.types[kind].start) for kind, some in self._by_type(ids).items()
        }

    def subset(self) -> TypedSubset:
        """The batch, as far as this rank has to know it."""
        sampling, nodes = self.sampling, self.nodes
        hops = [self._hop(hop) for hop in range(max(map(len, sampling.num_neighbors.values()), default=0))]
        sizes = [[drawn.stored.numel() for drawn in hop] for hop in hops]  # by hop and relation
        counts, totals = nodes.assign_numbers(self.num_seeds, [size for hop in sizes for size in hop])
        found = {}
        for (kind, (place, ids)), count in zip(self._known(torch.cat(nodes.hops)).items(), counts, strict=True):
            known = {"num_sampled_nodes": count}
            found[kind] = Subset(ids, number=at(nodes.number, place), num_nodes=sum(count), attributes=known)
        drawn = [_Drawn(*map(torch.cat, zip(*pieces, strict=True))) for pieces in zip(*hops, strict=True)]
        kept = self._kept(drawn, sizes, max((subset.size for subset in found.values()), default=0))
        of_edges: dict[EdgeType, dict[str, Any]] = {
            relation: {"num_sampled_edges": totals[k :: len(kept)]} for k, relation in enumerate(sampling.in_edges)
        }
        for name, value in self.start.attributes.items():
            self._store_of(name, found, of_edges)[name] = self.seed_number[value] if name in _NUMBERS else value
        return TypedSubset(found, dict(zip(sampling.in_edges, kept, strict=True)), of_edges)

    def _store_of(self, name: str, nodes: dict[str, Subset], edges: dict[EdgeType, dict[str, Any]]) -> Any:
        """The attributes that one of the seeds' belongs to."""
        given = self.sampling.input_type
        if not isinstance(given, str) and name not in _ENDS:
            return edges[given]
        return nodes[given if isinstance(given, str) else given[_ENDS[name]]].attributes

    def _hop(self, hop: int) -> list[_Drawn]:
        """In-edges of the nodes that the hop before has reached, by relation (collective)."""
        sampling, nodes = self.sampling, self.nodes
        reached, pieces = self._known(nodes.hops[-1]), []
        sources, owners = [nodes.code[:0]], [nodes.owner[:0]]
        for number, (relation, in_edges) in enumerate(sampling.in_edges.items()):
            place, ids = reached[relation[-1]]
            row, seed = sampling.rows[relation[-1]].local_id(ids).long(), (sampling.seed, self.step, hop, 7, number)
            count = sampling.num_neighbors[relation][hop]
            degree, column, stored = in_edges.draw(row, None, ids, count, ops.mixed_seed(*seed), sampling.replace)
            sources.append(in_edges.node_of(column) + self.types[relation[0]].start)
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
        for number, ((relation, in_edges), edges) in enumerate(zip(sampling.in_edges.items(), drawn, strict=True)):
            edge_id = in_edges.id_of(edges.stored)
            copy = copies_of(edges.stored, edges.target) if sampling.replace else None
            key, num_keys = edge_keys(
                edge_id, in_edges.num_edges, [hop[number] for hop in sizes], None, 1, copy,
                max(1, *sampling.num_neighbors[relation]),
            )  # fmt: skip
            source, target = at(nodes.number, edges.source), at(nodes.number, edges.target)
            ends.append((source + number * num_nodes, target, at(nodes.owner, edges.source)))
            alone.append(KeptEdges(edge_id, edges.stored, key, source, target, num_keys, sampling.replace))
        if group.size == 1 or not alone:
            return alone
        # One message for all relations, which are told by the sources' numbers.
        source, target, owner = (torch.cat(column) for column in zip(*ends, strict=True))
        every = crossing_edges(sampling.ranks.part, source, target, owner)
        first, found = 0, []
        of_relation = every.leaving[:, 0] // max(num_nodes, 1)
        for number, kept in enumerate(alone):
            last = first + kept.key.numel()
            inside, arriving = (((x >= first) & (x < last)).nonzero().view(-1) for x in (every.inside, every.arriving))
            told = every.leaving[of_relation == number] - torch.tensor([number * num_nodes, 0, 0])
            crossing = CrossingEdges(
                at(every.inside, inside) - first, at(every.arriving, arriving) - first, at(every.sender, arriving), told
            )
            found.append(replace(kept, crossing=crossing))
            first = last
        return found
