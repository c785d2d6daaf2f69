"""Scripts on a GPU that do more than call a conv on one graph: the CPU's numbers, mostly stock PyG's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same
from gpu_trial import IS_TRIAL
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric import nn as gnn
from typed_models import MODELS, hetero_graph, owners, run_model
from workers import Pools

pytestmark = pytest.mark.gpu

NUM_NODES, WIDTH = 61, 8
Script = Callable[[Any, torch.device, bool], Results]


def train(model: nn.Module, place: torch.device, is_stock: bool, loss: Callable[[Any], Tensor]) -> Results:
    """Losses of three steps and the parameters after them."""
    import pyg_dist

    model = model.double().to(place)
    net: Any = model if is_stock else pyg_dist.distribute(model)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(net))
        losses[-1].backward()
        optimizer.step()
    return {"losses": torch.stack(losses).detach().cpu(), **{name: p.cpu() for name, p in net.state_dict().items()}}


def two_convs(first: Any = gnn.GCNConv) -> nn.ModuleList:
    return nn.ModuleList([first(WIDTH, WIDTH), gnn.SAGEConv(WIDTH, 4)])


def edge_sets(data: Any, place: torch.device, is_stock: bool) -> Results:
    """Three graphs over the same nodes."""
    drawn = [random_graph(NUM_NODES, 200, WIDTH, seed=seed).edge_index.to(place) for seed in (4, 5, 6)]
    sets = drawn if is_stock else [data.edge_set(edges) for edges in drawn]

    def loss(net: Any) -> Tensor:
        outs = [net[1](net[0](data.x, edges).tanh(), edges)[data.train_mask] for edges in sets]
        return F.cross_entropy(sum(outs), data.y[data.train_mask])

    return train(two_convs(gnn.GATConv), place, is_stock, loss)


def feature_batches(data: Any, place: torch.device, is_stock: bool) -> Results:
    """Rows ``[B, N, F]``."""
    x = torch.randn(3, NUM_NODES, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(place)
    edges = data.edge_index
    return train(two_convs(), place, is_stock, lambda net: net[1](net[0](x, edges).tanh(), edges).square().mean())


def global_attention(data: Any, place: torch.device, is_stock: bool) -> Results:
    """Each node to all nodes."""
    model = nn.ModuleList([gnn.GPSConv(WIDTH, gnn.GCNConv(WIDTH, WIDTH), heads=2), nn.Linear(WIDTH, 3 * WIDTH)])

    def loss(net: Any) -> Tensor:
        query, key, value = net[1](net[0](data.x, data.edge_index)).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value).square().mean()

    return train(model, place, is_stock, loss)


def double_backward(data: Any, place: torch.device, is_stock: bool) -> Results:
    """A loss of forces."""

    def loss(net: Any) -> Tensor:
        x = data.x.detach().clone().requires_grad_()
        energy = net[1](net[0](x, data.edge_index).tanh(), data.edge_index).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().mean()

    return train(two_convs(), place, is_stock, loss)


SCRIPTS: dict[str, Script] = {
    script.__name__: script for script in (edge_sets, feature_batches, global_attention, double_backward)
}


def run_script(name: str, place: str) -> None:
    from pyg_dist import DistributedData

    results = []
    for where, is_stock in ((torch.device("cpu"), True), (torch.device(place), False)):
        torch.manual_seed(0)
        data: Any = random_graph(NUM_NODES, 400, WIDTH, seed=3)
        data = data if is_stock else DistributedData(data, partition="random").to(where)
        results.append(SCRIPTS[name](data, where, is_stock))
    assert_same(results[1], results[0], name)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(pools: Pools, device: torch.device, world_size: int, name: str) -> None:
    pools(world_size).run(run_script, name, device.type)


def run_typed(name: str, place: str) -> None:
    import pyg_dist

    results = []
    for where, is_stock in (("cpu", True), (place, False)):
        torch.manual_seed(0)
        data: Any = hetero_graph()
        model = MODELS[name](data.metadata()).double()
        with torch.no_grad():
            model(data.x_dict, data.edge_index_dict)  # sizes of lazy layers
        if not is_stock:
            parts = owners(data, pyg_dist.world_size())
            data, model = pyg_dist.DistributedData(data, partition=parts).to(where), pyg_dist.distribute(model)
        found = run_model(model.to(where), data)
        results.append({key: value.cpu() if isinstance(value, Tensor) else value for key, value in found.items()})
    assert_same(results[1], results[0], name)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", list(MODELS)[::4] if IS_TRIAL else MODELS)
def test_graphs_with_types(pools: Pools, device: torch.device, world_size: int, name: str) -> None:
    pools(world_size).run(run_typed, name, device.type)


def run_links(place: str) -> None:
    """On batches around edges, with labels of those drawn and of others."""
    from pyg_dist import DistributedData
    from pyg_dist.loader import LinkNeighborLoader

    results = []
    for where in (torch.device("cpu"), torch.device(place)):
        plain = random_graph(NUM_NODES, 400, WIDTH, seed=3)
        data: Any = DistributedData(plain, partition="random").to(where)
        loader = LinkNeighborLoader(
            data, [3, 2], batch_size=16, edge_label_index=plain.edge_index[:, :48], neg_sampling="binary", shuffle=True
        )
        torch.manual_seed(0)
        batches = iter(loader)

        def loss(net: Any, batches: Any = batches) -> Tensor:
            batch: Any = next(batches)
            rows = net[1](net[0](batch.x, batch.edge_index).tanh(), batch.edge_index)
            source, target = batch.edge_label_index
            logits = (rows[source] * rows[target]).sum(-1)
            return F.binary_cross_entropy_with_logits(logits, batch.edge_label.to(logits.dtype))

        results.append(train(two_convs(), where, False, loss))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_around_edges(pools: Pools, device: torch.device, world_size: int) -> None:
    pools(world_size).run(run_links, device.type)
