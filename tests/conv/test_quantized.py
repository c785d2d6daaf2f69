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


def bytes_of_one_layer(bits: Any, attention: bool = False) -> tuple[int, int, int, dict[str, Any]]:
    """What one conv hands to the process group, forward and backward; what ``traffic`` counts; the plan."""
    import torch.distributed as dist
    from torch_geometric.nn import GATConv

    from pyg_dist.conv import DistributedConv, DistributedSAGEConv

    handed = [0]
    send, to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_send(messages: list[Any]) -> Any:
        handed[0] += sum(m.tensor.numel() * m.tensor.element_size() for m in messages if m.op is dist.isend)
        return send(messages)

    def counted_to_all(received: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        handed[0] += rows.numel() * rows.element_size()
        return to_all(received, rows, *args, **kwargs)

    data = distributed(bits)
    conv = DistributedConv(GATConv(256, 256)) if attention else DistributedSAGEConv(256, 256)
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


def bytes_of_a_column() -> list[tuple[float, int, int, bool]]:
    """One logit a node: what is sent forward, what the plan says, what a row takes, whether it is exact."""
    from pyg_dist.conv import DistributedSAGEConv

    found, exact = [], None
    for bits in (32, 16, 8, 2):
        for dtype in (torch.float32, torch.float64):
            data = distributed(bits)
            torch.manual_seed(0)
            conv, before = DistributedSAGEConv(1, 1).to(dtype), data.traffic.num_bytes
            x = (data.x[:, :1] * 0.1).to(dtype).requires_grad_()
            out = conv(x, data.edge_index).detach().to_local()
            exact = {**(exact or {}), dtype: out} if bits == 32 else exact
            planned = data.plan.halo_bytes(1, dtype.itemsize)
            size = planned // data.plan.rows["hybrid"]
            found.append((data.traffic.num_bytes - before, planned, size, torch.equal(out, exact[dtype])))
    return found


def test_rows_that_packing_would_lengthen_go_as_they_are(workers: Pools) -> None:
    ranks = workers(2).run(bytes_of_a_column)
    cases = [(4, True), (8, True), (2, False), (2, False), (4, True), (5, False), (4, True), (5, False)]
    for (size, is_exact), here, there in zip(cases, *ranks, strict=True):
        assert here[0] + there[0] == here[1]
        assert here[2] == size
        assert here[3] == there[3] == is_exact


def test_bytes_of_attention(workers: Pools) -> None:
    """Rows in two bits; one logit a row as it is."""
    totals = {bits: [0, 0] for bits in (32, 2, (8, 32))}
    for bits, total in totals.items():
        for forward, backward, counted, plan in workers(2).run(bytes_of_one_layer, bits, True):
            assert counted == forward + backward
            total[0] += forward
            total[1] += backward
            num_rows = plan["rows"]["post"]
    assert totals == {
        32: [num_rows * (1024 + 4)] * 2,
        2: [num_rows * (68 + 4)] * 2,
        (8, 32): [num_rows * (260 + 4), num_rows * (1024 + 4)],
    }


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


def recomputed() -> None:
    """Features that are no attribute, e.g. dropped out: what is computed again has the first pass's rounding.

    They are aggregated for the first time within the checkpoint, and would be remembered from the second time on.
    """
    from torch.utils.checkpoint import checkpoint

    from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

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
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_checkpoint_rounds_alike(workers: Pools) -> None:
    workers(2).run(recomputed)


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


NUM_COPIES, NUM_STEPS = 100, 100


class Linear(nn.Module):
    """Two layers without anything between them: exact in expectation if each of their messages is."""

    def __init__(self, kind: str) -> None:
        from torch_geometric import nn as gnn

        from pyg_dist import distribute

        super().__init__()
        make = {"sage": gnn.SAGEConv, "gcn": gnn.GCNConv, "graph": gnn.GraphConv}
        self.is_weighted, self.is_attention = kind == "graph", kind == "gat"
        if self.is_attention:  # rows travel in few bits, and logits as they are, so that their softmax is exact
            self.convs = nn.ModuleList([gnn.GATConv(7, 16, heads=2)])
        else:
            self.convs = nn.ModuleList(make[kind](*sizes) for sizes in ((7, 17), (17, 5)))
        distribute(self)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight) if self.is_weighted else conv(x, edge_index)
        return x


def expectation(exchange: str, kind: str) -> None:
    """10,000 draws of outputs and gradients: their mean is exact within its standard error.

    A hundred copies of a small graph, which round independently, in a hundred steps; parameters get the sum of the
    copies' gradients in each.
    """
    from torch_geometric.data import Data

    from pyg_dist import DistributedData, rank, world_size

    one = random_graph(10, 45, num_features=7, seed=3)
    first = 10 * torch.arange(NUM_COPIES)
    edge_index = (one.edge_index[:, None] + first[:, None]).reshape(2, -1)
    weight = torch.linspace(0.5, 1.5, one.num_edges).double().repeat(NUM_COPIES)
    data = Data(x=one.x.repeat(NUM_COPIES, 1), edge_index=edge_index, edge_weight=weight)
    partition = torch.arange(10).mul(world_size()).div(10, rounding_mode="floor").repeat(NUM_COPIES)
    coarse, exact = (
        DistributedData(data.clone(), partition=partition, exchange=exchange, bits=bits) for bits in (2, 32)
    )
    torch.manual_seed(1)
    model = Linear(kind).double()
    factor = torch.randn(10, model(exact.x, exact.edge_index, exact.edge_weight).shape[1]).double()
    order = torch.argsort(exact.graph.node_rows.key)
    here = exact.graph.node_rows.key[order]

    def run(data: Any) -> list[Tensor]:
        """This rank's outputs and gradients by x, a row per copy, and the parameters' gradients, one row."""
        model.zero_grad()
        x = (data.x * 1.0).requires_grad_()
        x.retain_grad()
        out = model(x, data.edge_index, data.edge_weight)
        (out.to_local()[order] * factor[here % 10]).sum().backward()
        rows = [t.to_local()[order].view(NUM_COPIES, -1) for t in (out.detach(), x.grad)]
        return [*rows, *(p.grad.clone().view(1, -1) for p in model.parameters())]

    draws = [torch.cat(drawn) for drawn in zip(*(run(coarse) for _ in range(NUM_STEPS)), strict=True)]
    assert [len(drawn) for drawn in draws[:2]] == [10_000, 10_000]
    for k, (drawn, want) in enumerate(zip(draws, run(exact), strict=True)):
        error, spread = (drawn.mean(0) - want[0]).abs(), drawn.std(0) / len(drawn) ** 0.5
        # A value close to a step is rarely rounded away from it, perhaps in none of the draws.
        z = error / spread.clamp(min=0.05 * float(spread.max()) + 1e-9)
        assert float(z.max()) <= 5, (kind, rank(), float(z.max()))
        # The entries of a parameter's gradient go up and down together: few of them are independent.
        assert float(z.square().mean()) <= (2 if k < 2 else 5), (kind, rank(), float(z.square().mean()))
    assert min(float(drawn.std(0).max()) for drawn in draws[:2]) > 0.01
    assert sum(float(drawn.std(0).max()) > 0.01 for drawn in draws[2:]) >= 2


@pytest.mark.parametrize(
    ("exchange", "kind"), [("hybrid", "sage"), ("post", "gcn"), ("pre", "gcn"), ("hybrid", "gat"), ("hybrid", "graph")]
)
def test_unbiased_outputs_and_gradients(workers: Pools, exchange: str, kind: str) -> None:
    workers(2).run(expectation, exchange, kind)


def any_conv(kind: str) -> list[Tensor]:
    """Evaluation, narrow rows and what no gradient flows through are exact; runs repeat; all sizes draw alike."""
    from torch_geometric import nn as gnn

    from pyg_dist import DistributedData, distribute

    graph = random_graph(61, 400, num_features=18, seed=3)
    coarse, exact = (DistributedData(graph.clone(), partition="random", bits=bits) for bits in (2, 32))
    torch.manual_seed(0)
    conv = distribute(gnn.GATv2Conv(18, 16) if kind == "gat" else gnn.EdgeConv(nn.Linear(36, 16))).double()

    def out(data: Any) -> Tensor:
        return conv(data.x * 1.0, data.edge_index).full_tensor().detach()

    conv.eval()
    assert torch.equal(out(coarse), out(exact))
    conv.train()
    state = torch.get_rng_state()
    first = out(coarse)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    again = out(coarse)
    assert torch.equal(first, again)
    with torch.no_grad():
        assert torch.equal(out(coarse), out(exact))
    narrow = distribute(gnn.EdgeConv(nn.Linear(30, 16))).double()
    few = [narrow(data.x[:, :15], data.edge_index).to_local() for data in (coarse, exact)]
    assert torch.equal(*few)
    assert torch.equal(first, out(exact)) == (coarse.graph.axis.size == 1)
    return [after]


@pytest.mark.parametrize("kind", ["gat", "edge"])
def test_any_conv(workers: Pools, kind: str) -> None:
    states = [state for size in (1, 3) for (state,) in workers(size).run(any_conv, kind)]
    assert all(torch.equal(state, states[0]) for state in states)


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


class Nested(nn.Module):
    def __init__(self) -> None:
        from torch_geometric import nn as gnn

        from pyg_dist import distribute

        super().__init__()
        perceptron = nn.Sequential(nn.Linear(9, 9), nn.ReLU())
        self.encoder = nn.ModuleDict({"convs": nn.ModuleList([gnn.SAGEConv(7, 9), gnn.GINConv(perceptron)])})
        distribute(self)

    def forward(self, x: Tensor, edge_index: Any, factors: tuple[float, float, float]) -> Tensor:
        for conv, factor in zip(self.encoder["convs"], factors, strict=False):
            x = conv(x * factor, edge_index)
        return x * factors[-1]


def out_of_range(bits: int) -> list[str]:
    """What each of three ranks cannot send, at its own node."""
    from pyg_dist import DistributedData
    from pyg_dist.conv import DistributedSAGEConv
    from pyg_dist.errors import DataError

    graph, lines = random_graph(61, 400, num_features=7, seed=3), []
    data = DistributedData(graph, partition=torch.arange(61) % 3, bits=bits, exchange="post")
    conv = DistributedSAGEConv(7, 9).double()
    for value in (float("nan"), float("inf"), 1e39):
        x = data.x * 1.0
        is_bad = (data.graph.node_rows.key >= 15) & (data.graph.node_rows.key < 18)
        x.to_local()[is_bad] = torch.tensor([-value, value, 0, 0, 0, 0, value], dtype=torch.float64)
        with pytest.raises(DataError) as caught:
            conv(x, data.edge_index)
        lines.append(str(caught.value))
    return lines


@pytest.mark.parametrize("bits", [2, 16])
def test_what_cannot_be_sent_is_told_with_its_node(workers: Pools, bits: int) -> None:
    held = "bfloat16 holds up to 3.39e+38" if bits == 16 else "float32 holds a range of 3.4e+38"
    finite, wide = "finite features", "values from -1e+39 to 1e+39"
    cases = (finite, "NaN"), (finite, "an infinity"), (f"features that {held}", wide)
    for rank, lines in enumerate(workers(3).run(out_of_range, bits)):
        for line, (expected, got) in zip(lines, cases, strict=True):
            layer = f"SAGEConv(7, 9, aggr=mean), which go in {bits} bits"
            assert line.startswith(f"Expected {expected} in the messages of {layer} (got {got} at node {15 + rank}): ")
            assert line.endswith(f"[rank {rank} of 3]")


def not_finite() -> list[str]:
    from pyg_dist.conv import DistributedSAGEConv
    from pyg_dist.errors import DataError

    data, lines = distributed(2), []
    model, alone = Nested().double(), DistributedSAGEConv(7, 9).double()
    nan = float("nan")

    def line_of(run: Callable[[], Any]) -> None:
        with pytest.raises(DataError) as caught:
            run()
        lines.append(str(caught.value))

    x = (data.x * 1.0).requires_grad_()
    line_of(lambda: alone(x * nan, data.edge_index))
    line_of(lambda: (alone(x, data.edge_index) * float("inf")).sum().backward())
    line_of(lambda: model(x, data.edge_index, (nan, 1, 1)))
    line_of(lambda: model(x, data.edge_index, (1, nan, 1)))
    line_of(lambda: model(x, data.edge_index, (1, 1, nan)).sum().backward())
    return lines


def test_what_is_not_finite_names_layer_and_rank(workers: Pools) -> None:
    expected = [
        ("features", "messages of SAGEConv(7, 9, aggr=mean), which go in 2 bits"),
        ("gradients", "messages of SAGEConv(7, 9, aggr=mean), which go in 2 bits"),
        ("features", "messages of 'encoder.convs.0' (SAGEConv(7, 9, aggr=mean)), which"),
        ("features", "messages of 'encoder.convs.1' (GINConv), which"),
        ("gradients", "messages of 'encoder.convs.1' (GINConv), which"),
    ]
    for rank, lines in enumerate(workers(2).run(not_finite)):
        for line, (what, layer) in zip(lines, expected, strict=True):
            assert f"Expected finite {what} in the {layer}" in line
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
    import numpy as np

    plan = distributed((np.int64(2), np.int32(8))).plan
    assert plan.bits == (2, 8)
    rows = plan.rows["hybrid"]
    assert plan.to_dict((100,))["bytes"] == {"100": rows * 29}
    assert plan.to_dict((100,))["backward_bytes"] == {"100": rows * 104}
    assert f"{rows * 29:,} bytes per aggregation in 2 bits, {rows * 104:,} backward in 8" in plan.describe((100,))


def test_options(workers: Pools) -> None:
    workers(1).run(refusals)
