"""``distribute`` and ``DistributedConv``: what stays of a model, what a distributed conv gives, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, gradients
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import models
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.errors import OptionError, PygDistError, UnsupportedError

NUM_NODES, FEATURES, CLASSES = 47, 6, 4


def graph() -> Data:
    return random_graph(NUM_NODES, 310, FEATURES, CLASSES, seed=1)


def distributed(data: Data, **options: Any) -> Any:
    options = {"partition": uneven_parts(NUM_NODES, pyg_dist.world_size()), **options}
    return pyg_dist.DistributedData(data, **options)


def sequential() -> nn.Module:
    parts = [
        (gnn.GATConv(FEATURES, 8), "x, edge_index -> h"),
        nn.Tanh(),
        (gnn.GCNConv(8, 8), "h, edge_index -> h2"),
        (lambda a, b: a + b, "h, h2 -> h"),
        (gnn.MeanSubtractionNorm(), "h -> h"),
        (gnn.GraphSizeNorm(), "h -> h"),
        (gnn.Linear(8, CLASSES), "h -> h"),
    ]
    return gnn.Sequential("x, edge_index", parts)  # type: ignore[no-any-return]


def basic(model: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: model(FEATURES, 8, num_layers=3, out_channels=CLASSES, act="tanh", **options)


PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "linear"], "deg": torch.tensor([4, 10, 20, 13])}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GraphSAGE": basic(models.GraphSAGE, jk="lstm"),
    "GCN": basic(models.GCN, norm="graph_norm", jk="cat"),
    "GAT": basic(models.GAT, heads=2, norm="LayerNorm", norm_kwargs={"mode": "graph"}),
    "GATv2": basic(models.GAT, v2=True, norm="LayerNorm", norm_kwargs={"mode": "node"}, jk="max"),
    "GIN": basic(models.GIN, norm="BatchNorm"),
    "PNA": basic(models.PNA, norm="PairNorm", **PNA),
    "EdgeCNN": basic(models.EdgeCNN, norm="InstanceNorm", norm_kwargs={"affine": True, "track_running_stats": True}),
    "more norms": basic(models.GCN, norm="DiffGroupNorm", norm_kwargs={"groups": 2}),
    "Sequential": sequential,
}  # fmt: skip


def step(model: nn.Module, data: Any) -> Results:
    model = model.double()
    x = data.x.detach().clone().requires_grad_()
    out = model(x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    trained = gradients(model, x=x)
    model.eval()
    return {"out": out.detach(), "loss": loss.detach(), "eval": model(data.x, data.edge_index).detach(), **trained}


def compare_models(names: list[str]) -> None:
    data = graph()
    ours = distributed(data)
    for name in names:
        torch.manual_seed(0)
        stock = MODELS[name]()
        model = copy.deepcopy(stock)
        keys = list(model.state_dict())
        assert pyg_dist.distribute(model) is model
        assert list(model.state_dict()) == keys
        expected, got = step(stock, data), step(model, ours)
        assert_same(got, expected, name)
        assert str(model) == str(stock)


@pytest.mark.parametrize("world_size", [1, 3])
def test_models_of_pyg(workers: Pools, world_size: int) -> None:
    workers(world_size).run(compare_models, list(MODELS))


def random_losses(epochs: int) -> list[float]:
    """Losses of a training with dropout in attention, on features and on edge weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = gnn.GATConv(FEATURES, 8, heads=2, dropout=0.4)
            self.second = gnn.APPNP(3, 0.1, dropout=0.3)
            self.third = gnn.TransformerConv(16, CLASSES, dropout=0.3)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            x = F.dropout(self.first(x, edge_index).tanh(), 0.3, self.training)
            return self.third(self.second(x, edge_index), edge_index)  # type: ignore[no-any-return]

    torch.manual_seed(3)
    data = distributed(graph())
    model = pyg_dist.distribute(Net().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_dropout_does_not_depend_on_the_world_size(workers: Pools) -> None:
    (alone,) = workers(1).run(random_losses, 5)
    assert len(set(alone)) == 5
    for world_size in (2, 4):
        for losses in workers(world_size).run(random_losses, 5):
            assert losses == pytest.approx(alone, rel=1e-10)


@on_ranks(1, 3)
def test_attention_weights() -> None:
    """In PyG's order, self loops last."""
    data = graph()
    ours = distributed(data)
    weights = {gnn.GATConv: "lin.weight", gnn.GATv2Conv: "lin_l.weight", gnn.TransformerConv: "lin_key.weight"}
    for make, name in weights.items():
        torch.manual_seed(0)
        stock = make(FEATURES, CLASSES, heads=2).double()
        conv = pyg_dist.conv.DistributedConv(copy.deepcopy(stock))
        _, (edge_index, alpha) = stock(data.x, data.edge_index, return_attention_weights=True)
        _, (edges, ours_alpha) = conv(ours.x, ours.edge_index, return_attention_weights=True)
        assert edges.shape == edge_index.shape
        assert torch.equal(edges.full_tensor(), edge_index)
        assert_same({"alpha": ours_alpha.detach()}, {"alpha": alpha.detach()})
        weight, ours_weight = (dict(c.named_parameters())[name] for c in (stock, conv))
        (expected,) = torch.autograd.grad(alpha.square().sum(), weight)
        (gradient,) = torch.autograd.grad(ours_alpha.square().sum(), ours_weight)
        assert_same({"gradient": gradient}, {"gradient": expected})


def modes(conv: nn.Module, data: Any) -> Results:
    """Gradients of gradients, both kinds of checkpoints, inference, and plain leaves with all rows."""
    x, attr = data.x.detach().clone().requires_grad_(), data.edge_attr.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(conv(x, data.edge_index, attr).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    results = gradients(conv, twice_x=x, twice_attr=attr)
    for reentrant in (True, False):
        conv.zero_grad()
        x, attr = data.x.detach().clone().requires_grad_(), data.edge_attr.detach().clone().requires_grad_()
        checkpoint(conv, x, data.edge_index, attr, use_reentrant=reentrant).square().sum().backward()
        results |= {f"{reentrant} {name}": v for name, v in gradients(conv, x=x, attr=attr).items()}
    conv.zero_grad()
    whole, whole_attr = graph().x.requires_grad_(), graph().edge_attr.requires_grad_()
    conv(whole, data.edge_index, whole_attr).square().sum().backward()
    with torch.inference_mode():
        results["inference"] = conv(data.x, data.edge_index, data.edge_attr)
    return {**results, **gradients(conv, plain_x=whole, plain_attr=whole_attr)}


@on_ranks(1, 3)
def test_modes() -> None:
    data = graph()
    for make in (gnn.GATv2Conv, gnn.ResGatedGraphConv):
        torch.manual_seed(0)
        stock = make(FEATURES, CLASSES, edge_dim=3).double()
        conv = pyg_dist.distribute(copy.deepcopy(stock))
        assert_same(modes(conv, distributed(data)), modes(stock, data))
    propagation = gnn.LabelPropagation(3, 0.8)  # its forward is under torch.no_grad()
    ours, expected = distributed(data), propagation(data.y, data.edge_index, data.train_mask)
    got = pyg_dist.distribute(propagation)(ours.y, ours.edge_index, ours.train_mask)
    assert_same({"labels": got}, {"labels": expected})


def reversible(data: Any, is_ours: bool) -> Results:
    """Two steps of blocks with batch norm within, which PyG runs three times in each; then in evaluation."""
    torch.manual_seed(0)
    inner = gnn.GENConv(FEATURES // 2, FEATURES // 2)
    model = nn.ModuleList([gnn.GroupAddRev(inner, num_groups=2), nn.Linear(FEATURES, CLASSES)]).double()
    if is_ours:
        pyg_dist.distribute(pyg_dist.distribute(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        h = model[0](data.x.clone(), data.edge_index)
        F.cross_entropy(model[1](h), data.y).backward()
        optimizer.step()
    norms = {name: value.detach() for name, value in model.state_dict().items()}
    return {**norms, "out": model.eval()[0](data.x.clone(), data.edge_index).detach()}


@on_ranks(1, 3)
def test_statistics_within_reversible_blocks() -> None:
    assert_same(reversible(distributed(graph()), True), reversible(graph(), False), "reversible")


@on_ranks(1, 2)
def test_what_stays() -> None:
    data = distributed(graph())
    conv = gnn.GATConv(FEATURES, FEATURES).double()
    model = nn.ModuleList([conv, gnn.GCNConv(FEATURES, FEATURES).double(), conv])
    calls: list[str] = []
    conv.register_forward_hook(lambda *_: calls.append("forward"))
    conv.register_propagate_forward_pre_hook(lambda *_: calls.append("before"))
    conv.register_message_forward_hook(lambda _, inputs, out: calls.append(type(out).__name__) or 2 * out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    pyg_dist.distribute(model)
    assert pyg_dist.distribute(model) is model, "a second time changes nothing"
    assert model[0] is model[2] is conv, "shared convs stay shared"
    assert isinstance(conv, gnn.GATConv)
    assert isinstance(model[1], pyg_dist.conv.DistributedGCNConv)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    doubled = conv(data.x, data.edge_index).detach()
    assert calls == ["before", "EdgeTensor", "forward"]
    conv._message_forward_hooks.clear()
    half = conv(data.x, data.edge_index)
    assert torch.allclose(doubled - conv.bias.detach(), 2 * (half.detach() - conv.bias.detach()))
    half.square().mean().backward()
    optimizer.step()
    # Copies and pickles are distributed, too.
    conv._forward_hooks.clear()
    conv._propagate_forward_pre_hooks.clear()
    expected = conv(data.x, data.edge_index).detach()
    for twin in (copy.deepcopy(conv), copy.copy(conv), pickle.loads(pickle.dumps(conv))):
        assert type(twin) is type(conv)
        assert_same_bits(twin(data.x, data.edge_index).to_local(), expected.to_local())
    # A state_dict goes to the stock conv and back.
    stock = gnn.GATConv(FEATURES, FEATURES).double()
    stock.load_state_dict(conv.state_dict())
    assert_same({"out": expected}, {"out": stock(graph().x, graph().edge_index).detach()})


def test_on_plain_tensors_it_is_the_stock_model() -> None:
    data = graph()
    for make in (MODELS["GAT"], MODELS["EdgeCNN"], MODELS["GCN"], lambda: gnn.TAGConv(FEATURES, CLASSES)):
        torch.manual_seed(0)
        stock = make()
        model = pyg_dist.distribute(copy.deepcopy(stock))
        assert_same(step(model, data), step(stock, data))
    conv = pyg_dist.distribute(gnn.GINConv(nn.Linear(FEATURES, CLASSES))).double()
    sparse = torch.sparse_coo_tensor(data.edge_index.flip([0]), torch.ones(310).double(), (NUM_NODES, NUM_NODES))
    assert torch.allclose(conv(data.x, sparse.to_sparse_csr()), conv(data.x, data.edge_index))
    scripted = torch.jit.script(pyg_dist.distribute(gnn.GraphConv(FEATURES, CLASSES)))
    assert scripted(data.x.float(), data.edge_index).shape == (NUM_NODES, CLASSES)


def mean_square(input: torch.Tensor) -> torch.Tensor:
    return input.square().mean()


class Squares(nn.Module):
    """Of a dict's tensors, which torch looks at only when it has compiled code run."""

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return mean_square(given["a"])


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_torch_jit_compiles_is_refused() -> None:
    data = distributed(graph())
    args, compiles = (data.x, data.edge_index), "^torch.jit compiles for plain tensors .*: call the module or function"
    model = pyg_dist.distribute(gnn.models.GCN(FEATURES, CLASSES, num_layers=1)).double()
    expected = model(*args)
    with pytest.raises(pyg_dist.errors.UnsupportedError, match=compiles):
        torch.jit.trace(model, args)
    scripted, x = torch.jit.script(model), data.x.full_tensor()
    loss, mean = torch.jit.script(mean_square), torch.jit.trace(torch.mean, x)
    of_dict = torch.jit.trace(Squares(), ({"a": x},), strict=False)
    for call in (
        lambda: scripted(*args), lambda: loss(data.x), lambda: mean(data.x), lambda: loss(input=data.x.T),
        lambda: of_dict({"a": data.x}), lambda: of_dict.forward({"a": data.x[data.train_mask].T}),
    ):  # fmt: skip
        with pytest.raises(pyg_dist.errors.MixedRowsError, match=compiles):
            call()
    assert torch.equal(loss(x), mean_square(x))
    assert pyg_dist.distribute(scripted)(x, data.edge_index.full_tensor()).shape == expected.shape
    with pytest.raises(pyg_dist.errors.UnsupportedError, match=r"call pyg_dist.distribute\(model\) after torch.jit.sc"):
        model(*args)
    assert torch.equal(pyg_dist.distribute(model)(*args).to_local(), expected.to_local())


def rows_sent() -> dict[str, int]:
    data = distributed(graph())
    convs = {
        "GAT": gnn.GATConv(FEATURES, CLASSES), "GATv2": gnn.GATv2Conv(FEATURES, CLASSES),
        "GIN": gnn.GINConv(nn.Identity()), "Edge": gnn.EdgeConv(nn.Linear(2 * FEATURES, CLASSES)),
    }  # fmt: skip
    found = {"post": data.plan.rows["post"], "hybrid": data.plan.rows["hybrid"]}
    for name, conv in convs.items():
        pyg_dist.distribute(conv.double())
        before = data.traffic.num_rows
        with torch.no_grad():
            conv(data.x.clone(), data.edge_index)
        found[name] = data.traffic.num_rows - before
    return found


def test_rows_travel_once_for_each_tensor(workers: Pools) -> None:
    """GAT sends features and attention scores; GATv2 needs one tensor twice; GIN is a sum, which partial sums serve."""
    found = workers(3).run(rows_sent)
    sent = {name: sum(rank[name] for rank in found) for name in ("GAT", "GATv2", "GIN", "Edge")}
    post, hybrid = found[0]["post"], found[0]["hybrid"]
    assert 0 < hybrid < post
    assert sent == {"GAT": 2 * post, "GATv2": post, "GIN": hybrid, "Edge": post}


def refusals() -> list[str]:
    plain = graph()
    data, conv = distributed(plain), pyg_dist.conv.DistributedConv(gnn.GATConv(FEATURES, CLASSES).double())
    other = distributed(plain)
    sparse = Data(x=plain.x, adj_t=torch.sparse_coo_tensor(plain.edge_index.flip([0]), plain.edge_weight, (47, 47)))
    edges = conv(data.x, data.edge_index, return_attention_weights=True)[1][0]
    asked = ("torch_geometric.typing.WITH_KNN", "torch_geometric.nn.conv.edge_conv.knn")  # by PyG 2.8, and before
    with patch(asked[0], True, create=True), patch(asked[1], len, create=True):
        model = nn.Sequential(gnn.GATConv(2, 2), gnn.DynamicEdgeConv(nn.Linear(4, 2), 3))
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (OptionError, lambda: pyg_dist.distribute(conv.state_dict())),
        (UnsupportedError, lambda: pyg_dist.distribute(model)),
        (UnsupportedError, lambda: pyg_dist.conv.DistributedConv(model)),
        (UnsupportedError, lambda: conv(data.x, pyg_dist.DistributedData(sparse).adj_t)),
        (PygDistError, lambda: conv(other.x, data.edge_index)),
        (PygDistError, lambda: edges.add_(1)),
        (PygDistError, lambda: conv(plain.x, plain.edge_index)),
    ]
    found = []
    for error, call in calls:
        with pytest.raises(error) as caught:
            call()
        found.append(str(caught.value))
    assert type(model[0]) is gnn.GATConv, "a model that is refused is not changed"
    return found


def test_refusals(workers: Pools) -> None:
    for found in workers(2).run(refusals):
        assert not any("\n" in message for message in found)
        for message, expected in zip(found, [
            "distribute expected a model (got OrderedDict): pass an nn.Module",
            "distribute stopped at '1': DynamicEdgeConv takes no 'edge_index'",
            "DistributedConv expected a MessagePassing conv (got Sequential): pyg_dist.distribute(model)",
            "GATConv expected data.edge_index (got adj_t",
            "two different graphs",
            "would change a distributed edge_index, which is fixed",
            "expected features and edge_index of a DistributedData (got Tensor and a plain Tensor",
        ], strict=True):  # fmt: skip
            assert expected in message
