"""Every aggregation module of PyG inside of a distributed SAGE conv: the same numbers, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import NUM_CLASSES, NUM_FEATURES, Results, Side, assert_same, gradients, graph, parts
from random_graphs import random_graph, uneven_parts
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import MLP, SAGEConv, aggr, norm
from torch_geometric.nn.dense import Linear
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedSAGEConv

F = NUM_FEATURES


def degrees() -> torch.Tensor:
    return torch.bincount(torch.bincount(graph().edge_index[1]))


# The module, and how many columns it makes of five.
MODULES: dict[str, tuple[Callable[[], Any], int]] = {
    "sum": (aggr.SumAggregation, F),
    "mean": (aggr.MeanAggregation, F),
    "max": (aggr.MaxAggregation, F),
    "min": (aggr.MinAggregation, F),
    "mul": (aggr.MulAggregation, F),
    "var": (aggr.VarAggregation, F),
    "std": (aggr.StdAggregation, F),
    "softmax": (lambda: aggr.SoftmaxAggregation(learn=True), F),
    "softmax by channel": (lambda: aggr.SoftmaxAggregation(learn=True, channels=F), F),
    "power mean": (lambda: aggr.PowerMeanAggregation(learn=True), F),
    "median": (aggr.MedianAggregation, F),
    "quantiles": (lambda: aggr.QuantileAggregation([0.25, 0.5, 1.0]), 3 * F),
    "lstm": (lambda: aggr.LSTMAggregation(F, F), F),
    "gru": (lambda: aggr.GRUAggregation(F, F), F),
    "set2set": (lambda: aggr.Set2Set(F, 2), 2 * F),
    "degree scaler": (lambda: aggr.DegreeScalerAggregation(["mean", "max"], ["identity", "linear"], degrees()), 4 * F),
    "learned scaler": (lambda: aggr.DegreeScalerAggregation("mean", "amplification", degrees(), train_norm=True), F),
    "sort": (lambda: aggr.SortAggregation(k=3), 3 * F),
    "multiset transformer": (lambda: aggr.GraphMultisetTransformer(F, k=2, heads=1), F),
    "attention": (lambda: aggr.AttentionalAggregation(nn.Linear(F, 1), nn.Linear(F, F)), F),
    "mlp": (lambda: aggr.MLPAggregation(F, F, 20, hidden_channels=4, num_layers=2, norm=None), F),
    "deep sets": (lambda: aggr.DeepSetsAggregation(nn.Linear(F, F), MLP([F, 4, F], norm=None)), F),
    "set transformer": (lambda: aggr.SetTransformerAggregation(F, heads=1, layer_norm=True), F),
    "lcm": (lambda: aggr.LCMAggregation(F, F), F),
    "variance preserving": (aggr.VariancePreservingAggregation, F),
    "patches": (lambda: aggr.PatchTransformerAggregation(F, F, patch_size=2, hidden_channels=4), F),
    "several by attention": (
        lambda: aggr.MultiAggregation(
            ["mean", "max", "std"], mode="attn", mode_kwargs={"in_channels": F, "out_channels": F, "num_heads": 1}
        ),
        F,
    ),
}  # fmt: skip


def step(side: Side, make: Callable[[], Any], num_columns: int) -> Results:
    torch.manual_seed(0)
    conv = side.SAGEConv(F, NUM_CLASSES, aggr=make())
    conv.lin_l = Linear(num_columns, NUM_CLASSES)
    conv, x = conv.double(), side.features()
    out = conv(x, side.data.edge_index)
    side.loss(out.tanh()).backward()
    return {"out": out.detach(), **gradients(conv, x=x)}


@on_ranks(3)
@pytest.mark.parametrize("name", MODULES)
def test_aggregations(name: str) -> None:
    data = graph()
    order = data.edge_index[1].argsort(stable=True)  # as PyG's ordered aggregations want
    for key in ("edge_index", "edge_weight", "edge_attr"):
        data[key] = data[key].index_select(-1 if key == "edge_index" else 0, order)
    distributed = pyg_dist.DistributedData(data, partition=parts(data, pyg_dist.world_size()))
    sides = Side(data, SAGEConv, None, True), Side(distributed, DistributedSAGEConv, None, False)
    expected, got = (step(side, *MODULES[name]) for side in sides)
    assert_same(got, expected)


def pooled(data: Any, is_ours: bool) -> Results:
    found: Results = {}
    for name, (make, _) in MODULES.items():
        torch.manual_seed(0)
        pool, x = make().double(), data.x.detach().clone().requires_grad_()
        if is_ours:
            pyg_dist.distribute(pool)
        out = pool(x, data.batch)
        (out.sigmoid() * torch.arange(len(out)).view(-1, *[1] * (out.dim() - 1))).sum().backward()
        results = {"out": out.detach(), **gradients(pool, x=x)}
        found |= {f"{name}: {key}": value for key, value in results.items()}
    return found


def compare_pooled(layout: str, expected: Results) -> None:
    options: dict[str, Any] = {"layout": layout}
    if layout == "halo":  # each graph on several ranks, and none on the last
        options["partition"] = uneven_parts(37, pyg_dist.world_size())
    assert_same(pooled(pyg_dist.DistributedData(graphs(), **options), True), expected)


def graphs() -> Batch:
    return Batch.from_data_list([random_graph(n, 5 * n, F, seed=n) for n in (12, 5, 11, 9)])


@pytest.mark.parametrize(("world_size", "layout"), [(1, "halo"), (2, "halo"), (3, "halo"), (2, "grid")])
def test_graphs_are_pooled(workers: Pools, world_size: int, layout: str) -> None:
    workers(world_size).run(compare_pooled, layout, pooled(graphs(), False))


@on_ranks(3)
def test_gradients_of_the_largest_are_differentiable() -> None:
    """A penalty on the gradient of the features, which is differentiated again."""
    data = graph()
    stock = SAGEConv(F, NUM_CLASSES, aggr="max").double()
    ours = DistributedSAGEConv(F, NUM_CLASSES, aggr="max").double()
    ours.load_state_dict(stock.state_dict())
    results = []
    for side, conv in ((data, stock), (pyg_dist.DistributedData(data), ours)):
        x = side.x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(conv(x, side.edge_index).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append(gradients(conv, x=x))
    assert_same(results[1], results[0])


REFUSED: dict[str, Callable[[], Any]] = {
    "BatchNorm1d": lambda: aggr.MLPAggregation(F, F, 20, hidden_channels=4, num_layers=2),  # the default of its MLP
    "InstanceNorm": lambda: aggr.DeepSetsAggregation(norm.InstanceNorm(F)),
    "GraphNorm": lambda: aggr.DeepSetsAggregation(norm.GraphNorm(F)),
    "PairNorm": lambda: aggr.DeepSetsAggregation(norm.PairNorm()),
    "LayerNorm": lambda: aggr.DeepSetsAggregation(norm.LayerNorm(F)),
    "EquilibriumAggregation": lambda: aggr.EquilibriumAggregation(F, F, [4]),
}


def messages() -> dict[str, str]:
    data = graph()
    distributed = pyg_dist.DistributedData(data, partition=parts(data, pyg_dist.world_size()))
    found = {}
    for name, make in REFUSED.items():
        with pytest.raises(pyg_dist.errors.UnsupportedError) as caught:
            DistributedSAGEConv(F, 2, aggr=make()).double()(distributed.x, distributed.edge_index)
        found[name] = str(caught.value)
    return found


def test_aggregations_that_look_at_several_nodes_are_refused(workers: Pools) -> None:
    """On one rank's nodes alone they would give other numbers, without an error."""
    for found in workers(3).run(messages):
        for name, message in found.items():
            assert message.startswith(f"{name} inside of the aggregation"), message
            assert "\n" not in message
