"""The quantized exchange of any number of ranks in one process: every rank's product of three, side by side.

The matrices of all ranks' shares are laid into one matrix each, over all nodes and all slots, and a permutation stands
for the exchange. Kernels, slots, keys and codecs are those of the distributed run, so the values are, too.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.backend.comm.buffers import Buffers
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Messages, Transport
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.halo.aggregate import LinearOperator
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.transfer import HaloTransfer

Keys = tuple[Tensor, Tensor]


class EmulatedExchange:
    """Moves rows from the send slots of all ranks to their receive slots."""

    def __init__(self, order: Tensor) -> None:
        self.order = order
        self.num_sent = self.num_received = order.numel()
        self.buffers = Buffers()

    @property
    def arrivals(self) -> tuple[tuple[int, int, int], ...]:
        """All rows arrive as one message, of no sender."""
        return ((-1, 0, self.num_received),) if self.num_received else ()

    transport = Transport(Group())
    """Of one rank, which talks to nobody."""

    @cached_property
    def transposed(self) -> EmulatedExchange:
        """The way back."""
        return EmulatedExchange(torch.argsort(self.order))

    def start(self, rows: Tensor, received: Tensor) -> Messages:
        """See :class:`pyg_dist.halo.exchange.Exchange`."""
        torch.index_select(rows, 0, self.order, out=received)
        return Messages(received, rows)


class EmulatedMean:
    """The mean over in-neighbours as so many ranks compute it, and the keys of its slots.

    Attributes:
        operator: exact until its messages are ``coded``.
        keys: by direction.
    """

    def __init__(self, local: CSR, outgoing: CSR, order: Tensor, incoming: CSR, degree: Tensor, keys: Keys) -> None:
        halo = HaloTransfer(Matrix(outgoing), EmulatedExchange(order), Matrix(incoming))  # type: ignore[arg-type]
        self.operator = LinearOperator(Matrix(local), halo, row_scale=degree.float().reciprocal())
        self.degree, self.keys = degree, keys

    @classmethod
    def of(cls, edge_index: Tensor, parts: Tensor, num_ranks: int) -> EmulatedMean:
        """All nodes' means, with the slots that the package's plan has."""
        shares = [halo_share(edge_index, parts, rank, num_ranks) for rank in range(num_ranks)]
        num_nodes = parts.numel()
        sent = [0, *accumulate(sum(share.sum_transfer.send_counts) for share in shares)]
        received = [0, *accumulate(sum(share.sum_transfer.recv_counts) for share in shares)]
        local = [_placed(s.local, s.node_id, s.node_id) for s in shares]
        outgoing = [
            _placed(s.sum_transfer.outgoing, torch.arange(sent[r], sent[r + 1]), s.node_id)
            for r, s in enumerate(shares)
        ]
        incoming = [
            _placed(s.sum_transfer.incoming, s.node_id[s.num_inner :], torch.arange(received[r], received[r + 1]))
            for r, s in enumerate(shares)
        ]
        keys = (
            torch.cat([share.sum_transfer.outgoing_key for share in shares]),
            torch.cat([share.sum_transfer.incoming_key for share in shares]),
        )
        return cls(
            _joined(local, num_nodes, num_nodes),
            _joined(outgoing, sent[-1], num_nodes),
            _order(shares, sent),
            _joined(incoming, num_nodes, received[-1]),
            torch.bincount(edge_index[1], minlength=num_nodes).clamp_(min=1),
            keys,
        )

    def for_rows(self, rows: Tensor) -> tuple[EmulatedMean, Tensor]:
        """The means of some rows, with the same messages, from the rows that they and their means are made of."""
        halo = self.operator.halo
        incoming = _entries(halo.incoming.pattern, rows)
        received = incoming[1].unique()
        outgoing = _entries(halo.outgoing.pattern, halo.exchange.order[received])  # type: ignore[attr-defined]
        local = _entries(self.operator.local.pattern, rows)
        inputs = torch.cat([rows, local[1], outgoing[1]]).unique()
        num_slots = received.numel()
        keys = self.keys[0][halo.exchange.order[received]], self.keys[1][received]  # type: ignore[attr-defined]
        means = EmulatedMean(
            _joined([(local[0], torch.searchsorted(inputs, local[1]))], rows.numel(), inputs.numel()),
            _joined([(outgoing[0], torch.searchsorted(inputs, outgoing[1]))], num_slots, inputs.numel()),
            torch.arange(num_slots),
            _joined([(incoming[0], torch.searchsorted(received, incoming[1]))], rows.numel(), num_slots),
            self.degree[rows],
            keys,
        )
        return means, inputs


def _entries(matrix: CSR, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some rows: which of the rows, and the column."""
    count = matrix.rowptr[rows + 1] - matrix.rowptr[rows]
    start = matrix.rowptr[rows] - count.cumsum(0) + count
    row = torch.arange(rows.numel()).repeat_interleave(count)
    return row, matrix.col[torch.arange(row.numel()) + start[row]].long()


def _placed(csr: CSR, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of one rank's matrix in the rows and columns of the whole."""
    return row[csr.row()], col[csr.col.long()]


def _joined(pieces: list[tuple[Tensor, Tensor]], num_rows: int, num_cols: int) -> CSR:
    row, col = (torch.cat(side) for side in zip(*pieces, strict=True))
    return CSR.from_edges(row, col, None, num_rows, num_cols)


def _order(shares: list[HaloShare], sent: list[int]) -> Tensor:
    """The send slot that each receive slot gets its row from."""
    starts = [[begin, *(begin + n for n in accumulate(s.sum_transfer.send_counts))] for begin, s in zip(sent, shares)]  # noqa: B905
    pieces = [torch.arange(start[q], start[q + 1]) for q in range(len(shares)) for start in starts]
    return torch.cat(pieces)
