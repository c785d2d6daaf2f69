"""Operators go by the object of their weights and its version, and with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from against_torch import distribute, node_rows
from workers import Workers

from pyg_dist.tensor.kept_operators import KeptOperators


def kept() -> None:
    numbers = count()
    operators: KeptOperators[int] = KeptOperators()

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
    del equal
    assert get(None) == 2
    assert len(operators._kept["sum"]) == 4
    get(distribute(torch.rand(7), node_rows()))
    assert len(operators._kept["sum"]) == 4, "one has gone with its weights"
    with torch.inference_mode():
        uncounted = first * 2
        assert get(uncounted) != get(uncounted), "torch does not count its changes"


def test_kept(workers: Callable[[int], Workers]) -> None:
    workers(2).run(kept)
