"""Nodes in the halo layout: which are here, and what all graphs over them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.session.settings import Bits
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.graph.sample import Subset
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.relations import rows_in_order
from pyg_dist.halo.plan.restriction import SampledRows
from pyg_dist.halo.plan.share import LocalRows
from pyg_dist.partition.balance import owners_of_hyperedges
from pyg_dist.tensor.row_index import PickedNodes


class HaloNodes(NodeSharding):
    """Nodes by part, and what the graphs over them have in common.

    Attributes:
        exchange: what sums send.
        bits: of a value in a message, forward and backward; 32: values as they are.
        traffic: counts what all of their graphs send.
        groups: the data groups.
        ranks_per_machine: in two levels, so many consecutive ranks share what crosses to another machine.
    """

    def __init__(
        self,
        group: Group,
        node_id: Tensor,
        num_nodes: int,
        exchange: ExchangeKind,
        bits: tuple[Bits, Bits] = (32, 32),
        groups: DataGroups | None = None,
        ranks_per_machine: int | None = None,
    ) -> None:
        super().__init__(group, num_nodes, node_id)
        self.groups = DataGroups(group, None, group) if groups is None else groups
        self.exchange: ExchangeKind = exchange
        self.bits = bits
        self.ranks_per_machine = ranks_per_machine
        self.traffic = Traffic()
        self._unions: dict[tuple[int, ...], NodeSharding] = {}

    @cached_property
    def rows_by_id(self) -> LocalRows:
        """The row of each of this rank's nodes."""
        return LocalRows.of(self.global_id)

    def sampled(self, subset: Subset) -> SampledNodes:
        """Some of them, in the order of a subset (not collective)."""
        return SampledNodes(self, SampledRows.of(self.rows_by_id, subset), subset)

    def joined(self, others: Sequence[NodeSharding]) -> NodeSharding:
        name = tuple(map(id, others))
        if name not in self._unions:
            self._unions[name] = _JoinedNodes([self, *others])
        return self._unions[name]

    def hyperedges(self, incidence: Tensor, size: int) -> HaloNodes:
        parts = self.parts()
        owner = owners_of_hyperedges(incidence, parts, size, self.group.size)
        node_id = rows_in_order([parts, owner], [(0, 1, incidence)], self.group.rank)[1]
        found = HaloNodes(self.group, node_id, size, self.exchange, self.bits, self.groups, self.ranks_per_machine)
        found.traffic = self.traffic
        return found

    def seed_of_group(self, seed: int) -> int:
        """A seed of what data groups draw; where they have nodes of their own, they draw other numbers."""
        return seed


class _JoinedNodes(HaloNodes):
    """Nodes of several sets, each numbered after those of the sets before it."""

    def __init__(self, pieces: Sequence[NodeSharding]) -> None:
        first, sizes = pieces[0], [piece.size for piece in pieces]
        assert isinstance(first, HaloNodes)
        before = accumulate(sizes, initial=0)
        node_id = torch.cat([piece.global_id + number for piece, number in zip(pieces, before, strict=False)])
        super().__init__(
            first.group, node_id, sum(sizes), first.exchange, first.bits, first.groups, first.ranks_per_machine
        )
        self.traffic, self.pieces = first.traffic, pieces

    def parts(self) -> Tensor:
        return torch.cat([piece.parts() for piece in self.pieces])  # type: ignore[attr-defined]


class SampledNodes(HaloNodes):
    """Sampled nodes. They are numbered by their places in the sample, and keyed as in the graph.

    Where data groups have samples of their own, the rows are those of the union of all.
    """

    counts_selections = False  # each batch has masks of its own, and a step would wait for their numbers

    def __init__(self, parent: HaloNodes, rows: SampledRows, sample: Subset) -> None:
        union = sample.group
        key = rows.number if sample.repeats else parent.rng_key.index_select(0, rows.row)
        self._sample = sample
        if union is None:
            super().__init__(parent.group, key, sample.size, parent.exchange, parent.bits, parent.groups)
        else:  # groups draw other numbers for a node
            key = key + union.index * parent.num_rng_keys
            super().__init__(parent.groups.everyone, key, sample.size, parent.exchange, parent.bits)
        self.parent, self.rows = parent, rows
        self._place = rows.number + self.first
        self.traffic = parent.traffic

    def picked(self, device: torch.device) -> PickedNodes:
        """``n_id``: the nodes' global ids, over these rows."""
        row = self.rows.row
        ids = self.parent.global_id.index_select(0, row).to(device)
        picked = PickedNodes.of(ids, self, self.parent, row)
        picked.listed = self.rows.listed
        picked.replicas = self.parent.groups.data if self.is_union else None
        return picked

    @property
    def position(self) -> Tensor:
        """The place of each local node in the sample, or in the union of all groups' samples."""
        return self._place

    @property
    def first(self) -> int:
        return self._sample.first

    @property
    def sample(self) -> Subset:
        return self._sample

    @property
    def is_union(self) -> bool:
        return self._sample.group is not None

    def seed_of_group(self, seed: int) -> int:
        return seed if self._sample.group is None else ops.mixed_seed(seed, self._sample.group.index)

    @property
    def global_id(self) -> Tensor:
        """See :attr:`position`: it is what the batch's ``edge_index`` has."""
        return self._place

    @property
    def num_rng_keys(self) -> int:
        of_groups = self.parent.num_rng_keys * (1 if self._sample.group is None else self._sample.group.index + 1)
        return max(of_groups, self.size)
