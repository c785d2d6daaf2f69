"""Small graphs on one rank: which calls run PyG's own code, and that it is the same numbers then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_any_conv import CASES, NUM_NODES, F, G, graph, mlp, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn

import pyg_dist
from pyg_dist import loader
from pyg_dist.backend.dense import large_tensors
from pyg_dist.conv import any_conv, gcn, one_rank, sage


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The convs whose calls have run PyG's code."""
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", "10000000")
    monkeypatch.setattr(large_tensors, "LARGE", 1)  # kernels that move rows take these, too
    names: list[str] = []

    def noted(conv: Any, stock: Any, *others: Any) -> Tensor | None:
        out = one_rank.stock_result(conv, stock, *others)
        if out is not None:
            names.append(stock.__name__)
        return out

    for module in (any_conv, gcn, sage):
        monkeypatch.setattr(module, "stock_result", noted)
    return names


_USUAL_WAY = {
    "GAT lazy": "the hook that makes its parameters",
    "SG cached": "what it keeps",
    "DNA": "rows that torch.stack has made", "DNA groups": "the same",
    "PPF": "detached positions, plain normals",
    "of a script": "its code", "subclass": "its code", "enclosed": "its code",
    "SuperGAT": "what it keeps", "SuperGAT scaled": "the same",
    "a graph": "edges in it", "a graph that changes": "the same",
    "a graph by source": "the same", "containers": "the same",
    "edges and a graph": "the same", "edges and containers": "the same",
    "by path": "its code", "own names": "its code", "own names, plain": "its code",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(taken: list[str], name: str) -> None:
    """Bit for bit; gradients of rows that are given twice are added in another order."""
    data = graph()
    got, expected = step(pyg_dist.DistributedData(data), CASES[name], True), step(data, CASES[name], False)
    if taken:
        assert got.keys() == expected.keys()
        assert torch.equal(got["out"], expected["out"])
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-13, atol=1e-15)
    else:
        assert name in _USUAL_WAY


def _seen(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, inputs, output: None)
    return module


def _with(conv: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(conv, name, value)
    return conv


def _step_seen(conv: Any) -> Any:
    conv.register_message_forward_hook(lambda *given: None)
    return conv


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "it drops weights": lambda: gnn.GATConv(F, G, dropout=0.5),
    "a part drops rows": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.Dropout())),
    "a model of PyG drops rows": lambda: gnn.GINConv(gnn.MLP([F, G, G], dropout=[0.5, 0.0])),
    "a part draws slopes": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.RReLU())),
    "a part alone is in training": lambda: _with(
        gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.Dropout())), training=False
    ),
    "a part calls a function of the script": lambda: gnn.GINConv(gnn.MLP([F, G, G], act=lambda x: x.relu())),
    "it calls a function that draws": lambda: gnn.ResGatedGraphConv(F, G, act=nn.functional.dropout),
    "a part is a script's": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), _Noise())),
    "a part is hooked": lambda: gnn.GINConv(_seen(nn.Linear(F, G))),
    "a step is hooked": lambda: _step_seen(gnn.GATConv(F, G)),
    "it keeps its norm": lambda: gnn.GCNConv(F, G, cached=True),
    "a step is replaced": lambda: _with(gnn.GATConv(F, G), update=lambda inputs: inputs),
}


@pytest.mark.parametrize("why", OTHERS)
def test_other_convs(taken: list[str], why: str) -> None:
    """Convs that draw, that something sees, or that keep what belongs to a graph go the usual way."""
    conv, data = pyg_dist.distribute(OTHERS[why]()), pyg_dist.DistributedData(graph(torch.float32))
    conv(data.x, data.edge_index)
    assert not taken


def test_dropout_counts_in_training_only(taken: list[str]) -> None:
    conv, data = pyg_dist.distribute(gnn.GATConv(F, G, dropout=0.5)), pyg_dist.DistributedData(graph(torch.float32))
    for training in (True, False):
        conv.train(training)(data.x, data.edge_index)
        assert taken == ([] if training else ["GATConv"])


def test_other_graphs(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, whose sums are scaled; few bits, which draw numbers; and rows and edges that are more than allowed."""
    data = graph(torch.float32)
    conv = pyg_dist.distribute(gnn.SAGEConv(F, G))
    few_bits = pyg_dist.DistributedData(data, bits=8)
    conv(few_bits.x, few_bits.edge_index)
    (batch, *_) = loader.UniformVertexLoader(pyg_dist.DistributedData(data), 20, num_steps=1)
    conv(batch.x, batch.edge_index)
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", str(8 * data.num_edges * F - 1))
    large = pyg_dist.DistributedData(data)
    conv(large.x, large.edge_index)
    assert not taken
    other = pyg_dist.distribute(gnn.ResGatedGraphConv(F, G))  # no kernel takes its steps
    other(large.x, large.edge_index)
    selecting = pyg_dist.distribute(gnn.MFConv(F, G))  # a kernel takes its sums, which are little of it
    selecting(large.x, large.edge_index)
    assert taken == ["ResGatedGraphConv", "MFConv"]
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", str(data.num_edges * F - 1))
    larger = pyg_dist.DistributedData(data)  # the limit is read once for a graph
    other(larger.x, larger.edge_index)
    assert taken == ["ResGatedGraphConv", "MFConv"]


def test_profiles_show_phases(taken: list[str]) -> None:
    conv, data = pyg_dist.distribute(gnn.SAGEConv(F, G)), pyg_dist.DistributedData(graph(torch.float32))
    with pyg_dist.profile():
        conv(data.x, data.edge_index)
    assert not taken


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_take_the_same_way(taken: list[str], reentrant: bool) -> None:
    """From the first step on, for one conv in two places."""
    data = graph()
    ours = pyg_dist.DistributedData(data)
    stock = gnn.ResGatedGraphConv(F, F).double()
    conv: Any = pyg_dist.distribute(copy.deepcopy(stock))

    def run(conv: nn.Module, data: Any) -> Tensor:
        h = data.x.clone().requires_grad_()
        for _ in range(2):
            h = checkpoint(conv, h, data.edge_index, use_reentrant=reentrant)
        return h.square().mean()

    for model, given in ((stock, data), (conv, ours)):
        run(model, given).backward()
    again = 2 if reentrant else 0  # the other form ends what it computes again before the conv returns
    assert taken == (2 + again) * ["ResGatedGraphConv"]
    for mine, its in zip(conv.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-13, atol=1e-15)


def test_errors_are_those_of_the_usual_way(taken: list[str]) -> None:
    conv, data = pyg_dist.distribute(gnn.SAGEConv(F + 1, G)), pyg_dist.DistributedData(graph(torch.float32))
    with pytest.raises(pyg_dist.errors.DataError, match=f"expected rows with {F + 1} columns"):
        conv(data.x, data.edge_index)
    assert not taken


def test_results_are_rows(taken: list[str]) -> None:
    conv, data = pyg_dist.distribute(gnn.GINConv(mlp(F, G))), pyg_dist.DistributedData(graph(torch.float32))
    out = conv(data.x, data.edge_index)
    assert taken
    assert isinstance(out, pyg_dist.tensor.NodeTensor)
    assert out.shape == (NUM_NODES, G)


def test_edges_by_local_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the edge tensors; of a selection of edges, too, and none on the grid."""
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", "10000000")
    data = graph()
    ours = pyg_dist.DistributedData(data)
    for handle in (ours.edge_index, ours.edge_index[:, ours.edge_weight > 0]):
        laid = handle.graph
        ends = laid.node_sharding.global_id[laid.one_rank_edges]
        assert torch.equal(ends, data.edge_index[:, laid.edge_sharding.global_id])
    assert pyg_dist.DistributedData(data, layout="grid").graph.one_rank_columns == 0
