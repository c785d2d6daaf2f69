"""``DistributedData(layout="grid")``: options, plan, attributes, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same, gradients
from random_graphs import random_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.transforms import ToSparseTensor
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedGCNConv
from pyg_dist.errors import DataError, LayoutMismatchError, OptionError
from pyg_dist.grid.tile_tensor import TileTensor
from pyg_dist.pricing.machine import Machine


@on_ranks(4)
def test_attributes_and_plan() -> None:
    graph = random_graph(47, 310, seed=1)
    data = pyg_dist.DistributedData(graph, layout="grid", mesh={"x": 2, "z": 2})
    assert data.num_nodes == 47
    assert data.num_edges == 310
    assert data.edge_index.shape == (2, 310)
    assert sum(data.graph.group.gather_counts(data.edge_weight.to_local().numel())) == 310
    assert sum(data.graph.group.gather_counts(data.x.to_local().numel())) == 47 * 5, "x lies on one rank each"
    for name in ("x", "y", "train_mask", "edge_weight", "edge_attr"):
        assert torch.equal(data[name].full_tensor(), graph[name]), name
    assert isinstance(data.x, TileTensor)
    data.x = F.normalize(data.x)
    assert isinstance(data.x, TileTensor), "whole rows come back as tiles"
    torch.testing.assert_close(data.x.full_tensor(), F.normalize(graph.x))
    data.extra = graph.x[:, :2]
    assert not isinstance(data.extra, TileTensor)
    assert data.has_self_loops() == graph.has_self_loops()
    assert torch.equal(data.edge_index.full_tensor(), graph.edge_index)
    assert (data.is_undirected(), data.is_coalesced()) == (graph.is_undirected(), graph.is_coalesced())
    assert data.has_isolated_nodes() == graph.has_isolated_nodes()
    assert "310 edges" not in repr(data.edge_index)
    plan = data.plan.to_dict()
    assert plan["mesh"] == {"data": 1, "x": 2, "y": 1, "z": 2}
    assert sum(plan["nodes"]) == 47
    assert sum(plan["edges"]) == 310
    assert plan["layout"] == "grid"
    assert set(plan) >= {"ranks", "hash", "imbalance", "rows", "messages", "bytes", "memory_bytes", "predicted_seconds"}
    assert data.plan.describe().startswith("grid layout, mesh x=2 x y=1 x z=2")
    assert data.to("cpu") is data


@on_ranks(2)
def test_refusals() -> None:
    graph = random_graph(47, 310, seed=1)
    with pytest.raises(OptionError, match=r"Expected a mesh of 2 ranks \(got x=2 x y=1 x z=2, which makes 4\)"):
        pyg_dist.DistributedData(graph, layout="grid", mesh={"x": 2, "z": 2})
    with pytest.raises(OptionError, match="Expected mesh to be a dict"):
        pyg_dist.DistributedData(graph, layout="grid", mesh=(2, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="comm_dtype"):
        pyg_dist.DistributedData(graph, layout="grid", comm_dtype=torch.int8)
    for name, value in (("PYG_DIST_GRID_SUMS", "ring"), ("PYG_DIST_GRID_BLOCKS", "0")):
        os.environ[name] = value
        with pytest.raises(OptionError, match=name):
            pyg_dist.DistributedData(graph, layout="grid")
        del os.environ[name]
    data = pyg_dist.DistributedData(graph, layout="grid")
    other = pyg_dist.DistributedData(graph, layout="grid")
    with pytest.raises(LayoutMismatchError):
        DistributedGCNConv(5, 3).double()(other.x, data.edge_index)
    with pytest.raises(LayoutMismatchError):
        data.x.requires_grad_().grad = other.x
    with pytest.raises(DataError):
        data.x = graph.x[:3]


@on_ranks(4)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mesh", [{"data": 2, "x": 2}, {"data": 4}, {"data": 2, "y": 2}, {"x": 2, "z": 2}])
def test_data_groups_count_once(mesh: dict[str, int], sparse: bool) -> None:
    graph = random_graph(47, 310, seed=1)
    if sparse:
        del graph.edge_attr
        graph = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(graph.coalesce())
    data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
    results: list[Any] = []
    for conv_class, d in ((GCNConv, graph), (DistributedGCNConv, data)):
        # Ranks of ours start with other values; the first call gives all of them, in all groups, those of rank 0.
        torch.manual_seed(0 if conv_class is GCNConv else pyg_dist.rank())
        conv = conv_class(5, 4).double()
        x = d.x.detach().requires_grad_()
        out = conv(x, d.adj_t if sparse else d.edge_index)
        F.cross_entropy(out[d.train_mask], d.y[d.train_mask]).backward()
        results.append((out, x.grad, conv.lin.weight.grad, conv.bias.grad))
    for want, got in zip(*results, strict=True):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


class Gated(MessagePassing):
    """A layer that takes and gives a graph, with other values of its edges, as GraphGym's layers do."""

    def __init__(self) -> None:
        super().__init__("mean")
        self.edge_lin = nn.Linear(9, 3)

    def forward(self, batch: Any) -> Any:
        edge_attr = self.edge_updater(batch.edge_index, x=batch.x[:, :3], edge_attr=batch.edge_attr)
        batch.x = batch.x + self.propagate(batch.edge_index, edge_attr=edge_attr, size=(len(batch.x), len(batch.x)))
        batch.edge_attr = batch.edge_attr + edge_attr
        return batch

    def edge_update(self, x_i: torch.Tensor, x_j: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        return self.edge_lin(torch.cat([x_i, x_j, edge_attr], 1)).tanh()  # type: ignore[no-any-return]

    def message(self, edge_attr: torch.Tensor) -> torch.Tensor:
        return edge_attr[:, :1]


def edges_updated(batch: Any, is_ours: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    layers, first = nn.ModuleList([Gated(), Gated()]).double(), batch.edge_attr
    if is_ours:
        pyg_dist.distribute(layers)
    for layer in layers:
        given = batch.edge_attr
        batch = layer(batch)
        batch.edge_attr = batch.edge_attr * given + first.detach()
    (batch.x.square().sum() + batch.edge_attr.square().sum()).backward()
    return {"x": batch.x.detach(), "edge_attr": batch.edge_attr.detach(), **gradients(layers)}


@on_ranks(2)
@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_layers_store_the_edges_that_they_update(layout: str) -> None:
    graph = random_graph(23, 60, dtype=torch.float64)
    data = pyg_dist.DistributedData(graph, layout=layout)
    assert_same(edges_updated(data, True), edges_updated(graph, False))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    data.edge_attr, graph.edge_attr = data.edge_attr[order], graph.edge_attr[order]
    assert_same({"by list": data.edge_attr}, {"by list": graph.edge_attr})


def chosen(machine: dict[str, float], options: dict[str, Any]) -> tuple[str, str, list[float]]:
    import contextlib
    import io
    import json
    import tempfile
    from dataclasses import replace

    graph = random_graph(47, 310, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        # Ranks other than the first have other constants: the first one's hold.
        constants = replace(Machine(), **(machine if pyg_dist.rank() == 0 else {"gemm_rate": 1.0}))  # type: ignore[arg-type]
        os.environ["PYG_DIST_MACHINE"] = str(constants.save(Path(folder) / "machine.json"))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            data = pyg_dist.DistributedData(graph, layout="auto", **options)
        del os.environ["PYG_DIST_MACHINE"]
    torch.manual_seed(0)
    out = DistributedGCNConv(5, 4).double()(data.x, data.edge_index).full_tensor()
    torch.manual_seed(0)
    torch.testing.assert_close(out, GCNConv(5, 4).double()(graph.x, graph.edge_index), rtol=1e-10, atol=1e-10)
    assert json.loads(json.dumps(data.plan.to_dict()))["layout"] == data.plan.layout
    return data.plan.layout, said.getvalue(), data.plan.hash


SLOW_MESSAGES = {"intra_latency": 1.0, "call_seconds": 0.0, "cores": 4}
SLOW_BYTES = {"intra_latency": 0.0, "call_seconds": 0.0, "intra_bandwidth": 1.0, "cores": 4}


@pytest.mark.parametrize("machine", [SLOW_MESSAGES, SLOW_BYTES])
def test_auto_takes_the_cheaper_layout_and_says_so_once(workers: Pools, machine: dict[str, float]) -> None:
    found = workers(4).run(chosen, machine, {"partition": "random", "model": (2, 16), "seed": 3})
    layouts, lines, hashes = zip(*found, strict=True)
    assert len(set(layouts)) == len(set(hashes)) == 1
    assert lines[1:] == ("", "", "")
    assert lines[0].count("\n") == 1
    other = "halo" if layouts[0] == "grid" else "grid"
    assert lines[0].startswith(f"pyg_dist: layout='auto': {layouts[0]}")
    assert f"the other layout's best: {other}" in lines[0]
    assert "Priced for a 2-layer GCN, columns 5 16 4; constants: " in lines[0]


def test_auto_takes_either(workers: Pools) -> None:
    """Random parts have three partners, ranks on a 2 x 1 x 2 mesh one; but the rows that are needed are fewer bytes."""
    options = {"partition": "random", "model": (8, 16)}
    layouts = [workers(4).run(chosen, machine, options)[0][0] for machine in (SLOW_MESSAGES, SLOW_BYTES)]
    assert layouts == ["grid", "halo"]


def test_auto_keeps_to_a_given_mesh(workers: Pools) -> None:
    fast = {"intra_latency": 0.0, "call_seconds": 0.0}
    _, line, _ = workers(4).run(chosen, fast, {"mesh": {"x": 4}, "comm_dtype": None})[0]
    assert "grid x=4 x y=1 x z=1" in line


@on_ranks(1)
def test_models_that_are_none() -> None:
    for model in ((0, 3), (3,), "large", (2, 1.5), (True, 4)):
        with pytest.raises(OptionError, match="Expected model to be"):
            pyg_dist.DistributedData(random_graph(47, 310, seed=1), layout="grid", model=model)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_graph_without_nodes() -> None:
    nothing = Data(x=torch.zeros(0, 5), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    for layout in ("grid", "auto"):
        data = pyg_dist.DistributedData(nothing, layout=layout)
        assert pyg_dist.conv.DistributedGCNConv(5, 3)(data.x, data.edge_index).shape == (0, 3)
