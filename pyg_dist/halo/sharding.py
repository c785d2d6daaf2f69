"""Nodes in the halo layout: which are here, and what all graphs over them have in common."""

from __future__ import annotations

from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.session.settings import Bits
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.halo.plan.cover import ExchangeKind


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

    @property
    def first(self) -> int:
        """The number of the first node of this data group, where the groups have nodes of their own."""
        return 0

    def seed_of_group(self, seed: int) -> int:
        """A seed of what data groups draw; where they have nodes of their own, they draw other numbers."""
        return seed
