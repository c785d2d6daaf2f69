"""The models of ``convs.py`` in DGL 2.1, where it is installed; ``convs.py`` then times it beside the others.

DGL's last wheel for CPUs came with GraphBolt, its sampler, compiled for torch 2.2 at most. Convs need none of it, so an
empty module takes its place, and DGL runs on the same torch as everything else. Its import counts as memory, 35 MiB. In
an environment of its own, since DGL asks for an old setuptools:

    pip install --no-deps dgl==2.1.0 setuptools==65.7.0 torchdata
    pip install pandas pydantic pyyaml
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from measure import Epoch
from torch import Tensor

CONVS = ("gat", "gatv2", "gin", "tag", "sg", "appnp", "gcn2")
"""DGL has no conv like TransformerConv for one kind of node, and another EdgeConv and ChebConv."""


class _NoGraphBolt(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def is_installed() -> bool:
    """Whether this environment has DGL."""
    return importlib.util.find_spec("dgl") is not None


def training_epoch(data: Any, conv: str, heads: int, columns: int, hidden: int) -> Epoch:
    """Return a function that trains for one epoch; layers and sizes as ``convs.layers_of``."""
    sys.modules.setdefault("dgl.graphbolt", _NoGraphBolt("dgl.graphbolt"))
    import dgl

    graph = dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=data.num_nodes)
    if conv not in ("gin", "tag"):
        graph = dgl.add_self_loop(graph)  # as PyG's convs do in each call
    graph.create_formats_()
    in_channels, num_classes = data.num_features, int(data.y.max()) + 1
    model = _Model(_layers(dgl.nn, conv, in_channels, num_classes, heads, columns, hidden))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, data.x)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


class _Model(torch.nn.Module):
    """Layers with ReLU and dropout between them, as ``convs.Model``."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        first: Tensor | None = None
        for k, layer in enumerate(self.layers):
            name = type(layer).__name__
            if k > 0 and name != "APPNPConv":
                x = F.dropout(x.relu(), p=0.5, training=self.training)
            first = x if k == 1 else first
            if isinstance(layer, torch.nn.Linear):
                x = layer(x)
            elif name == "GCN2Conv":
                x = layer(graph, x, first)
            else:
                x = layer(graph, x).flatten(1)  # heads side by side
        return x


def _layers(
    nn: Any, conv: str, in_channels: int, num_classes: int, heads: int, columns: int, hidden: int
) -> list[torch.nn.Module]:
    pairs = (in_channels, hidden), (hidden, num_classes)
    if conv in ("gat", "gatv2"):
        make = nn.GATConv if conv == "gat" else nn.GATv2Conv
        return [make(in_channels, columns, heads), make(heads * columns, num_classes, 1)]
    if conv == "gin":
        return [nn.GINConv(_mlp(a, hidden, b), "sum") for a, b in pairs]
    if conv == "tag":
        return [nn.TAGConv(a, b, k=3) for a, b in pairs]
    if conv == "sg":
        return [nn.SGConv(in_channels, num_classes, k=2)]
    ends = [torch.nn.Linear(a, b) for a, b in pairs]
    if conv == "appnp":
        return [*ends, nn.APPNPConv(k=10, alpha=0.1)]
    return [ends[0], *(nn.GCN2Conv(hidden, layer, alpha=0.1, lambda_=0.5) for layer in range(1, 5)), ends[1]]


def _mlp(*sizes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(sizes[0], sizes[1]), torch.nn.ReLU(), torch.nn.Linear(sizes[1], sizes[2])
    )
