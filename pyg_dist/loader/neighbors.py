"""Neighbour sampling: some in-edges of each node, hop by hop, drawn by the owners of the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.agreement import digest
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import DataError
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.graph.sample import KeptEdges, Subset

SubgraphType = Literal["directional", "induced", "bidirectional"]


@dataclass(frozen=True, eq=False)
class InEdges:
    """The in-edges of a rank's nodes, those of one node in the graph's order.

    Attributes:
        node_id: the nodes, ascending, int64 ``[n]``; ``None``: all nodes of the graph, by row.
        row: the row of each, int64 ``[n]``.
        rowptr: int64 ``[n + 1]``.
        col: which of ``source_id`` each edge's source is, int32 ``[e]``.
        edge_id: places in the graph's order, int64 ``[e]``; ``None``: in that of the entries.
        source_id: global ids, int64.
    """

    node_id: Tensor | None
    row: Tensor
    rowptr: Tensor
    col: Tensor
    edge_id: Tensor | None
    source_id: Tensor | None

    @staticmethod
    def of(graph: DistributedGraph) -> InEdges:
        """Those of a graph over ranks (collective)."""
        view = graph.edge_view
        csr, ids = view.csr.on_host, view.neighbour_id.cpu()
        node_id, row = ids[: view.num_local].sort()
        graph.edge_sharding.ordered_position  # noqa: B018  of which batches take theirs, in a thread
        return InEdges(node_id, row, csr.rowptr, csr.col, view.edge_sharding.position[csr.edge.long()], ids)

    @staticmethod
    def of_edge_index(edge_index: Tensor, num_nodes: int) -> InEdges:
        """Those of a plain graph."""
        source, target = edge_index.cpu()
        csr = CSR.from_edges(target, source, None, num_nodes, num_nodes)
        return InEdges(
            None, torch.arange(0), csr.rowptr, csr.col, None if csr.place is None else csr.place.long(), None
        )

    def find(self, node: Tensor) -> Tensor:
        """The row of each node, or -1 where another rank has it."""
        if self.node_id is None:
            return node
        at = ops.find_sorted(self.node_id, node)
        return self.row[at].masked_fill_(at < 0, -1) if self.row.numel() else at

    def draw(self, row: Tensor, key: Tensor, count: int, seed: int, replace: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Some in-edges of rows: which of the rows, the source and the id of each.

        Shapes:
            - row, key: int64 ``[k]``
            - output: int64 ``[m]`` each
        """
        starts, entry = ops.sample_rows(self.rowptr, row, key, count, seed, replace and count >= 0)
        source = self.col[entry].long()
        source = source if self.source_id is None else self.source_id[source]
        of_row = torch.repeat_interleave(torch.arange(row.numel()), starts.diff())
        return of_row, source, entry if self.edge_id is None else self.edge_id[entry]


class Seeds(Protocol):
    """What batches begin with, by step."""

    @property
    def num_steps(self) -> int:
        """Of an epoch."""

    @property
    def options(self) -> dict[str, Any]:
        """What they follow from."""

    def at(self, step: int) -> tuple[Tensor, dict[str, Any]]:
        """Distinct ids of nodes, int64, and attributes of the batch."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Which of ``size`` inputs each step has.

    Attributes:
        size: inputs of an epoch.
        batch_size: of a step.
        shuffle: whether each epoch has a permutation of its own.
        drop_last: whether an epoch leaves out what fills no batch.
        seed: of the permutations.
    """

    size: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    @property
    def num_steps(self) -> int:
        """Of an epoch."""
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def at(self, step: int) -> Tensor:
        """Numbers of inputs, int64."""
        epoch, k = divmod(step, self.num_steps)
        place = torch.arange(k * self.batch_size, min((k + 1) * self.batch_size, self.size))
        if not self.shuffle:
            return place
        return ops.keyed_permutation(place, self.size, ops.mixed_seed(self.seed, epoch, self.size, 4))

    @property
    def options(self) -> dict[str, Any]:
        """What they follow from."""
        return {
            "seed": self.seed, "batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class NodeSeeds:
    """Input nodes, distinct, int64 ``[n]``."""

    steps: Steps
    node: Tensor

    @property
    def num_steps(self) -> int:
        """See :class:`Seeds`."""
        return self.steps.num_steps

    @property
    def options(self) -> dict[str, Any]:
        """See :class:`Seeds`."""
        return {**self.steps.options, "input_nodes": digest(self.node)}

    def at(self, step: int) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`Seeds`."""
        input_id = self.steps.at(step)
        return self.node[input_id], {"batch_size": input_id.numel(), "input_id": input_id}


@dataclass(frozen=True, eq=False)
class NeighborSampling:
    """Batches of nodes that are reached from seeds along drawn edges.

    A :class:`~pyg_dist.loader.sampler.Sampler`. Which in-edges of a node are kept is a function of the seed, the step,
    the hop and the node. The owner of a node draws them; each hop sends what was drawn to all ranks of the graph, so
    every rank knows the whole batch: O(edges of the batch) memory and messages.

    Nodes are numbered by hop, seeds first as they are given, then ascending. In a disjoint batch a node is one for
    each seed, and stands by the number ``seed's place * N + node``.

    Attributes:
        in_edges: of this rank's nodes.
        num_nodes: N.
        group: the ranks of the graph.
        seeds: what batches begin with.
        num_neighbors: in-edges of a node by hop; -1: all.
        seed: of the draws.
        subgraph_type: which edges a batch has.
        replace: whether an edge may be drawn several times.
        disjoint: whether each seed has nodes of its own.
    """

    in_edges: InEdges
    num_nodes: int
    group: Group | None
    seeds: Seeds
    num_neighbors: tuple[int, ...]
    seed: int
    subgraph_type: SubgraphType = "directional"
    replace: bool = False
    disjoint: bool = False

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
        }  # fmt: skip

    def prepare(self, step: int) -> Subset | None:
        """The subset, where hops send messages (collective)."""
        return None if self.group is None or self.group.size == 1 else self._subset(step)

    def sample(self, step: int, prepared: Subset | None) -> Subset:
        """See :class:`~pyg_dist.loader.sampler.Sampler`."""
        return self._subset(step) if prepared is None else prepared

    def _subset(self, step: int) -> Subset:
        seeds, attributes = self.seeds.at(step)
        if self.disjoint:
            seeds = torch.arange(seeds.numel()) * self.num_nodes + seeds
        nodes, edges = _Numbered(seeds), []
        for hop, count in enumerate(self.num_neighbors):
            first, last = nodes.first_of_hop[-1], len(nodes)
            edges.append(self._drawn(nodes, first, last, count, ops.mixed_seed(self.seed, step, hop, 5)))
            nodes.add(edges[-1].source)
        node_id = nodes.code % self.num_nodes if self.disjoint else nodes.code
        known: dict[str, Any] = {
            "num_sampled_nodes": nodes.counts,
            "num_sampled_edges": [len(drawn) for drawn in edges],
        }
        if self.subgraph_type != "directional":
            edges = [self._other_edges(nodes, _Drawn.joined(edges))]
            del known["num_sampled_edges"]
        of_nodes = {"batch": nodes.code // self.num_nodes} if self.disjoint else {}
        kept = _Drawn.joined(edges).numbered(nodes, self._owners(node_id), self.disjoint or self.replace)
        return Subset(node_id, kept, attributes={**attributes, **known}, node_attributes=of_nodes)

    def _drawn(self, nodes: _Numbered, first: int, last: int, count: int, seed: int) -> _Drawn:
        """In-edges of the nodes with numbers from ``first`` to ``last`` (collective)."""
        return self._gathered(self._own(nodes, first, last, count, seed))

    def _own(self, nodes: _Numbered, first: int, last: int, count: int, seed: int) -> _Drawn:
        """Those of this rank's nodes."""
        code = nodes.code[first:last]
        row = self.in_edges.find(code % self.num_nodes if self.disjoint else code)
        here = (row >= 0).nonzero().view(-1)
        of_row, source, edge_id = self.in_edges.draw(row[here], code[here], count, seed, self.replace)
        number = here[of_row]
        if self.disjoint:
            source = source + code[number] // self.num_nodes * self.num_nodes
        return _Drawn(edge_id, source, number + first)

    def _gathered(self, own: _Drawn) -> _Drawn:
        """Those of all ranks, by target (collective)."""
        if self.group is None or self.group.size == 1:
            return own
        table = self.group.gather_rows(own.table, self.group.gather_counts(len(own)))
        return _Drawn.of_table(table[table[:, 2].argsort(stable=True)])  # those of one target come from one rank

    def _other_edges(self, nodes: _Numbered, drawn: _Drawn) -> _Drawn:
        """All edges between the nodes, or those that were drawn and their opposites (collective)."""
        own = self._own(nodes, 0, len(nodes), -1, 0)
        source = nodes.find(own.source)
        if self.subgraph_type == "induced":
            return self._gathered(own.some(source >= 0))
        size = len(nodes)
        forward = torch.unique(nodes.find(drawn.source) * size + drawn.target)
        backward = torch.unique(drawn.target * size + nodes.find(drawn.source))
        pair = torch.where(source >= 0, source * size + own.target, -1)
        is_drawn, is_opposite = (ops.find_sorted(pairs, pair) >= 0 for pairs in (forward, backward))
        if not self.replace:  # a parallel of an edge that was drawn is not one
            ids = drawn.edge_id.sort().values
            is_drawn &= ops.find_sorted(ids, own.edge_id) >= 0
        found = self._gathered(own.some(is_drawn | is_opposite))
        pairs = torch.unique(nodes.find(found.source) * size + found.target)
        if bool((ops.find_sorted(pairs, backward) < 0).any()):
            raise DataError(
                "Expected an undirected graph for subgraph_type='bidirectional' (got an edge without its opposite): "
                "use T.ToUndirected() before, or subgraph_type='directional'"
            )
        return found

    def _owners(self, node_id: Tensor) -> Tensor:
        """The rank of each node (collective)."""
        owner = torch.zeros(node_id.numel(), dtype=torch.int64)
        if self.group is None or self.group.size == 1:
            return owner
        number = (self.in_edges.find(node_id) >= 0).nonzero().view(-1)
        counts = self.group.gather_counts(number.numel())
        owner[self.group.gather_rows(number, counts)] = torch.repeat_interleave(
            torch.arange(self.group.size), torch.tensor(counts)
        )
        return owner


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Edges: id, source's code, target's number; int64 ``[m]`` each."""

    edge_id: Tensor
    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return self.edge_id.numel()

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.edge_id, self.source, self.target))

    @property
    def table(self) -> Tensor:
        return torch.stack(list(self), dim=1)

    @staticmethod
    def of_table(table: Tensor) -> _Drawn:
        return _Drawn(*table.t().contiguous())

    @staticmethod
    def joined(hops: Sequence[_Drawn]) -> _Drawn:
        none = torch.empty(0, dtype=torch.int64)
        return (
            _Drawn(*(torch.cat([none, *pieces]) for pieces in zip(*hops, strict=True))) if hops else _Drawn(*[none] * 3)
        )

    def some(self, mask: Tensor) -> _Drawn:
        return _Drawn(*(values[mask] for values in self))

    def numbered(self, nodes: _Numbered, owner: Tensor, repeats: bool) -> KeptEdges:
        order = self.edge_id.argsort(stable=True)
        source = nodes.find(self.source[order])
        return KeptEdges(self.edge_id[order], source, self.target[order], owner, repeats)


class _Numbered:
    """Nodes in the order in which hops reach them, ascending in each hop.

    Attributes:
        code: what stands for each.
        first_of_hop: the number of the first one of each hop.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.code, self.first_of_hop = seeds, [0]
        self._sorted, self._number = seeds.sort()

    def __len__(self) -> int:
        return self.code.numel()

    @property
    def counts(self) -> list[int]:
        """By hop."""
        return [b - a for a, b in zip(self.first_of_hop, [*self.first_of_hop[1:], len(self)], strict=True)]

    def find(self, code: Tensor) -> Tensor:
        """The number of each, or -1."""
        at = ops.find_sorted(self._sorted, code)
        return self._number[at].masked_fill_(at < 0, -1) if len(self) else at

    def add(self, code: Tensor) -> None:
        """Number those that are new: a hop."""
        self.first_of_hop.append(len(self))
        self.code = torch.cat([self.code, torch.unique(code[self.find(code) < 0])])
        self._sorted, self._number = self.code.sort()
