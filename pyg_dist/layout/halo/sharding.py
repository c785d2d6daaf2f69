"""Nodes in the halo layout: which are here, and what all graphs over them have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.buffers import Buffers
from pyg_dist.backend.comm.data_groups import DataGroups
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.quantized import Bits
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.layout.graph import NodeSharding
from pyg_dist.plan.halo.remote_edges import Exchange
from pyg_dist.plan.sample import Sample
from pyg_dist.tensor.sharding import lasting


class HaloNodes(NodeSharding):
    """Nodes by part, and what the graphs over them have in common.

    Attributes:
        exchange: what sums send.
        bits: of a value in a message, forward and backward; 32: values as they are.
        traffic: counts what all of their graphs send.
        buffers: of all of their messages.
        groups: the data groups.
    """

    def __init__(
        self,
        group: Group,
        node_id: Tensor,
        num_nodes: int,
        exchange: Exchange,
        bits: tuple[Bits, Bits] = (32, 32),
        groups: DataGroups | None = None,
    ) -> None:
        super().__init__(group, num_nodes, node_id)
        self.groups = DataGroups(group, None, group) if groups is None else groups
        self.exchange: Exchange = exchange
        self.bits = bits
        self.traffic = Traffic()
        self.buffers = Buffers()

    @property
    def first(self) -> int:
        """The number of the first node of this data group, where the groups have nodes of their own."""
        return 0

    def seed_of_group(self, seed: int) -> int:
        """A seed of what data groups draw; where they have nodes of their own, they draw other numbers."""
        return seed

    @lasting
    def parts(self) -> Tensor:
        """The owner of every node, int64 ``[N]`` (collective)."""
        owner = torch.repeat_interleave(torch.arange(self.group.size), torch.tensor(self.counts))
        return torch.empty_like(owner).scatter_(0, self.group.gather_rows(self.global_id, self.counts), owner)


class SampledNodes(HaloNodes):
    """Sampled nodes. They are numbered by their places in the sample, and keyed as in the graph.

    Args:
        parent: the graph's nodes.
        row: the local ones among them, int64 ``[b]``.
        place: their places in the sample, int64 ``[b]``.
        sample: the sample. Where data groups have samples of their own, the rows are those of the union of all.
    """

    counts_selections = False  # each batch has masks of its own, and a step would wait for their numbers

    def __init__(self, parent: HaloNodes, row: Tensor, place: Tensor, sample: Sample) -> None:
        union, key = sample.group, parent.rng_key.index_select(0, row)
        self._sample, self._own_place = sample, place
        if union is None:
            size = sample.node_id.numel()
            super().__init__(parent.group, key, size, parent.exchange, parent.bits, parent.groups)
        else:  # groups draw other numbers for a node
            key = key + union.index * parent.num_rng_keys
            super().__init__(parent.groups.everyone, key, union.size, parent.exchange, parent.bits)
        self.parent, self.row = parent, row
        self._place = place + self.first
        self.traffic, self.buffers = parent.traffic, parent.buffers

    @property
    def position(self) -> Tensor:
        """The place of each local node in the sample, or in the union of all groups' samples."""
        return self._place

    @property
    def first(self) -> int:
        """See :class:`~pyg_dist.layout.halo.sharding.HaloNodes`."""
        return 0 if self._sample.group is None else self._sample.group.first

    @property
    def sample(self) -> Sample:
        """See :class:`~pyg_dist.layout.graph.NodeSharding`."""
        return self._sample

    @property
    def is_union(self) -> bool:
        """See :class:`~pyg_dist.layout.graph.NodeSharding`."""
        return self._sample.group is not None

    def seed_of_group(self, seed: int) -> int:
        """See :class:`~pyg_dist.layout.halo.sharding.HaloNodes`."""
        return seed if self._sample.group is None else ops.mixed_seed(seed, self._sample.group.index)

    @property
    def global_id(self) -> Tensor:
        """See :attr:`position`: it is what the batch's ``edge_index`` has."""
        return self._place

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self.parent.num_rng_keys * (1 if self._sample.group is None else self._sample.group.index + 1)
