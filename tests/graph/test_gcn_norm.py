"""Of several self loops of a node the last one counts, on every device; the gradient goes to all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_dist.graph.gcn_norm import put_loop_values

NODE = torch.tensor([2, 0, 2, 2, 0])


def test_the_last_of_several_loops_counts() -> None:
    filled, values = torch.ones(4, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.7, 0.5], dtype=torch.float64)
    filled.requires_grad_()
    values.requires_grad_()
    put = put_loop_values(filled, NODE, values, "remaining")
    assert put.tolist() == [0.5, 1.0, 0.7, 1.0]
    factor = torch.arange(1.0, 5.0, dtype=torch.float64)
    by_filled, by_values = torch.autograd.grad((factor * put).sum(), (filled, values))
    assert by_filled.tolist() == [0.0, 2.0, 0.0, 4.0]
    assert by_values.tolist() == [3.0, 1.0, 3.0, 3.0, 1.0]
    assert put_loop_values(filled, NODE, values, "add").tolist() == [1.7, 1.0, 2.1, 1.0]
    assert put_loop_values(filled, NODE, values, "replace") is filled


def test_a_device_that_takes_any_of_several_values_takes_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's ``index_put``, played by one that takes the first."""
    index_put = Tensor.index_put

    def of_first(self: Tensor, index: tuple[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
        return index_put(self, (index[0].flip(0),), values.flip(0), accumulate)

    monkeypatch.setattr(Tensor, "index_put", of_first)
    rows = torch.arange(10.0).view(5, 2)
    assert torch.ones(4).index_put((NODE,), rows[:, 0])[2] == 0.0
    put = put_loop_values(torch.ones(4, 2), NODE, rows, "remaining")
    assert put.tolist() == [[8.0, 9.0], [1.0, 1.0], [6.0, 7.0], [1.0, 1.0]]


def test_no_loops() -> None:
    filled, none = torch.ones(3), torch.zeros(0, dtype=torch.int64)
    assert put_loop_values(filled, none, torch.zeros(0), "remaining").equal(filled)
