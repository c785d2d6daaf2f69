"""The plan of a graph with types: one for each relation, over parts that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.session.agreement import digest
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy, LevelCounts, shares_machines
from pyg_dist.halo.plan.plan import Plan, hash_of_digests, machine_with, pairs_of
from pyg_dist.pricing.base import aligned, fold, imbalance
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model

Relation = tuple[str, str, str]


@dataclass(frozen=True)
class HeteroPlan:
    """The plan of one ``DistributedData(HeteroData)``, equal on every rank. Nothing here is collective.

    Attributes:
        nodes_of: nodes by rank, of each type.
        relations: the plan of each relation; its ``sizes`` count the nodes of the targets' type.
        parts: the owner of each node, types one after another, ``[N]`` integers; on rank 0 only.
    """

    nodes_of: dict[str, list[int]]
    relations: dict[Relation, Plan]
    parts: Tensor | None = field(default=None, compare=False, repr=False)
    layout = "halo"  # the one that knows types

    @staticmethod
    def of(
        relations: Mapping[Relation, Tensor],
        parts: Mapping[str, Tensor],
        num_ranks: int,
        exchange: ExchangeKind = "hybrid",
        partition: str = "given",
        ranks_per_node: int | None = None,
        hierarchy: Hierarchy = "auto",
        machine: Machine | None = None,
    ) -> HeteroPlan:
        """The plan for any number of ranks, in this process. Not collective, O(E log E) time.

        Args:
            relations: the edges of each, int64 ``[2, E]``.
            parts: the owner of each node, ``[N]`` integers, by type.
            num_ranks: how many ranks.
            exchange: what sums send.
            partition: how the parts were made.
            ranks_per_node: ranks that share a machine; ``None``: it is not known.
            hierarchy: the levels of what crosses machines; "auto": for each relation the cheaper ones.
            machine: whose constants that goes by; ``None``: those measured here, or the defaults.

        Example:
            >>> edges = {("user", "buys", "item"): torch.tensor([[0, 1, 2], [0, 0, 1]])}
            >>> plan = HeteroPlan.of(edges, {"user": torch.tensor([0, 0, 1]), "item": torch.tensor([1, 1])}, 2)
            >>> plan.nodes, plan.rows
            ([2, 3], {'post': 2, 'pre': 1, 'hybrid': 1})
        """
        machine = machine_with(machine, ranks_per_node)
        plans = {}
        for relation, edge_index in relations.items():
            of_sources, of_targets = (parts[kind].long() for kind in (relation[0], relation[-1]))
            both = of_targets if relation[0] == relation[-1] else (of_sources, of_targets)
            counts = LevelCounts.of(edge_index, both, num_ranks, ranks_per_node)
            model = Model.of_layers(of_targets.numel(), edge_index.shape[1], None, None)
            found = counts.chosen(exchange, hierarchy, model, machine)
            plans[relation] = Plan(
                "halo", partition, exchange, found.sizes, pairs_of(found.rows),
                relation_hash(edge_index, of_sources, of_targets, num_ranks, exchange), ranks_per_node=ranks_per_node,
                two_levels=found.two_levels, across=counts.across,
            )  # fmt: skip
        nodes = {kind: torch.bincount(owner, minlength=num_ranks).tolist() for kind, owner in parts.items()}
        return HeteroPlan(nodes, plans, torch.cat([owner.int() for owner in parts.values()]))

    @property
    def hash(self) -> str:
        """Digest of all that the plan depends on; equal plans have equal hashes."""
        return digest(repr((self.nodes_of, [(relation, plan.hash) for relation, plan in self.relations.items()])))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(next(iter(self.nodes_of.values()), [0]))

    @property
    def nodes(self) -> list[int]:
        """Nodes owned, of all types, by rank."""
        return [sum(counts) for counts in zip(*self.nodes_of.values(), strict=True)]

    @property
    def edges(self) -> list[int]:
        """Edges by rank, of all relations."""
        return [sum(plan.sizes[rank].edges for plan in self.relations.values()) for rank in range(self.ranks)]

    @property
    def rows(self) -> dict[str, int]:
        """Rows sent in one aggregation over each relation, all ranks together, by kind of exchange."""
        return {kind: sum(plan.rows[kind] for plan in self.relations.values()) for kind in EXCHANGES}

    @property
    def messages(self) -> int:
        """Messages of one aggregation over each relation, all ranks together."""
        return sum(plan.messages for plan in self.relations.values())

    def halo_bytes(self, width: int) -> int:
        """Bytes sent in one aggregation of ``width`` columns over each relation, forward, all ranks together."""
        return sum(plan.halo_bytes(width) for plan in self.relations.values())

    def to_dict(self, widths: Sequence[int] = ()) -> dict[str, object]:
        """Plain numbers for programs; ``bytes`` is by width, of one aggregation over each relation."""
        return {
            "ranks": self.ranks,
            "layout": self.layout,
            "hash": self.hash,
            "nodes": self.nodes,
            "edges": self.edges,
            "rows": self.rows,
            "messages": self.messages,
            "bytes": {str(width): self.halo_bytes(width) for width in widths},
            "nodes_of": self.nodes_of,
            "relations": {
                "__".join(relation): {
                    "edges": [sizes.edges for sizes in plan.sizes], "rows": plan.rows, "messages": plan.messages,
                    "hash": plan.hash, "levels": 1 + plan.two_levels, "rows_between_nodes": plan.rows_between_nodes(),
                }
                for relation, plan in self.relations.items()
            },
        }  # fmt: skip

    def __str__(self) -> str:
        """The text of :meth:`describe`."""
        return self.describe()

    def describe(self, widths: Sequence[int] = ()) -> str:
        """Two tables for people: the nodes of each type, and the edges and rows of each relation."""
        plans = list(self.relations.values())
        title = "halo layout"
        if plans:
            title += f", {plans[0].partition} partition, {plans[0].exchange} exchange"
        of_types = [
            [kind, f"{sum(counts):,}", f"{max(counts):,}", f"{imbalance(counts):.2f}"]
            for kind, counts in self.nodes_of.items()
        ]
        header, of_relations = ["relation", "edges", "max/mean", *(f"rows {kind}" for kind in EXCHANGES)], []
        shares = any(shares_machines(self.ranks, plan.ranks_per_node) for plan in plans)
        if shares:
            header += ["levels", "rows that leave a machine"]
        for relation, plan in self.relations.items():
            edges = [sizes.edges for sizes in plan.sizes]
            rows = [f"{plan.rows[kind]:,}" for kind in EXCHANGES]
            of_relations.append([" ".join(relation), f"{sum(edges):,}", f"{imbalance(edges):.2f}", *rows])
            if shares:
                of_relations[-1] += [f"{1 + plan.two_levels}", f"{plan.rows_between_nodes():,}"]
        lines = [
            f"{title}, plan {self.hash[:12]}, {self.ranks} ranks",
            *aligned([["type", "nodes", "most of a rank", "max/mean"], *of_types], left=(0,)),
            *aligned([header, *of_relations], left=(0,)),
            *(f"width {w}: {self.halo_bytes(w):,} bytes per aggregation over each relation" for w in widths),
        ]
        return fold("\n".join(lines))


def relation_hash(
    edge_index: Tensor, of_sources: Tensor, of_targets: Tensor, num_ranks: int, exchange: ExchangeKind
) -> str:
    """Digest of all that the plan of a relation depends on: edges, owners of both ends, ranks, exchange."""
    owners = [digest(owner.to(torch.int32)) for owner in (of_sources, of_targets)]
    return hash_of_relation(digest(edge_index), owners, num_ranks, exchange)


def hash_of_relation(edges: str, owners: Sequence[str], num_ranks: int, exchange: ExchangeKind) -> str:
    """The same from the digests of the edges and of the owners of both ends."""
    return hash_of_digests(edges, digest(repr(list(owners))), num_ranks, exchange)


def rows_in_order(parts: Sequence[Tensor], relations: Sequence[tuple[int, int, Tensor]], rank: int) -> list[Tensor]:
    """A rank's rows of each type of nodes: those without sources on other ranks first, int64 ``[n]`` each.

    Of any relation: its own order would be better for one that has fewer of them, but rows have one order.

    ``relations`` have the numbers of the types of sources and targets, and the edges, int64 ``[2, E]``.
    """
    on_boundary = [host.zeros(owner.numel(), dtype=torch.bool) for owner in parts]
    for source, target, edge_index in relations:
        is_remote = parts[source][edge_index[0]] != parts[target][edge_index[1]]
        on_boundary[target][edge_index[1, is_remote]] = True
    own = [owner == rank for owner in parts]
    return [
        torch.cat([host.flatnonzero(mine & ~late), host.flatnonzero(mine & late)])
        for mine, late in zip(own, on_boundary, strict=True)
    ]
