"""What a user reads after a mistake, word for word: ``messages.txt`` has every line, by the name of its case.

``...`` stands for what differs between machines: line numbers, and what torch says of a device.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.transforms as T
from random_graphs import random_graph
from torch_geometric.loader import ClusterData, GraphSAINTSampler, NeighborLoader, RandomNodeLoader
from workers import Pools

import pyg_dist
from pyg_dist.backend import ops
from pyg_dist.backend.session.steps import set_up, step

EXPECTED = dict(
    line.split(": ", 1) for line in Path(__file__).with_name("messages.txt").read_text().splitlines() if line
)

# More columns than an address space has rows for: no machine has the memory, whatever it promises.
COLUMNS = 2**43


class Widening(torch.nn.Module):
    """A layer with so many outputs."""

    def forward(self, x: Any) -> Any:
        return x.repeat(1, COLUMNS)


class Model(torch.nn.Module):
    """With such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Widening()

    def forward(self, x: Any) -> Any:
        return self.head(x)


class Widens(torch.autograd.Function):
    """Its gradient has as many columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ops.empty_rows(grad, grad.shape[0], COLUMNS)


def fails_in_the_set_up() -> None:
    with set_up("DistributedData", num_steps=1), step("partition (metis, 2 parts)"):
        np.empty((COLUMNS, 1000))


def warned(graph: Any, **nan: Any) -> str:
    for name, places in nan.items():
        graph[name][places] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyg_dist.DistributedData(graph, partition=torch.arange(20) % 2)
    return " | ".join(str(warning.message) for warning in caught)


def message_of(act: Callable[[], object]) -> str:
    try:
        found = act()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return re.sub(r"(?<=\.py:)\d+|(?<=\(got 'cuda:99': )[^)]*", "...", str(found))


def messages() -> dict[str, str]:
    graph = random_graph(20, 60, dtype=torch.float32)
    graph.edge_attr = graph.edge_weight = None
    data = pyg_dist.DistributedData(graph, partition=torch.arange(20) % 2)
    model = Model()
    x, unseeded = data.x.detach().requires_grad_(), torch.Generator().manual_seed(pyg_dist.rank())
    cases: dict[str, Callable[[], object]] = {
        "out of memory in a layer": lambda: model(data.x),
        "out of memory in a function": lambda: data.x.repeat(1, COLUMNS),
        "out of memory in a backward pass": lambda: Widens.apply(x.to_local()).sum().backward(),
        "out of memory in torch's backward pass": lambda: (
            (torch.ones(1, requires_grad=True).expand(16 * COLUMNS)[:1] * data.x).sum().backward()
        ),
        "out of memory in the set-up": fails_in_the_set_up,
        "device": lambda: data.to("cuda:99"),
        "ToUndirected": lambda: T.ToUndirected()(data),
        "ToSparseTensor": lambda: T.ToSparseTensor()(data),
        "a transform among others": lambda: T.Compose([T.NormalizeFeatures(), T.ToUndirected()])(data),
        "GCNNorm": lambda: T.GCNNorm()(data),
        "VirtualNode": lambda: T.VirtualNode()(data),
        "FixedPoints": lambda: T.FixedPoints(4)(data),
        "NeighborLoader": lambda: NeighborLoader(data, num_neighbors=[2], batch_size=4),
        "ClusterData": lambda: ClusterData(data, num_parts=2, log=False),
        "GraphSAINTSampler": lambda: GraphSAINTSampler(data, batch_size=4),
        "RandomNodeLoader": lambda: next(iter(RandomNodeLoader(data, 4, shuffle=True, generator=unseeded))),
        "NaN": lambda: warned(graph.clone(), x=([3, 3, 17], [0, 4, 1])),
        "NaN of edges": lambda: warned(random_graph(20, 60), edge_weight=[59]),
        "infinities are none": lambda: warned(graph.clone(), x=[]) or "nothing",
    }
    return {name: message_of(act) for name, act in cases.items()}


def test_messages(workers: Pools) -> None:
    found = workers(2).run(messages)
    assert found[0] == EXPECTED
    for name, message in found[1].items():
        expected = EXPECTED[name].replace("[rank 0 of 2]", "[rank 1 of 2]")
        assert message == ("" if name.startswith("NaN") else expected), f"only rank 0 warns: {name}"
