"""Quantized halos in training: bytes on the wire, unbiased sums and gradients, exact evaluation, repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Workers

Pools = Callable[[int], Workers]


def distributed(bits: Any, exchange: str = "hybrid", **options: Any) -> Any:
    from pyg_dist import DistributedData

    graph = random_graph(61, 400, num_features=7, seed=3)
    return DistributedData(graph, partition="random", exchange=exchange, bits=bits, **options)


def bytes_of_one_layer(bits: Any) -> tuple[int, int, int, dict[str, Any]]:
    """What one conv hands to the process group, forward and backward; what ``traffic`` counts; the plan."""
    import torch.distributed as dist

    from pyg_dist.conv import DistributedSAGEConv

    handed = [0]
    send, to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_send(messages: list[Any]) -> Any:
        handed[0] += sum(m.tensor.numel() * m.tensor.element_size() for m in messages if m.op is dist.isend)
        return send(messages)

    def counted_to_all(received: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        handed[0] += rows.numel() * rows.element_size()
        return to_all(received, rows, *args, **kwargs)

    data = distributed(bits)
    conv = DistributedSAGEConv(256, 256)
    x = torch.cat([data.x.float()] * 37, dim=-1)[:, :256].requires_grad_()
    dist.batch_isend_irecv, dist.all_to_all_single = counted_send, counted_to_all
    try:
        out = conv(x, data.edge_index)
        forward, handed[0] = handed[0], 0
        out.to_local().sum().backward()
        backward = handed[0]
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = send, to_all
    return forward, backward, data.traffic.num_bytes, data.plan.to_dict((256,))


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_on_the_wire(workers: Pools, world_size: int) -> None:
    """SuperGCN, Table 5: about 15 times fewer, parameters included."""
    totals = {}
    for bits in (32, 16, 8, 4, 2, (2, 8)):
        ranks = workers(world_size).run(bytes_of_one_layer, bits)
        forward, backward, counted = (sum(rank[k] for rank in ranks) for k in range(3))
        plan = ranks[0][3]
        assert forward == plan["bytes"]["256"]
        assert backward == plan["backward_bytes"]["256"]
        assert counted == forward + backward
        totals[bits] = forward, backward
    exact = totals[32][0]
    assert exact > 0
    assert totals[16] == (exact / 2, exact / 2)
    for bits, ratio in ((8, 3.9), (4, 7.5), (2, 15)):
        assert totals[bits][0] == totals[bits][1] <= exact / ratio
    assert totals[2, 8] == (totals[2][0], totals[8][1])


class Model(nn.Module):
    def __init__(self, aggr: str = "mean") -> None:
        from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

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


def again_and_exact(bits: Any, exchange: str, aggr: str) -> tuple[list[float], list[float]]:
    """The same numbers twice; close to full precision; forward and backward bits each have an effect."""
    got, out = train(bits, exchange, aggr)
    repeated, repeated_out = train(bits, exchange, aggr)
    assert got == repeated
    assert torch.equal(out, repeated_out)
    return got, train(32, exchange, aggr)[0]


@pytest.mark.parametrize("exchange", ["hybrid", "post", "pre"])
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.1), (2, 0.5), ((32, 2), 0.5)], ids=str)
def test_training_repeats_and_stays_near_full_precision(
    workers: Pools, exchange: str, bits: Any, tolerance: float
) -> None:
    for got, exact in workers(3).run(again_and_exact, bits, exchange, "mean"):
        assert got != exact
        assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) < tolerance
        assert got[-1] < got[0] - 0.1


def test_rows_of_extremes_are_quantized_too(workers: Pools) -> None:
    for got, exact in workers(2).run(again_and_exact, 8, "hybrid", "max"):
        assert got != exact
        assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) < 0.15


def alone(bits: int) -> list[float]:
    return train(bits, "hybrid", "mean")[0]


def test_one_rank_sends_nothing_and_draws_alike(workers: Pools) -> None:
    assert workers(1).run(alone, 2) == workers(1).run(alone, 4)


def evaluation() -> None:
    """Nothing is quantized under ``eval()`` or ``no_grad``, nor what is remembered."""
    from pyg_dist.conv import DistributedSAGEConv

    coarse, exact = distributed(2), distributed(32)
    conv = DistributedSAGEConv(7, 9).double()
    state = torch.get_rng_state()
    x, y = coarse.x * 1.0, exact.x * 1.0
    conv.eval()
    assert torch.equal(conv(x, coarse.edge_index).to_local(), conv(y, exact.edge_index).to_local())
    assert torch.equal(state, torch.get_rng_state())
    conv.train()
    with torch.no_grad():
        assert torch.equal(conv(x * 2, coarse.edge_index).to_local(), conv(y * 2, exact.edge_index).to_local())
    assert torch.equal(conv(coarse.x, coarse.edge_index).to_local(), conv(exact.x, exact.edge_index).to_local())
    assert not torch.equal(conv(x * 2, coarse.edge_index).to_local(), conv(y * 2, exact.edge_index).to_local())


def test_evaluation_and_remembered_sums_are_exact(workers: Pools) -> None:
    workers(2).run(evaluation)


def checkpointed(use_reentrant: bool) -> None:
    """Dropout behind a quantized layer is drawn again alike, although nothing is quantized without gradients."""
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    from pyg_dist.conv import DistributedSAGEConv

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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_drop_out_alike(workers: Pools, use_reentrant: bool) -> None:
    workers(2).run(checkpointed, use_reentrant)


def expectation(exchange: str, kind: str, num_draws: int) -> None:
    """The mean over draws of outputs and gradients is the exact one within its standard error."""
    from pyg_dist import conv as ours

    coarse, exact = distributed(2, exchange), distributed(32, exchange)
    torch.manual_seed(1)
    conv = (ours.DistributedSAGEConv(7, 5) if kind == "sage" else ours.DistributedGCNConv(7, 5)).double()
    factor = torch.randn_like(exact.x[:, :5])

    def run(data: Any) -> list[Tensor]:
        """This rank's outputs, its gradient by x and the parameters' gradients."""
        conv.zero_grad()
        x = (data.x * 1.0).requires_grad_()
        x.retain_grad()
        out = conv(x, data.edge_index)
        (out.to_local() * factor.to_local()).sum().backward()
        return [out.to_local().detach(), x.grad.to_local(), *(p.grad.clone() for p in conv.parameters())]

    draws = [torch.stack(drawn) for drawn in zip(*(run(coarse) for _ in range(num_draws)), strict=True)]
    assert min(float(drawn.std(0).max()) for drawn in draws[:2]) > 0
    for drawn, want in zip(draws, run(exact), strict=True):
        error, spread = (drawn.mean(0) - want).abs(), drawn.std(0) / num_draws**0.5
        # A value close to a step is rarely rounded away from it, perhaps in none of the draws.
        assert bool((error <= 5 * spread.clamp(min=0.2 * float(spread.max())) + 1e-6).all()), (error / spread).max()


@pytest.mark.parametrize("kind", ["sage", "gcn"])
def test_unbiased_outputs_and_gradients(workers: Pools, kind: str) -> None:
    workers(3).run(expectation, "hybrid", kind, 400, timeout=100)


def learning_weights() -> None:
    """Weights that learn take halo rows; theirs are quantized, the degrees are not."""
    from pyg_dist.conv import DistributedGCNConv

    results = []
    for bits in (8, 32):
        data = distributed(bits)
        torch.manual_seed(0)
        conv = DistributedGCNConv(7, 5).double()
        weight = (torch.rand_like(data.edge_weight) + 0.5).requires_grad_()
        conv(data.x * 1.0, data.edge_index, weight).square().sum().backward()
        results.append(
            (weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad, conv.lin.weight.grad)
        )
    for got, want in zip(*results, strict=True):
        assert not torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


def test_learning_weights(workers: Pools) -> None:
    workers(2).run(learning_weights)


def not_finite(bits: Any, backward: bool) -> str:
    from pyg_dist.conv import DistributedSAGEConv
    from pyg_dist.errors import DataError

    data = distributed(bits)
    conv = DistributedSAGEConv(7, 9).double()
    x = (data.x * 1.0).requires_grad_()

    def forward_or_backward() -> None:
        if backward:
            (conv(x, data.edge_index) * float("inf")).sum().backward()
        else:
            conv(x * float("nan"), data.edge_index)

    with pytest.raises(DataError) as caught:
        forward_or_backward()
    return str(caught.value)


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_not_finite_names_layer_and_rank(workers: Pools, backward: bool) -> None:
    for rank, line in enumerate(workers(2).run(not_finite, 2, backward)):
        assert ("gradients" if backward else "features") in line
        assert "SAGEConv(7, 9" in line
        assert f"[rank {rank} of 2]" in line
        assert "\n" not in line


def refusals() -> None:
    from pyg_dist.errors import OptionError, UnsupportedError

    for bits in (3, 64, "2", (2, 8, 4), (2, 3), True, None):
        with pytest.raises(OptionError, match="Expected bits to be one of 32, 16, 8, 4, 2, or"):
            distributed(bits)
    with pytest.raises(UnsupportedError, match=r"bits=2 with layout='grid'.*use layout='halo'"):
        distributed(2, layout="grid")
    with pytest.raises(UnsupportedError, match=r"bits=\(32, 8\) with layout='auto'"):
        distributed((32, 8), layout="auto")
    plan = distributed((2, 8)).plan
    assert plan.bits == (2, 8)
    rows = plan.rows["hybrid"]
    assert plan.to_dict((100,))["bytes"] == {"100": rows * 29}
    assert plan.to_dict((100,))["backward_bytes"] == {"100": rows * 104}
    assert f"{rows * 29:,} bytes per aggregation in 2 bits, {rows * 104:,} backward in 8" in plan.describe((100,))


def test_options(workers: Pools) -> None:
    workers(1).run(refusals)
