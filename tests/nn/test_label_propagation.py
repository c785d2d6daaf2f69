"""Masked label propagation: no leak, one draw for every world size, all labels in evaluation."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, gradients, meshes
from random_graphs import random_graph
from torch import nn
from torch_geometric.nn import SAGEConv
from workers import Pools

from pyg_dist import DistributedData, world_size
from pyg_dist.backend.comm.checks.calls import Calls
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.errors import DataError, LayoutMismatchError, OptionError
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.nn import MaskedLabelPropagation

CLASSES = 4


def graph_with_masks() -> Any:
    graph = random_graph(90, 600, num_features=6, seed=5)
    generator = torch.Generator().manual_seed(0)
    graph.y = torch.randint(0, CLASSES, (90,), generator=generator)
    graph.train_mask = torch.rand(90, generator=generator) < 0.7
    graph.y[~graph.train_mask] = -1  # unlabelled: never looked up
    return graph


def step(graph: Any, conv: nn.Module, propagation: MaskedLabelPropagation) -> Results:
    """The loss mask, the loss and all gradients."""
    torch.manual_seed(7)
    features, model = graph.x.detach().clone().requires_grad_(), nn.ModuleList([propagation, conv])
    model.zero_grad()
    x, mask = propagation(features, graph.y, graph.train_mask)
    loss = F.cross_entropy(conv(x, graph.edge_index)[mask], graph.y[mask])
    loss.backward()
    return {"mask": mask, "loss": loss, **gradients(model, x=features)}


def compared(layouts: list[dict[str, Any]]) -> None:
    """The draw, the loss and its gradients are those of a plain ``Data`` in one process."""
    graph = graph_with_masks()
    torch.manual_seed(0)
    stock, ours = SAGEConv(6, CLASSES).double(), DistributedSAGEConv(6, CLASSES).double()
    ours.load_state_dict(stock.state_dict())
    propagation = MaskedLabelPropagation(CLASSES, 6, 0.4).double()
    for layout in layouts:
        found = step(DistributedData(graph, **layout), ours, propagation)
        assert_same(found, step(graph, stock, propagation), str(layout))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_is_that_of_one_process(workers: Pools, world_size: int) -> None:
    layouts = [{"partition": "random"}, *({"layout": "grid", "mesh": mesh} for mesh in meshes(world_size))]
    workers(world_size).run(compared, layouts)


def test_a_label_never_reaches_its_own_loss() -> None:
    """Whatever the labels of the loss's nodes are, the model sees the same features; those of others do change them."""
    graph = graph_with_masks()
    propagation = MaskedLabelPropagation(CLASSES, 6, 0.5).double()
    for seed in range(20):
        torch.manual_seed(seed)
        x, mask = propagation(graph.x, graph.y, graph.train_mask)
        embedded = graph.train_mask & ~mask
        assert not (mask & ~graph.train_mask).any()
        assert (x != graph.x).any(1).equal(embedded)  # every training node serves once
        other = torch.where(mask, (graph.y + 1) % CLASSES, graph.y)
        torch.manual_seed(seed)
        assert torch.equal(propagation(graph.x, other, graph.train_mask)[0], x)
        other = torch.where(embedded, (graph.y + 1) % CLASSES, graph.y)
        torch.manual_seed(seed)
        assert not torch.equal(propagation(graph.x, other, graph.train_mask)[0], x)


def test_evaluation_embeds_all_training_labels() -> None:
    graph = graph_with_masks()
    propagation = MaskedLabelPropagation(CLASSES, 6, 0.5).double().eval()
    state = torch.get_rng_state()
    x, mask = propagation(graph.x, graph.y, graph.train_mask)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(mask, graph.train_mask)
    added = F.embedding(graph.y.clamp(min=0), propagation.weight) * graph.train_mask[:, None]
    assert torch.equal(x, graph.x + added)


def test_rate() -> None:
    num_nodes = 20_000
    x, y = torch.zeros(num_nodes, 3), torch.zeros(num_nodes, dtype=torch.int64)
    every = torch.ones(num_nodes, dtype=torch.bool)
    for rate in (0.0, 0.3, 0.9):
        _, mask = MaskedLabelPropagation(1, 3, rate)(x, y, every)
        assert float((~mask).float().mean()) == pytest.approx(rate, abs=0.02)
    propagation = MaskedLabelPropagation(1, 3, 0.5)
    assert not torch.equal(propagation(x, y, every)[1], propagation(x, y, every)[1])


def masks_of_few(rate: float) -> list[list[int]]:
    """The nodes of the loss in 40 steps with three training nodes, all on one rank where there are three."""
    graph = graph_with_masks()
    graph.train_mask = torch.zeros(90, dtype=torch.bool)
    graph.train_mask[[5, 17, 33]] = True
    graph.y[[5, 17, 33]] = torch.tensor([1, 2, 3])
    data = DistributedData(graph, partition=torch.arange(90).add(1).mul(world_size()).div(91, rounding_mode="floor"))
    propagation = MaskedLabelPropagation(CLASSES, 6, rate).double()
    torch.manual_seed(0)
    steps = (propagation(data.x, data.y, data.train_mask) for _ in range(40))
    return [mask.full_tensor().nonzero().view(-1).tolist() for _, mask in steps]


def test_a_node_for_the_loss_is_left(workers: Pools) -> None:
    """Of three nodes at a rate of 0.9 none would be left in 29 of 40 steps; every node has its turn."""
    (alone,) = workers(1).run(masks_of_few, 0.9)
    assert all(alone)
    assert sum(len(left) == 1 for left in alone) > 25
    assert {node for left in alone for node in left} == {5, 17, 33}
    assert workers(3).run(masks_of_few, 0.9) == [alone] * 3
    x, mask = torch.zeros(2000, 3), torch.ones(2000, dtype=torch.bool)
    _, left = MaskedLabelPropagation(1, 3, 1 - 1e-9)(x, torch.zeros(2000).long(), mask)
    assert int(left.sum()) == 1  # one of the first
    assert int(left.nonzero()) < 256


def on_batches(mesh: dict[str, int] | None) -> tuple[set[int], int]:
    """Nodes for the loss of each data group in every batch, with few training nodes; calls after the first batch."""
    graph = graph_with_masks()
    options: dict[str, Any] = {"layout": "grid", "mesh": mesh} if mesh and "part" not in mesh else {"mesh": mesh}
    if "layout" not in options:
        options["partition"] = torch.arange(90) % (world_size() if mesh is None else mesh["part"])
    data = DistributedData(graph, **options)
    propagation = MaskedLabelPropagation(CLASSES, 6, 0.95).double()
    left, masks = set(), []
    loader = UniformVertexLoader(data, 9, num_steps=30, input_nodes=data.train_mask)
    for number, batch in enumerate(loader):
        with mock.patch.object(Calls, "next", autospec=True, side_effect=Calls.next) as called:
            propagation.train()
            with torch.no_grad():
                _, mask = propagation(batch.x, batch.y, batch.train_mask)
                propagation.eval()
                embedded = propagation(batch.x, batch.y, batch.train_mask)[0]
        kinds = {call.args[1] for call in called.call_args_list}
        assert number == 0 or kinds <= ({"all-to-all"} if "layout" in options else set())  # tiles of x become rows
        masks.append((mask.full_tensor(), batch.train_mask.full_tensor()))
        added = F.embedding(batch.y.full_tensor().clamp(min=0), propagation.weight) * masks[-1][1][:, None]
        torch.testing.assert_close(embedded.full_tensor(), batch.x.full_tensor() + added.detach())
    num_groups = 1 if mesh is None else mesh.get("data", 1)
    for mask, trains in masks:
        assert not (mask & ~trains).any()
        left |= {int(m.sum()) for m in mask.chunk(num_groups)}
    return left, len(masks)


@pytest.mark.parametrize(
    ("size", "mesh"), [(1, None), (2, None), (2, {"data": 2, "part": 1}), (2, {"x": 2}), (4, {"data": 2, "x": 2})]
)
def test_batches_ask_nobody(workers: Pools, size: int, mesh: dict[str, int] | None) -> None:
    """Masks of batches are new ones in every step, and known by the graph's; a node for the loss is left in each."""
    results = workers(size).run(on_batches, mesh)
    assert all(result == results[0] for result in results)
    left, num_batches = results[0]
    assert num_batches == 30
    assert min(left) == 1


def mismatches() -> list[str]:
    """Every rank gets the same line for a label that one rank has; nothing hangs."""
    graph, lines = graph_with_masks(), []
    data, other = (
        DistributedData(graph.clone(), partition=parts)
        for parts in (torch.arange(90) % world_size(), torch.arange(90) // 30 % world_size())
    )
    propagation = MaskedLabelPropagation(CLASSES, 6).double()
    for x, y, mask, words in (
        (data.x, graph.y, data.train_mask, "NodeTensor x and Tensor y"),
        (graph.x, graph.y, data.train_mask, "Tensor x and NodeTensor train_mask"),
        *([(data.x, other.y, data.train_mask, "NodeTensor y, spread otherwise")] if world_size() > 1 else []),
    ):
        with pytest.raises(LayoutMismatchError, match=words):
            propagation(x, y, mask)
    propagation(data.x, data.y, data.train_mask)
    node = int(graph.train_mask.nonzero()[1])
    for k, label in enumerate((7, -3)):
        data.y[torch.tensor([node])] = label  # the same object, changed
        with pytest.raises(DataError) as caught:
            propagation(data.x, data.y, data.train_mask)
        lines.append(caught.value.message)
        assert f"labels 0 ... 3 (got {label} at node {node} of rank {node % world_size()})" in lines[k]
    return lines


@pytest.mark.parametrize("world_size", [1, 3])
def test_mismatches_and_labels_out_of_range(workers: Pools, world_size: int) -> None:
    lines = workers(world_size).run(mismatches)
    assert lines == lines[:1] * world_size


def test_errors() -> None:
    for rate in (-0.1, 1.0, float("nan"), "0.5", True):
        with pytest.raises(OptionError, match="0 <= rate < 1"):
            MaskedLabelPropagation(2, 3, rate)  # type: ignore[arg-type]
    propagation, x, y, mask = MaskedLabelPropagation(2, 3), torch.ones(4, 3), torch.zeros(4).long(), torch.ones(4) > 0
    for given, words in (
        ((x, y, mask.float()), "integer labels and a bool mask .*torch.float32"),
        ((x, y + 0.5, mask), "integer labels and a bool mask .*torch.float32"),
        ((x[:, :2], y, mask), r"x \[N, 3\], .*got \[4, 2\]"),
        ((x, y[:, None], mask), r"y \[N\] .*\[4, 1\]"),
        ((x, y + 2, mask), r"labels 0 ... 1 \(got 2 at node 0\)"),
    ):
        with pytest.raises(DataError, match=words):
            propagation(*given)
