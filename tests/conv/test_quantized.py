"""Quantized messages in training: repetition, exact evaluation, checkpoints, any conv."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from quantized_graph import distributed
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv


class Model(nn.Module):
    def __init__(self, aggr: str = "mean") -> None:
        super().__init__()
        self.first = DistributedSAGEConv(7, 33, aggr=aggr)
        self.second = DistributedSAGEConv(33, 33, aggr=aggr)
        self.third = DistributedGCNConv(33, 3)
        self.norm = nn.LayerNorm(33)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = self.second(self.norm(x), edge_index).relu()
        return self.third(x, edge_index, edge_weight)


def train(bits: Any, exchange: str, aggr: str, num_epochs: int = 12) -> tuple[list[float], Tensor]:
    """Losses, and the scores of evaluation."""
    data = distributed(bits, exchange)
    torch.manual_seed(0)
    model = Model(aggr)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    y = data.x.argmax(-1) % 3
    losses = []
    for _ in range(num_epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x.float(), data.edge_index), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(data.x.float(), data.edge_index).full_tensor()


def again_and_exact(every_bits: list[Any], exchange: str, aggr: str) -> tuple[list[list[float]], list[float]]:
    """Losses in each ``bits``, which a second training repeats, and in full precision."""
    losses = []
    for bits in every_bits:
        got, _ = train(bits, exchange, aggr)
        assert got[:3] == train(bits, exchange, aggr, num_epochs=3)[0], bits
        losses.append(got)
    return losses, train(32, exchange, aggr)[0]


# Losses fall by 0.41. The tolerances are 1.2 to 3 times what was seen, the largest over all exchanges.
TOLERANCES: dict[Any, float] = {8: 0.02, 2: 0.14, (32, 2): 0.05, (2, 32): 0.12}


@pytest.mark.parametrize("exchange", ["hybrid", *(pytest.param(e, marks=pytest.mark.slow) for e in ("post", "pre"))])
def test_training_repeats_and_stays_near_full_precision(workers: Pools, exchange: str) -> None:
    """Forward bits change the first loss, which comes before any gradient; backward bits alone only later ones."""
    for losses, exact in workers(3).run(again_and_exact, list(TOLERANCES), exchange, "mean"):
        for (bits, tolerance), got in zip(TOLERANCES.items(), losses, strict=True):
            assert (got[0] == exact[0]) == (bits == (32, 2)), bits
            assert got[1] != exact[1], bits
            assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) < tolerance, bits


def test_rows_of_extremes_are_quantized_too(workers: Pools) -> None:
    for (got,), exact in workers(2).run(again_and_exact, [8], "hybrid", "max"):
        assert got[0] != exact[0]
        assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) < 0.15


def alone(bits: int) -> list[float]:
    return train(bits, "hybrid", "mean")[0]


def test_one_rank_sends_nothing_and_draws_alike(workers: Pools) -> None:
    assert workers(1).run(alone, 2) == workers(1).run(alone, 4)


@on_ranks(2)
def test_evaluation_and_remembered_sums_are_exact() -> None:
    """Nothing is quantized under ``eval()`` or ``no_grad``, nor what is remembered."""
    coarse, exact = distributed(2), distributed(32)
    conv = DistributedSAGEConv(7, 9).double()
    state = torch.get_rng_state()
    x, y = coarse.x * 1.0, exact.x * 1.0
    conv.eval()
    assert_same_bits(conv(x, coarse.edge_index).to_local(), conv(y, exact.edge_index).to_local())
    assert torch.equal(state, torch.get_rng_state())
    conv.train()
    with torch.no_grad():
        assert_same_bits(conv(x * 2, coarse.edge_index).to_local(), conv(y * 2, exact.edge_index).to_local())
    assert_same_bits(conv(coarse.x, coarse.edge_index).to_local(), conv(exact.x, exact.edge_index).to_local())
    assert not torch.equal(conv(x * 2, coarse.edge_index).to_local(), conv(y * 2, exact.edge_index).to_local())


@on_ranks(2)
def test_a_checkpoint_rounds_alike() -> None:
    """Features that are no attribute, e.g. dropped out: what is computed again has the first pass's rounding.

    They are aggregated for the first time within the checkpoint, and would be remembered from the second time on.
    """
    from torch.utils.checkpoint import checkpoint

    data = distributed(2)
    for make in (DistributedSAGEConv, DistributedGCNConv):
        torch.manual_seed(0)
        conv, results = make(7, 9).double(), []
        for is_checkpointed in (False, True):
            torch.manual_seed(1)
            conv.zero_grad()
            x = F.dropout(data.x, 0.3)

            def block(x: Tensor, conv: nn.Module = conv) -> Any:
                return conv(x, data.edge_index).exp()

            out = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
            out.square().sum().backward()
            results.append([out.detach().to_local(), *(p.grad.clone() for p in conv.parameters())])
        for pair in zip(*results, strict=True):
            assert_same_bits(*pair)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_drop_out_alike(use_reentrant: bool) -> None:
    """Dropout behind a quantized layer is drawn again alike, although nothing is quantized without gradients."""
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    data = distributed((32, 2))  # forward exact: the first and the second pass see the same values
    conv = DistributedSAGEConv(7, 9).double()
    for x in (data.x, data.x * 1.0, (data.x * 1.0).requires_grad_()):
        masks = []

        def block(x: Tensor, masks: list[Tensor] = masks) -> Tensor:
            out = F.dropout(conv(x, data.edge_index).exp(), 0.5)
            masks.append((out != 0).to_local().clone())
            return out

        entered = x if x.requires_grad or not use_reentrant else (x * 1.0).requires_grad_()
        with set_checkpoint_early_stop(False):
            checkpoint(block, entered, use_reentrant=use_reentrant).sum().backward()
        assert len(masks) == 2
        assert torch.equal(*masks)


def any_conv(kind: str) -> list[Tensor]:
    """Evaluation, narrow rows and what no gradient flows through are exact; runs repeat; all sizes draw alike."""
    from torch_geometric import nn as gnn

    graph = random_graph(61, 400, num_features=18, seed=3)
    coarse, exact = (DistributedData(graph.clone(), partition="random", bits=bits) for bits in (2, 32))
    torch.manual_seed(0)
    conv = distribute(gnn.GATv2Conv(18, 16) if kind == "gat" else gnn.EdgeConv(nn.Linear(36, 16))).double()

    def out(data: Any) -> Tensor:
        return conv(data.x * 1.0, data.edge_index).full_tensor().detach()

    conv.eval()
    assert_same_bits(out(coarse), out(exact))
    conv.train()
    state = torch.get_rng_state()
    first = out(coarse)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    again = out(coarse)
    assert_same_bits(first, again)
    with torch.no_grad():
        assert_same_bits(out(coarse), out(exact))
    narrow = distribute(gnn.EdgeConv(nn.Linear(30, 16))).double()
    few = [narrow(data.x[:, :15], data.edge_index).to_local() for data in (coarse, exact)]
    assert_same_bits(*few)
    assert torch.equal(first, out(exact)) == (coarse.graph.group.size == 1)
    return [after]


@pytest.mark.parametrize("kind", ["gat", "edge"])
def test_any_conv(workers: Pools, kind: str) -> None:
    states = [state for size in (1, 3) for (state,) in workers(size).run(any_conv, kind)]
    assert all(torch.equal(state, states[0]) for state in states)


def compare_learning_weights(conv_class: Any) -> None:
    results = []
    for bits in (8, 32):
        data = distributed(bits)
        torch.manual_seed(0)
        conv = conv_class(7, 5).double()
        weight = (torch.rand_like(data.edge_weight) + 0.5).requires_grad_()
        conv(data.x * 1.0, data.edge_index, weight).square().sum().backward()
        results.append(
            (weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad, conv.lin.weight.grad)
        )
    for got, want in zip(*results, strict=True):
        assert not torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


@on_ranks(2)
@pytest.mark.parametrize("lends", [False, True])
def test_learning_weights(lends: bool) -> None:
    """Rows and sums with weights that learn are quantized; weights and degrees are not."""
    with patch("pyg_dist.halo.products.sends_weights", lambda *_: lends):
        compare_learning_weights(DistributedGCNConv)
