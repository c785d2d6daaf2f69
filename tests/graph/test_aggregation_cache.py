"""Constant inputs are aggregated once, changed ones anew, and the cheaper order of sum and linear map is taken."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import Pair
from random_graphs import uneven_parts
from torch.utils.checkpoint import checkpoint
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute
from pyg_dist.errors import OptionError


class Columns(Pair):
    """Counts the columns that a run sends."""

    def __init__(self, kind: str, channels: tuple[int, int], world_size: int, **options: Any) -> None:
        super().__init__(kind, channels, options, partition=uneven_parts(61, world_size))

    def columns(self, x: Any = None, want: Any = None, *weight: Any, grad: bool = True) -> float:
        """This rank's part of the columns sent, forward and backward; the parts of all ranks add up to them."""
        before = self.data.traffic.num_bytes
        self.run(x, want, *weight, grad=grad)()
        return (self.data.traffic.num_bytes - before) / 8 / self.data.plan.rows["hybrid"]


def epochs(world_size: int, kind: str, channels: tuple[int, int]) -> list[float]:
    pair = Columns(kind, channels, world_size)
    seen = [pair.columns(), pair.columns(), pair.columns(grad=False)]
    with torch.inference_mode():
        seen.append(pair.columns(grad=False))
    for x in (pair.data.x, pair.graph.x):
        x.mul_(0.5)
    seen += [pair.columns(), pair.columns()]
    pair.data.x = pair.data.x * 2
    pair.graph.x = pair.graph.x * 2
    seen += [pair.columns(), pair.columns()]
    twin = copy.deepcopy(pair.data.x)
    twin.add_(1.0)
    seen.append(pair.columns(twin, pair.graph.x + 1, grad=False))
    seen.append(pair.columns())
    return seen


@pytest.mark.parametrize("kind", ["sage", "gcn"])
@pytest.mark.parametrize("channels", [(6, 8), (8, 3)])
@pytest.mark.parametrize("world_size", [3])
def test_an_attribute_is_aggregated_once_per_version(
    workers: Pools, world_size: int, kind: str, channels: tuple[int, int]
) -> None:
    ranks = workers(world_size).run(epochs, world_size, kind, channels)
    once = channels[0]
    seen = [sum(parts) for parts in zip(*ranks, strict=True)]
    assert seen == pytest.approx([once, 0, 0, 0, once, 0, once, 0, once, 0])


def orders(world_size: int, kind: str) -> dict[str, float]:
    seen = {}
    for name, channels in {"wider": (4, 6), "narrower": (6, 4), "much narrower": (9, 4)}.items():
        pair = Columns(kind, channels, world_size)
        seen[f"constant, {name}"] = pair.columns(pair.data.x * 1, pair.graph.x)
        pair.data.x.requires_grad_()
        seen[f"learning, {name}"] = pair.columns()
        seen[f"learning, {name}, again"] = pair.columns()
    return seen


@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_the_cheaper_order_is_taken(workers: Pools, kind: str) -> None:
    here, there = workers(2).run(orders, 2, kind)
    assert {name: part + there[name] for name, part in here.items()} == pytest.approx(
        {
            "constant, wider": 4,  # forward alone, as x needs no gradient
            "constant, narrower": 6,
            "constant, much narrower": 4 + 4,
            **{f"learning, wider{again}": 4 + 4 for again in ("", ", again")},
            **{f"learning, narrower{again}": 4 + 4 for again in ("", ", again")},
            **{f"learning, much narrower{again}": 4 + 4 for again in ("", ", again")},
        }
    )


@on_ranks(2)
def test_a_type_is_aggregated_once_for_each_relation(num_ranks: int) -> None:
    from torch_geometric.data import HeteroData
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    graph = HeteroData({"a": {"x": torch.rand(9, 3)}})
    kinds = [("a", f"to {k}", "a") for k in range(5)]
    for kind in kinds:
        graph[kind].edge_index = torch.randint(0, 9, (2, 30))
    data = DistributedData(graph, partition={"a": torch.arange(9) % num_ranks})
    convs, sent = [distribute(SAGEConv(3, 4)) for _ in kinds], []
    for _ in range(2):
        for conv, kind in zip(convs, kinds, strict=True):
            with torch.no_grad():
                conv(data["a"].x, data[kind].edge_index)
        sent.append(data.traffic.num_bytes)
    assert sent[1] == sent[0] > 0


@on_ranks(2)
def test_weights_lifetimes_and_results_changed_in_place(world_size: int) -> None:
    pair = Columns("gcn", (5, 4), world_size)
    weight = pair.data.edge_weight
    pair.columns(None, None, weight)
    assert pair.columns(None, None, weight) == 0
    weight.mul_(2.0)  # another operator
    assert pair.columns(None, None, weight) > 0
    assert pair.columns(None, None, weight) == 0
    for constant in (pair.graph.edge_weight, weight.view(-1, 1)):  # of all edges; of this rank's, as a column
        assert pair.columns(None, None, constant) > 0
        assert pair.columns(None, None, constant) == 0
    learning = weight.detach().clone().requires_grad_()
    for _ in range(2):
        assert pair.columns(None, None, learning) > 0

    # What two convs share is aggregated once; an intermediate that is used again in one forward, too.
    pair = Columns("sage", (5, 4), world_size)
    hidden, want = pair.data.x.tanh(), pair.graph.x.tanh()
    first, second, third = (pair.columns(hidden, want, grad=False) for _ in range(3))
    assert (first > 0, second > 0, third) == (True, True, 0)
    (known,) = hidden._cached_aggregates
    kept = weakref.ref(known.result)
    del known, hidden
    gc.collect()
    assert kept() is None, "the result outlives its input"

    # A change of what was returned is not handed out again.
    conv = pair.ours
    conv.lin_l, conv.root_weight, pair.stock.lin_l, pair.stock.root_weight = (torch.nn.Identity(), False) * 2
    expected = pair.stock(pair.graph.x, pair.graph.edge_index)
    for _ in range(3):
        out = conv(pair.data.x, pair.data.edge_index)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-11)
        out.mul_(2.0)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_checkpoints(world_size: int, kind: str) -> None:
    """Checkpoints compute forward again, and compare: nothing remembered meanwhile may change the way."""
    pair = Columns(kind, (12, 3), world_size)
    other = copy.deepcopy(pair.ours)
    for x in (pair.data.x * 1, pair.data.x):
        for _ in range(3):
            outs = [
                checkpoint(conv, x, pair.data.edge_index, use_reentrant=False) for conv in (pair.ours, other, pair.ours)
            ]
            sum(out.square().sum() for out in outs).backward()
            for p, q in zip(pair.ours.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, 2 * q.grad)


@on_ranks(2)
@patch.dict(os.environ, PYG_DIST_REMEMBER_MIB="0")
def test_memory_can_be_forbidden(world_size: int) -> None:
    pair = Columns("sage", (5, 8), world_size)
    assert all(pair.columns() > 0 for _ in range(3))
    os.environ["PYG_DIST_REMEMBER_MIB"] = "much"
    with pytest.raises(OptionError, match="PYG_DIST_REMEMBER_MIB"):
        Columns("sage", (5, 8), world_size)


def kept_for_the_derivative(channels: tuple[int, int], limit: str) -> int:
    """Numbers in the rows that a conv keeps for its derivative, after its results were compared."""
    with patch.dict(os.environ, PYG_DIST_REMEMBER_MIB=limit):
        pair, sizes = Columns("sage", channels, 2), dict[int, int]()
        rows = pair.data.x.to_local().shape[0]

        def seen(x: torch.Tensor) -> torch.Tensor:
            if x.shape[:1] == (rows,):
                sizes[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
            compare = pair.run(pair.data.x * 1, pair.graph.x)
        compare()
    return sum(sizes.values()) // rows


@on_ranks(2)
def test_sums_that_are_not_kept_for_the_derivative() -> None:
    """The linear map goes first, and the derivative reads the rows alone."""
    for channels, num_less in (((8, 8), 8), ((7, 5), 7), ((8, 9), 0)):  # of the last the columns are too many
        kept, less = (kept_for_the_derivative(channels, limit) for limit in ("inf", "0"))
        assert kept - less == num_less, channels
