"""A halo graph's edges between ranks, known to both ranks: subgraphs are cut from them without communication."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Traffic, Transport
from pyg_dist.backend.on_device import on_device
from pyg_dist.halo.exchange import Exchange
from pyg_dist.halo.operators import ConstantOperator
from pyg_dist.halo.plan.restriction import RemoteLinks
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.tensor.sharding import lasting


class HaloLinks:
    """The edges between this rank and others, with both ends; one exchange with the other ranks (collective).

    Args:
        share: this rank's part.
        group: the ranks.

    Attributes:
        links: the edges.
    """

    @lasting
    def __init__(self, share: HaloShare, group: Group) -> None:
        incoming = share.row_transfer.incoming
        slot, target = incoming.col.long(), share.node_id[incoming.row() + share.num_inner]
        sender_of_slot = torch.repeat_interleave(
            torch.arange(share.num_ranks), torch.tensor(share.row_transfer.recv_counts)
        )
        order = torch.argsort(sender_of_slot[slot], stable=True)
        slot, target, place = slot[order], target[order], incoming.edge.long()[order]
        sender, source = sender_of_slot[slot], share.halo_id[slot]
        mine = torch.stack([share.edge_id[place], source, target, place], dim=1)

        counts = torch.bincount(sender, minlength=share.num_ranks)
        table = group.gather_rows(counts.view(1, -1), [1] * group.size)
        from_rank = table[:, share.rank]
        self._place = place
        self._exchange = Exchange(
            Transport(group, Traffic()), tuple(counts.tolist()), tuple(from_rank.tolist()), is_dense=True
        )
        theirs = self._exchange.start(mine[:, :3].contiguous()).wait()
        load = torch.tensor(group.gather_counts(share.edge_id.numel()))
        receiver = torch.repeat_interleave(torch.arange(share.num_ranks), from_rank)
        self.links = RemoteLinks.of(share, mine, theirs, sender, receiver, load)
        self._borrowed: WeakKeyDictionary[ConstantOperator, Tensor] = WeakKeyDictionary()

    @lasting
    def borrowed(self, operator: ConstantOperator, values: Tensor) -> Tensor:
        """The values of the edges that begin here, from the ranks that have them (collective at the first use).

        Args:
            operator: whose values they are; constant.
            values: by edge storage.
        """
        if operator not in self._borrowed:
            self._borrowed[operator] = self._exchange.start(values[on_device(self._place, values.device)]).wait()
        return self._borrowed[operator]
