"""Training on a device: the CPU's numbers, no tensor on the wrong device, and no step that waits for it.

The device is the one of ``fake_device``. Each case trains twice, on the CPU and there; then warm steps run in which
what a GPU would be waited for raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fake_device
import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from workers import Workers

NUM_FEATURES, WIDTH, NUM_CLASSES = 17, 18, 4  # wide enough to be packed, with bits
NUM_STEPS = 3


class Case(NamedTuple):
    """What is trained: a layout's options, a model, how its rows are picked, settings."""

    layout: dict[str, Any]
    model: str
    picks: str = "mask"
    setting: dict[str, str] = {}  # noqa: RUF012


HALO, GRID = {"layout": "halo"}, {"layout": "grid"}
CASES = [
    *[Case(layout, model) for layout in (HALO, GRID) for model in ("sage", "gcn", "gat", "transformer", "graph")],
    *[Case(layout, model) for layout in (HALO, GRID) for model in ("sage weights", "gcn weights", "gcn learning")],
    Case(HALO, "sage max"),
    Case(HALO, "gin"),
    *[Case(HALO, "edge", setting={"PYG_DIST_MESSAGE_MIB": mib}) for mib in ("0.01", "inf")],
    Case(HALO, "sage", "list"),
    Case(GRID, "sage", "list"),
    *[Case(layout, "gatv2 edges", "class weights") for layout in (HALO, GRID)],
    *[Case(layout, "embedding") for layout in (HALO, GRID)],
    *[Case(layout, "epilogue") for layout in (HALO, GRID)],
    *[Case(layout, "labels") for layout in (HALO, GRID)],
    *[
        Case({**HALO, "bits": bits, "exchange": exchange}, "sage")
        for bits in (16, 2)
        for exchange in ("hybrid", "post")
    ],
    Case({**HALO, "bits": 4}, "gat"),
    Case(GRID, "sage", setting={"PYG_DIST_GRID_BLOCKS": "3"}),
    Case(GRID, "gcn", setting={"PYG_DIST_GRID_BLOCKS": "3", "PYG_DIST_GRID_SUMS": "all_reduce"}),
]


def _gin(a: int, b: int) -> nn.Module:
    return gnn.GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b)))


def _edge(a: int, b: int) -> nn.Module:
    return gnn.EdgeConv(nn.Sequential(nn.Linear(2 * a, b), nn.Tanh(), nn.Dropout(0.2)), aggr="mean")


def _gatv2(a: int, b: int) -> nn.Module:
    return gnn.GATv2Conv(a, b, edge_dim=3, dropout=0.2)


STOCK: dict[str, Any] = {
    "gat": gnn.GATConv, "transformer": gnn.TransformerConv, "graph": gnn.GraphConv,
    "gin": _gin, "edge": _edge, "gatv2": _gatv2,
}  # fmt: skip


class Net(nn.Module):
    """Two convs, dropout, and what a case adds."""

    def __init__(self, case: Case, data: Any) -> None:
        from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
        from pyg_dist.nn import MaskedLabelPropagation, NodeEmbedding, NormReLUDropout

        super().__init__()
        kind, *options = case.model.split()
        if kind in STOCK:
            made = [STOCK[kind](a, b) for a, b in ((NUM_FEATURES, WIDTH), (WIDTH, NUM_CLASSES))]
        else:
            conv: Any = DistributedGCNConv if kind == "gcn" else DistributedSAGEConv
            aggr = {"aggr": "max"} if "max" in options else {}
            made = [conv(NUM_FEATURES, WIDTH, **aggr), conv(WIDTH, NUM_CLASSES, **aggr)]
        self.convs = nn.ModuleList(made)
        self.epilogue = NormReLUDropout(WIDTH, p=0.3) if kind == "epilogue" else None
        self.labels = MaskedLabelPropagation(NUM_CLASSES, NUM_FEATURES) if kind == "labels" else None
        self.embedding = NodeEmbedding(data, NUM_FEATURES) if kind == "embedding" else None
        self.weight_kind = options[0] if options and options[0] != "max" else ""

    def forward(self, data: Any) -> tuple[Tensor, Tensor]:
        x, mask = data.x if self.embedding is None else self.embedding(), data.train_mask
        if self.labels is not None:
            x, mask = self.labels(x, data.y, mask)
        by_kind = {"weights": data.edge_weight, "learning": data.learning, "edges": data.edge_attr}
        weight = [by_kind[self.weight_kind]] if self.weight_kind else []
        x = self.convs[0](x, data.edge_index, *weight)
        x = self.epilogue(x) if self.epilogue is not None else F.dropout(x.relu(), 0.3, self.training)
        return self.convs[1](x, data.edge_index, *weight), mask


class Training:
    """A model, its data and an optimizer on one device."""

    def __init__(self, case: Case, graph: Data, device: torch.device | str) -> None:
        import pyg_dist

        torch.manual_seed(0)
        self.data: Any = pyg_dist.DistributedData(graph, **case.layout).to(device)
        model: Any = Net(case, self.data)
        if case.model.split()[0] in STOCK:
            model.convs = pyg_dist.distribute(model.convs)
        self.model = model.to(device, torch.float64)
        self.data.learning.requires_grad_()
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        self.class_weight = torch.linspace(1, 2, NUM_CLASSES, device=device, dtype=torch.float64)
        self.uses_weight = case.picks == "class weights"
        self.picked = torch.arange(0, graph.num_nodes, 3, device=device) if case.picks == "list" else None

    def step(self, spoil: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """A training step; ``spoil`` may change the output."""
        self.optimizer.zero_grad()
        out, mask = self.model(self.data)
        index = mask if self.picked is None else self.picked
        loss = F.cross_entropy(spoil(out)[index], self.data.y[index], self.class_weight if self.uses_weight else None)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def graph() -> Data:
    data = random_graph(61, 400, NUM_FEATURES, NUM_CLASSES, seed=3)
    data.learning = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1), dtype=data.x.dtype) + 0.5
    return data


@contextlib.contextmanager
def staging_may_wait() -> Iterator[None]:
    """Messages pass the host, since no process group carries this device: those copies alone are waited for."""
    from pyg_dist.backend.comm import transport
    from pyg_dist.backend.staging import Stage

    def exempted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with fake_device.exempt():
                return function(*args)

        return run

    with (
        patch.object(Stage, "lift", exempted(Stage.lift)),
        patch.object(Stage, "land", staticmethod(exempted(Stage.land))),
        patch.object(transport.StagedMessages, "_land", exempted(transport.StagedMessages._land)),
    ):
        yield


@patch.dict(os.environ)
def train_there(case: Case, library: Path) -> None:
    os.environ.update(case.setting)
    device = fake_device.load(library)
    trained: list[Results] = []
    for place in ("cpu", device):
        training = Training(case, graph(), place)
        losses = {f"loss {k}": training.step().cpu() for k in range(NUM_STEPS)}
        trained.append({**losses, **{name: p.cpu() for name, p in training.model.state_dict().items()}})
    assert_same(trained[1], trained[0], str(case))
    with fake_device.strict(), staging_may_wait():
        for _ in range(2):
            training.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_the_cpus_and_waits_for_nothing(
    pools: Callable[[int], Workers], library: Path, world_size: int, case: Case
) -> None:
    pools(world_size).run(train_there, case, library)


def fail_as_planted(library: Path) -> None:
    device = fake_device.load(library)
    training = Training(Case(HALO, "sage"), graph(), device)
    for _ in range(NUM_STEPS):
        training.step()
    mistakes: dict[str, Callable[[Tensor], Any]] = {
        "_local_scalar_dense": lambda out: out * (out.to_local().sum().item() * 0 + 1),
        "nonzero": lambda out: out + out.to_local().nonzero()[0, 0] * 0,
        "aten::equal": lambda out: out * torch.equal(out.to_local(), out.to_local()),
        "nonzero|by a mask": lambda out: out + out.to_local()[out.to_local() > 0].sum() * 0,
        f"from {device} to cpu": lambda out: out * len(out.to_local().detach().cpu().numpy()),
        "same device": lambda out: out + torch.zeros(NUM_CLASSES),
    }
    for words, mistake in mistakes.items():
        with fake_device.strict(), staging_may_wait(), pytest.raises(RuntimeError, match=words):
            training.step(mistake)


def test_what_waits_is_found(pools: Callable[[int], Workers], library: Path) -> None:
    pools(1).run(fail_as_planted, library)
