"""``HaloLinks``: the edges between a rank, or its machine, and others, from which batches are cut."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.transport import Traffic, Transport
from pyg_dist.backend.on_device import on_device
from pyg_dist.halo.exchange import exchange_of
from pyg_dist.halo.operator import LinearOperator
from pyg_dist.halo.plan.links import MachineLinks, RemoteLinks
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.tensor.sharding import lasting


class HaloLinks:
    """The edges between this rank and others, with both ends; one exchange with the other ranks (collective).

    ``links`` are the edges; ``of_machine``, in two levels, those between this rank's machine and others.
    """

    @lasting
    def __init__(self, share: HaloShare, group: Group) -> None:
        incoming = share.row_transfer.incoming
        slot, target = incoming.col.long(), share.node_id[incoming.row() + share.num_inner]
        sender_of_slot = share.halo_owner.long()
        order = torch.argsort(sender_of_slot[slot], stable=True)
        slot, target, place = slot[order], target[order], incoming.edge.long()[order]
        sender, source = sender_of_slot[slot], share.halo_id[slot]
        mine = torch.stack([share.edge_id[place], source, target, place], dim=1)

        counts = torch.bincount(sender, minlength=share.num_ranks)
        from_rank = group.gather_rows(counts.view(1, -1), [1] * group.size)[:, share.rank]
        lists = tuple(counts.tolist()), tuple(from_rank.tolist())
        self._place = place
        self._exchange = exchange_of(Transport(group, Traffic()), *lists, num_messages=group.size**2)
        theirs = self._exchange.start(mine[:, :3]).wait()
        load = host.tensor(group.gather_counts(share.edge_id.numel()))
        receiver = torch.repeat_interleave(host.arange(share.num_ranks), from_rank)
        self.links = RemoteLinks.of(share, mine, theirs, sender, receiver, load)
        self.of_machine = None
        if share.ranks_per_machine is not None:
            into, out_of = torch.cat([mine[:, :3], sender.view(-1, 1)], 1), torch.cat([theirs, receiver.view(-1, 1)], 1)
            self.of_machine = _links_of_machine(share, group, into, out_of, load)
        self._remote_weights: WeakKeyDictionary[LinearOperator, Tensor] = WeakKeyDictionary()

    @lasting
    def remote_weights(self, operator: LinearOperator, values: Tensor) -> Tensor:
        """The operator's ``values``, by edge storage, of the edges that begin here (collective at the first use)."""
        if operator not in self._remote_weights:
            places = on_device(self._place, values.device)
            self._remote_weights[operator] = self._exchange.start(values[places]).wait()
        return self._remote_weights[operator]


def _links_of_machine(share: HaloShare, group: Group, into: Tensor, out_of: Tensor, load: Tensor) -> MachineLinks:
    """The edges between all ranks of this machine and other machines (collective).

    ``into`` and ``out_of`` are this rank's remote edges: id, source, target, and the other rank, int64 ``[m, 4]``.
    """
    on_each, own = share.ranks_per_machine, share.rank
    assert on_each is not None
    edges = torch.cat([into, out_of])
    ends = host.full((2, len(edges)), own)
    ends[0, : len(into)], ends[1, len(into) :] = into[:, 3], out_of[:, 3]
    crosses = ends[0] // on_each != ends[1] // on_each
    mine = torch.cat([edges[crosses, :3], ends[:, crosses].T], 1)
    shares = [q // on_each == own // on_each for q in range(group.size)]
    whole = IdLists(group).send(mine.repeat(sum(shares), 1), [len(mine) * is_near for is_near in shares])
    edge, source, target, sender, receiver = whole.unbind(1)
    return MachineLinks.of(edge, (source, target), (sender, receiver), share, load)
