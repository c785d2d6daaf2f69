"""Nodes in the halo layout: which are here, and what all graphs over them have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.comm.buffers import Buffers
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.quantized import Bits
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.layout.graph import NodeSharding
from pyg_dist.plan.halo.remote_edges import Exchange
from pyg_dist.tensor.sharding import lasting


class HaloNodes(NodeSharding):
    """Nodes by part, and what the graphs over them have in common.

    Attributes:
        exchange: what sums send.
        bits: of a value in a message, forward and backward; 32: values as they are.
        traffic: counts what all of their graphs send.
        buffers: of all of their messages.
    """

    def __init__(
        self, group: Group, node_id: Tensor, num_nodes: int, exchange: Exchange, bits: tuple[Bits, Bits] = (32, 32)
    ) -> None:
        super().__init__(group, num_nodes, node_id)
        self.exchange: Exchange = exchange
        self.bits = bits
        self.traffic = Traffic()
        self.buffers = Buffers()

    def to(self, device: torch.device | str) -> HaloNodes:
        """The same nodes on another device."""
        return HaloNodes(self.group, self.global_id.to(device), self.size, self.exchange, self.bits)

    @lasting
    def parts(self) -> Tensor:
        """The owner of every node, int64 ``[N]`` (collective)."""
        owner = torch.repeat_interleave(torch.arange(self.group.size), torch.tensor(self.counts))
        return torch.empty_like(owner).scatter_(0, self.group.gather_rows(self.global_id, self.counts).cpu(), owner)
