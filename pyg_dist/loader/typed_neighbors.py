"""Neighbour sampling in graphs of several types: some in-edges of each node and relation, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.backend import ops
from pyg_dist.graph.sample import KeptEdges, Subset, TypedSubset
from pyg_dist.halo.plan.share import LocalRows
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import KnownNodes
from pyg_dist.loader.neighbors import Drawn, HopSampling, at, kept_edges

_ENDS = {"src_index": 0, "dst_pos_index": -1, "dst_neg_index": -1}
"""Attributes of the seeds that belong to the type at an end of their relation."""

_NUMBERS = ("edge_label_index", *_ENDS)
"""Those that number nodes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedNeighborSampling(HopSampling):
    """That of a graph with several types of nodes.

    A hop draws, for each relation, in-edges of the nodes of its targets' type that the hop before has reached.
    All relations of a hop share one message between two ranks. Nodes stand by their ids, counted through all types; in
    the batch those of a type are numbered by hop, seeds first, then ascending.
    """

    in_edges: Mapping[EdgeType, InEdges]  # of this rank's nodes, ids counted within types
    rows: Mapping[str, LocalRows]  # this rank's nodes
    types: Mapping[str, range]  # ids of each type's nodes, counted through all types, as the seeds' are
    input_type: str | EdgeType  # of the seeds: a type, or a relation whose ends they are
    num_neighbors: Mapping[EdgeType, tuple[int, ...]]  # in-edges of a node by hop; -1: all

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "input_type": str(self.input_type), "num_nodes": {kind: len(ids) for kind, ids in self.types.items()},
            "num_neighbors": {"__".join(key): list(counts) for key, counts in self.num_neighbors.items()},
            "is_weighted": ["__".join(key) for key, edges in self.in_edges.items() if edges.weight is not None],
        }  # fmt: skip

    def sample(self, step: int) -> TypedSubset:
        return _TypedBatch(self, step).subset()


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
        drawn = [Drawn.joined(pieces) for pieces in zip(*hops, strict=True)]
        kept = self._kept(drawn, sizes)
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

    def _hop(self, hop: int) -> list[Drawn]:
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
        return [Drawn(source, *piece) for source, piece in zip(split, pieces, strict=True)]

    def _kept(self, drawn: list[Drawn], sizes: list[list[int]]) -> list[KeptEdges]:
        """The edges of each relation, by hop (collective)."""
        sampling, nodes = self.sampling, self.nodes
        if not drawn:
            return []
        ends = Drawn.joined(drawn)
        crossing = nodes.tell(ends.source, ends.target, [len(edges.stored) for edges in drawn], numbers=True)
        found = []
        for number, (relation, in_edges) in enumerate(sampling.in_edges.items()):
            edges = drawn[number]
            counts = sampling.num_neighbors[relation] if sampling.replace else None
            both = at(nodes.number, edges.source), at(nodes.number, edges.target)
            of_hops = [hop[number] for hop in sizes]
            found.append(kept_edges(in_edges, edges, both, of_hops, counts, crossing[number]))
        return found
