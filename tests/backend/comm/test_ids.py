"""Lists of ids between ranks arrive as they were sent, in few bytes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import torch
from workers import on_ranks

import pyg_dist
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.ids import Arrived, Call, IdList, IdLists, side_by_side
from pyg_dist.backend.session.agreement import group_of_thread


def lists(sender: int, receiver: int, columns: int, is_ascending: bool) -> torch.Tensor:
    """What one rank sends another: of some pairs nothing."""
    rng = torch.Generator().manual_seed(10 * sender + receiver)
    rows = torch.randint(0, 2**40 if is_ascending else 2**62, ((sender * receiver) % 3 * 50, columns), generator=rng)
    return rows[rows[:, 0].argsort()] if is_ascending else rows


@on_ranks(1, 2, 3)
def test_exchange() -> None:
    pyg_dist.init()
    rank, size = pyg_dist.rank(), pyg_dist.world_size()
    ids = IdLists(group_of_thread(None))
    for columns in (1, 2, 3):
        for is_ascending in (True, False):
            rows = [lists(rank, other, columns, is_ascending) for other in range(size)]
            mine = IdList(torch.cat(rows), [len(r) for r in rows], is_ascending)
            numbers = IdList(torch.arange(size).view(-1, 1) - rank, [1] * size, False)
            (found, counts), (others, _) = ids.exchange(mine, numbers)
            expected = [lists(other, rank, columns, is_ascending) for other in range(size)]
            assert counts == [len(r) for r in expected]
            assert torch.equal(found, torch.cat(expected))
            assert others.view(-1).tolist() == ([0] if size == 1 else [rank - other for other in range(size)])
    before = ids.num_bytes
    for step, count in enumerate((1000, 1000, 1140, 0, 300)):  # as many bytes as the room, more, none; two messages
        dense = torch.arange(count).view(-1, 1)
        every = IdList(dense) if step % 2 else IdList(dense.repeat(size, 1), [count] * size)
        ((found, counts),) = ids.exchange(every, kind="dense")
        assert torch.equal(found, dense.repeat(size, 1))
        assert counts == [count] * size
        if step == 0:  # a byte an id, and how many bytes they are
            assert ids.num_bytes - before == (size - 1) * (1000 + 250 + 8 + 8)
    assert ids.gather([rank, 7]).tolist() == [[r, 7] for r in range(size)]


@on_ranks(1, 3)
def test_tasks_side_by_side() -> None:
    """Three tasks of two calls, the second of two lists; the last task begins with an empty list."""
    ids = IdLists(world_group())
    size, rank = ids.group.size, ids.group.rank

    def task(number: int) -> Generator[Call, Arrived, list[Any]]:
        of_each = [torch.full((number - 1 if number else 0, 1), 100 * rank + peer) for peer in range(size)]
        ((first, by_sender),) = yield Call(ids, [IdList(torch.cat(of_each), [len(one) for one in of_each])], "first")
        whole = IdList(torch.tensor([[number, rank]]), is_ascending=False)
        (second, _), (third, _) = yield Call(ids, [whole, IdList(first)], "second")
        return [first.view(-1).tolist(), by_sender, second.tolist(), len(third)]

    alone = [side_by_side([task(number)])[0] for number in (1, 3, 2)]
    with patch.object(IdLists, "exchange", autospec=True, side_effect=IdLists.exchange) as exchange:
        together = side_by_side(map(task, (1, 3, 2)))
    assert together == alone
    assert exchange.call_count == 2
    assert together[1][0] == [100 * peer + rank for peer in range(size) for _ in range(2)]
    assert together[2][2] == [[2, peer] for peer in range(size)]
    assert side_by_side([]) == []


@on_ranks(3)
def test_a_thread_of_its_own() -> None:
    """Messages of two threads never meet, whatever their order; groups of some ranks work beside those of all."""
    import threading

    pyg_dist.init()
    rank, size = pyg_dist.rank(), pyg_dist.world_size()
    ids, some = IdLists(group_of_thread(None)), [0, 1] if rank < 2 else [2]
    pair = IdLists(group_of_thread(some))
    found: list[int] = []

    def beside() -> None:
        for step in range(200):
            sent = torch.tensor([[1000 * step + rank]]).repeat(size, 1)
            ((rows, _),) = ids.exchange(IdList(sent, [1] * size))
            assert rows.view(-1).tolist() == [1000 * step + other for other in range(size)]
            ((rows, _),) = pair.exchange(IdList(sent[: len(some)], [1] * len(some)))
            assert rows.view(-1).tolist() == [1000 * step + other for other in some]
            found.append(step)

    thread = threading.Thread(target=beside)
    thread.start()
    for step in range(200):
        total = world_group().sum(torch.tensor([[1000 * step + rank]]))
        assert int(total) == 1000 * step * size + sum(range(size))
    thread.join(60)
    assert found == list(range(200))
