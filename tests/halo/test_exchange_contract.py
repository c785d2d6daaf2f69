"""``halo/exchange.py``: what every exchange does, alone and below products.

A new one is a file and a line of EXCHANGES; ``sends_twice.py`` is an example. A check is called on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from random_graphs import random_graph
from sends_twice import SendsTwice
from torch import Tensor
from torch_geometric.nn import GATConv, SAGEConv
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.halo.exchange import AllToAll, Exchange, ToNeighbours, exchange_of
from pyg_dist.halo.transfer import HaloTransfer, Relay

Make = Callable[[Transport, tuple[int, ...], tuple[int, ...]], Exchange]
Counts = list[list[int]]
Pieces = list[Tensor]

EXCHANGES: dict[str, Make] = {"to neighbours": ToNeighbours, "all to all": AllToAll, "sends twice": SendsTwice}


def uneven(size: int) -> Counts:
    """Rows by sender and receiver; some pairs exchange none."""
    return [[0 if s == r else (2 * s + r) % 4 for r in range(size)] for s in range(size)]


def one_way(size: int) -> Counts:
    """The first rank alone sends, and to the last one alone."""
    return [[5 if s == 0 and r == size - 1 > 0 else 0 for r in range(size)] for s in range(size)]


def exchange(make: Make, counts: Counts) -> tuple[Exchange, Transport]:
    """This rank's side of it."""
    transport = Transport(world_group())
    rank = transport.group.rank
    return make(transport, tuple(counts[rank]), tuple(of_sender[rank] for of_sender in counts)), transport


def moved(counts: Counts, pieces: Pieces) -> Pieces:
    """What arrives on each rank of what each sends."""
    sent = [piece.split(counts[s]) for s, piece in enumerate(pieces)]
    return [torch.cat([of_sender[r] for of_sender in sent]) for r in range(len(counts))]


def drawn(rows: list[int], *shape: int) -> Pieces:
    """A tensor for each rank, the same ones on all."""
    return [torch.randint(-99, 99, (n, *shape)).double() for n in rows]


def rows_arrive(make: Make, rank: int, size: int) -> None:
    for counts in (uneven(size), one_way(size)):
        a, transport = exchange(make, counts)
        assert (a.num_sent, a.num_received) == (sum(counts[rank]), sum(c[rank] for c in counts))
        for shape in ((), (3,), (2, 3), (0,)):
            for dtype in (torch.float64, torch.float32, torch.int64, torch.uint8):
                pieces = [x.to(dtype) for x in drawn([sum(c) for c in counts], *shape)]
                expected = moved(counts, pieces)[rank]
                before = transport.traffic.num_rows
                assert torch.equal(a.start(pieces[rank]).wait(), expected)
                assert transport.traffic.num_rows - before >= (a.num_sent if pieces[rank].numel() else 0)
                received = torch.empty_like(expected)
                messages = a.start(pieces[rank], received)
                assert messages.wait().data_ptr() == received.data_ptr()
                assert torch.equal(received, expected)
                assert torch.equal(messages.wait(), expected), "it may be called again"
        turned = drawn([sum(c) for c in counts], 4, 3)
        assert torch.equal(a.start(turned[rank].mT).wait(), moved(counts, turned)[rank].mT), "rows that lie apart"


def arrivals(make: Make, rank: int, size: int) -> None:
    for counts in (uneven(size), one_way(size)):
        a, _ = exchange(make, counts)
        pieces = drawn([sum(c) for c in counts], 3)
        expected = moved(counts, pieces)[rank]
        assert a.arrivals == exchange(make, counts)[0].arrivals
        covered = sorted(slot for _, low, high in a.arrivals for slot in range(low, high))
        assert covered == [*range(a.num_received)], "each row in one of them"
        messages = a.start(pieces[rank])
        for sender, low, high in a.arrivals:
            messages.wait_for(sender)
            assert torch.equal(messages.received[low:high], expected[low:high])
        messages.wait()


def way_back(make: Make, rank: int, size: int) -> None:
    a, _ = exchange(make, uneven(size))
    pieces = drawn([sum(c) for c in uneven(size)], 3)
    assert (a.transposed.num_sent, a.transposed.num_received) == (a.num_received, a.num_sent)
    assert torch.equal(a.transposed.start(a.start(pieces[rank]).wait()).wait(), pieces[rank])
    again = a.transposed.transposed
    assert again.arrivals == a.arrivals
    assert torch.equal(again.start(pieces[rank]).wait(), a.start(pieces[rank]).wait())


def many_in_flight(make: Make, rank: int, size: int) -> None:
    a, _ = exchange(make, uneven(size))
    pieces = [drawn([sum(c) for c in uneven(size)], 3) for _ in range(4)]
    messages = [a.start(x[rank]) for x in pieces]
    for pending, x in reversed([*zip(messages, pieces, strict=True)]):
        assert torch.equal(pending.wait(), moved(uneven(size), x)[rank])


def derivatives(make: Make, rank: int, size: int) -> None:
    a, _ = exchange(make, uneven(size))
    x = [piece.requires_grad_() for piece in drawn([sum(c) for c in uneven(size)], 3)]
    (slope,) = torch.autograd.grad((apply(a, x[rank]) ** 3).sum(), x[rank], create_graph=True)
    (found,) = torch.autograd.grad((slope**2).sum(), x[rank])
    # Each row arrives once, so that is what its own function of it would have.
    assert torch.equal(slope, 3 * x[rank] ** 2)
    torch.testing.assert_close(found, 36 * x[rank] ** 3, rtol=1e-15, atol=0)


def matrix(num_rows: int, num_cols: int) -> Matrix:
    """A random one with some empty rows, duplicate entries and values."""
    num_entries = 2 * num_rows if num_cols else 0
    row, col = (torch.randint(max(n, 1), (num_entries,)) for n in (num_rows, num_cols))
    return Matrix(CSR.from_edges(row, col, None, num_rows, num_cols), torch.rand(num_entries, dtype=torch.float64))


def dense(a: Matrix) -> Tensor:
    return a.multiply(torch.eye(a.num_cols, dtype=torch.float64))


def relays(make: Make, rank: int, size: int) -> None:
    """In one level, and in two: rows pass through other ranks, which add and copy them; transposed by reversing."""
    rows, after = [6 - r for r in range(size)], [4 + r for r in range(size)]
    for links in (None, (uneven(size), one_way(size)), (one_way(size), uneven(size))):
        of_rows, of_sums = links or ([[0] * size] * size, [[0] * size] * size)
        # who sends no sums by the link has nothing to add to, who gets no rows has nothing to copy
        gather = [[n if sum(of_sums[r]) else 0 for r, n in enumerate(counts)] for counts in uneven(size)]
        spread = [[n if sum(of[s] for of in of_rows) else 0 for n in counts] for s, counts in enumerate(uneven(size))]
        kinds, arriving = [uneven(size), of_rows, of_sums, gather], [uneven(size), of_sums, of_rows, spread]
        sent = [[sum(counts[r]) for counts in kinds] for r in range(size)]
        received = [[sum(of[r] for of in counts) for counts in arriving] for r in range(size)]
        into = [torch.randint(max(sent[r][2], 1), (sum(of[r] for of in gather),)) for r in range(size)]
        out_of = [torch.randint(max(received[r][2], 1), (sum(spread[r]),)) for r in range(size)]
        ends = [(matrix(sum(sent[r]), rows[r]), matrix(after[r], sum(received[r]))) for r in range(size)]
        x = [piece.requires_grad_() for piece in drawn(rows, 3)]
        packed = [dense(before) @ piece for (before, _), piece in zip(ends, x, strict=True)]
        pieces = [packed[r].split(sent[r]) for r in range(size)]
        near, far, addends = (moved(kinds[k], [of[k] for of in pieces]) for k in (0, 1, 3))
        crossed = moved(of_sums, [pieces[r][2].index_add(0, into[r], addends[r]) for r in range(size)])
        copies = moved(spread, [far[r][out_of[r]] for r in range(size)])
        y = [dense(ends[r][1]) @ torch.cat([near[r], crossed[r], far[r], copies[r]]) for r in range(size)]

        passed, by = None, [exchange(make, counts)[0] for counts in (of_rows, spread, gather, of_sums)]
        if links is not None:
            passed = Relay(by[0], out_of[rank], by[1], by[2], into[rank], by[3])
        a = HaloTransfer(ends[rank][0], exchange(make, kinds[0])[0], ends[rank][1], Transport(world_group()), passed)
        v = [piece.requires_grad_() for piece in drawn(after, 3)]
        grads = torch.autograd.grad(y, x, v)

        def close(found: Tensor, expected: Tensor) -> None:
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)

        mine = x[rank].detach()
        scale, of_result = ([torch.rand(n, dtype=torch.float64) + 1 for n in of][rank] for of in (rows, after))
        close(a.start(mine).wait(), y[rank])
        close(a.transposed.start(v[rank].detach()).wait(), grads[rank])
        close(a.transposed.transposed.start(mine).wait(), y[rank])
        out = a.add(a.send(mine * scale.view(-1, 1), scale, True), torch.ones_like(y[rank]), of_result)
        close(out, 1 + of_result.view(-1, 1) * y[rank])
        own = mine.requires_grad_()
        (slope,) = torch.autograd.grad(apply(a, own), own, v[rank], create_graph=True)
        close(slope, grads[rank])
        (again,) = torch.autograd.grad(slope, v[rank], own.detach())
        close(again, y[rank])
        slots = a.to_slots.start(own.detach()).wait()
        close(ends[rank][1].multiply(slots), y[rank])
        given = a.outgoing.multiply(own.detach())
        assert torch.equal(a.between_slots.start(given).wait(), slots)
        assert torch.equal(given, a.outgoing.multiply(own.detach())), "what is given stays as it is"


def convs(make: Make, rank: int, size: int) -> None:
    """Sums, rows of sources, and weights that learn, beside PyG."""
    graph = random_graph(23, 120, seed=4)
    graph.x = torch.randn(23, 5, dtype=torch.float64)
    with patch(
        "pyg_dist.halo.view.exchange_of", lambda transport, sent, received, _=0: make(transport, sent, received)
    ):
        data = pyg_dist.DistributedData(graph, partition=torch.arange(23) * 7 % size, exchange="hybrid")
        for stock in (SAGEConv(5, 4).double(), GATConv(5, 4).double()):
            ours = pyg_dist.distribute(copy.deepcopy(stock))
            for expected, found in zip(results(stock, graph), results(ours, data), strict=True):
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def results(conv: Any, data: Any) -> list[Any]:
    x = data.x.detach().clone().requires_grad_()
    out = conv(x, data.edge_index)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])]


CHECKS = [rows_arrive, arrivals, way_back, many_in_flight, derivatives, relays, convs]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("name", EXCHANGES)
@on_ranks(1, 3)
def test_exchange(check: str, name: str) -> None:
    pyg_dist.init()
    torch.manual_seed(1)
    globals()[check](EXCHANGES[name], pyg_dist.rank(), pyg_dist.world_size())


def kinds(size: int) -> list[str]:
    pyg_dist.init()
    none = (0,) * size
    return [type(exchange_of(Transport(world_group()), none, none, n)).__name__ for n in range(size * size)]


def test_where_most_pairs_exchange_it_is_an_all_to_all(workers: Pools) -> None:
    assert workers(3).run(kinds, 3)[0] == [*["ToNeighbours"] * 5, *["AllToAll"] * 4]
    assert set(workers(2).run(kinds, 2)[0]) == {"ToNeighbours"}
