"""What tests of neighbours draw from: a graph, loaders, a model and its step; and an epoch of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from batch_cases import laid_out
from random_graphs import random_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.utils import to_undirected

import pyg_dist
from pyg_dist.loader import NeighborLoader

N = 41
OPTIONS: dict[str, dict[str, Any]] = {
    "directional": {"shuffle": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "disjoint": {"disjoint": True, "shuffle": True},
    "disjoint, induced": {"disjoint": True, "subgraph_type": "induced"},
    "replace": {"replace": True},
    "all": {"num_neighbors": [-1, -1]},
    "no hops": {"num_neighbors": []},
    "no hop's edges": {"num_neighbors": [2, 0, 2], "drop_last": True},
}


def graph_of(name: str) -> Data:
    graph = random_graph(N, 150)
    if name == "bidirectional":
        graph.edge_index, graph.edge_weight = to_undirected(graph.edge_index, graph.edge_weight)
        graph.edge_attr = torch.stack([graph.edge_weight, graph.edge_weight**2, graph.edge_weight.cos()], dim=1)
    return graph


def loader_of(data: Any, name: str) -> Any:
    options = {"num_neighbors": [3, 2], "batch_size": 8, **OPTIONS[name]}
    return NeighborLoader(data, input_nodes=data.train_mask, **options)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([SAGEConv(5, 8), GATConv(8, 6, edge_dim=3), GCNConv(6, 4)]).double()


def step(convs: nn.ModuleList, batch: Any) -> Any:
    x = convs[0](batch.x, batch.edge_index).relu()
    x = convs[1](x, batch.edge_index, edge_attr=batch.edge_attr).relu()
    x = convs[2](x, batch.edge_index, batch.edge_weight)
    return F.cross_entropy(x[: batch.batch_size], batch.y[: batch.batch_size])


def whole_of(rows: Any) -> Any:
    return rows.full_tensor() if hasattr(rows, "full_tensor") else rows


def trained(name: str, mesh: dict[str, int] | str | None) -> list[tuple[Any, ...]]:
    """Facts of each batch of an epoch, and its loss while training; ``"stock"``: with PyG alone, in one process."""
    graph = graph_of(name)
    data: Any = graph if isinstance(mesh, str) else laid_out(graph, mesh)
    convs: Any = model() if isinstance(mesh, str) else pyg_dist.distribute(model())
    optimizer, found = torch.optim.SGD(convs.parameters(), lr=0.1), []
    for batch in loader_of(data, name):
        optimizer.zero_grad()
        loss = step(convs, batch)
        loss.backward()
        optimizer.step()
        whole = [whole_of(batch[key]).tolist() for key in ("n_id", "e_id", "edge_index")]
        facts = [batch.get(key) for key in ("batch_size", "num_sampled_nodes", "num_sampled_edges")]
        trees = whole_of(batch.batch).tolist() if "disjoint" in name else None
        found.append((*whole, batch.input_id.tolist(), facts, trees, loss.item()))
    return found
