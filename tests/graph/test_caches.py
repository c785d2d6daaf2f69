"""Operators go by the object of their weights and its version, and with it."""

from __future__ import annotations

from itertools import count

import torch
from against_torch import distribute, node_rows
from workers import Pools

from pyg_dist import rank
from pyg_dist.graph.caches import OperatorCache


def kept() -> None:
    numbers = count()
    operators: OperatorCache[int] = OperatorCache(0)

    def get(weight: object, key: str = "sum") -> int:
        return operators.get(key, weight, lambda: next(numbers))  # type: ignore[arg-type]

    first, second = (distribute(torch.rand(7), node_rows()) for _ in range(2))
    assert [get(first), get(second), get(None)] == [0, 1, 2]
    assert [get(first), get(second), get(None)] == [0, 1, 2], "several at once"
    assert get(first, "mean") == 3
    second.mul_(2)
    assert [get(first), get(second), get(second)] == [0, 4, 4], "changed in place"
    equal = first.clone()
    assert get(equal) == 5, "another object"
    assert get(None) == 2
    held = [equal, *(distribute(torch.rand(7), node_rows()) for _ in range(4))]
    del equal
    assert [get(weight) for weight in held] == [5, 6, 7, 8, 9]
    places = operators._kept["sum"]
    assert len(places) == 8, "first, second, None and five"
    if rank() == 0:
        del held[0]  # on one rank Python sees at once that a tensor is gone, on another later
    assert [get(second), get(None)] == [4, 2]
    assert sum(kept.operator is None for kept in places) == (rank() == 0), "what is gone is not kept"
    others = [distribute(torch.rand(7), node_rows()) for _ in range(3)]
    assert [get(weight) for weight in others] == [10, 11, 12]
    assert [get(first), get(second), get(None), get(held[-1])] == [13, 4, 2, 9], "the place used least has gone, alike"
    with torch.inference_mode():
        uncounted = first * 2
        assert get(uncounted) != get(uncounted), "torch does not count its changes"


def test_kept(workers: Pools) -> None:
    workers(2).run(kept)
