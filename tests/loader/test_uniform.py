"""Batches of ``UniformVertexLoader``: drawn without a message, equal to PyG's subgraphs, unbiased, restartable."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from batch_cases import distribute, laid_out, quiet
from random_graphs import random_graph
from torch import nn
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.utils import subgraph
from wire import Wire
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.comm.checks.calls import Calls
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.loader.uniform import UniformSampling

WORLD_SIZES = [1, 3]
GRIDS = [(2, {"x": 2}), (2, {"y": 2}), (2, {"data": 2}), (2, {"data": 2, "part": 1}), (4, {"x": 2, "z": 2})]


# ---- Samples ---------------------------------------------------------------------------------------------------------


def samples(mesh: dict[str, int] | None) -> list[list[int]]:
    graph = random_graph(41, 150)
    loader = quiet(lambda: UniformVertexLoader(laid_out(graph, mesh), 9))
    return [batch.n_id.full_tensor().tolist() for _ in range(2) for batch in loader]


def test_samples_are_alike_on_all_ranks_world_sizes_and_layouts(workers: Pools) -> None:
    runs = [(1, None), (2, None), (3, None), (2, {"x": 2}), (2, {"y": 2}), (3, {"z": 3})]
    drawn = [s for size, mesh in runs for s in workers(size).run(samples, mesh)]
    assert all(s == drawn[0] for s in drawn)
    assert len(drawn[0]) == 10
    assert all(len(set(ids)) == 9 and ids == sorted(ids) for ids in drawn[0])
    assert len({tuple(ids) for ids in drawn[0]}) == 10


def test_seeds_share_no_sample() -> None:
    drawn = [{tuple(UniformSampling(1000, 10, 100, seed).node_id(t).tolist()) for t in range(1000)} for seed in (0, 1)]
    assert all(len(samples) == 1000 for samples in drawn)
    assert not drawn[0] & drawn[1]


@pytest.mark.parametrize(("num_nodes", "batch_size", "num_groups"), [(10, 3, 1), (101, 7, 2), (64, 64, 1)])
def test_cover(num_nodes: int, batch_size: int, num_groups: int) -> None:
    num_steps = -(-num_nodes // (batch_size * num_groups))
    groups = [
        UniformSampling(num_nodes, batch_size, num_steps, 0, group, num_groups, cover=True)
        for group in range(num_groups)
    ]
    epochs = [
        [sampling.node_id(epoch * num_steps + t) for t in range(num_steps) for sampling in groups] for epoch in range(2)
    ]
    for pieces in epochs:
        assert torch.equal(torch.cat(pieces).sort().values, torch.arange(num_nodes))
        assert max(p.numel() for p in pieces) - min(p.numel() for p in pieces) <= 1
        assert max(p.numel() for p in pieces) <= batch_size
    if num_steps > 1:
        assert not all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    smallest = min(range(num_steps * num_groups), key=lambda k: epochs[0][k].numel())
    step, group = divmod(smallest, num_groups)
    pairs = groups[group].sample(step).scale
    assert pairs is not None
    assert pairs.table[0, 0].item() == (epochs[0][smallest].numel() - 1) / (num_nodes - 1)


# ---- What batches promise -----------------------------------------------------------------------


def sent_while_sampling(prefetch: bool, mesh: dict[str, int] | None) -> tuple[int, int]:
    size = pyg_dist.world_size()
    data = laid_out(random_graph(50, 400), mesh)
    loader = quiet(lambda: UniformVertexLoader(data, 11, prefetch=prefetch))
    with Wire() as wire:
        batches = list(loader)
        if prefetch:
            loader._batches.close()  # waits for the next one
        sampled = wire.num_bytes, wire.num_others
        batches[0].n_id.full_tensor()
        assert size == 1 or wire.num_others > sampled[1], "the spy sees nothing"
    assert len(batches) == len(loader)
    return sampled


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(("world_size", "mesh"), [(1, None), (2, None), (3, None), *GRIDS])
def test_sampling_sends_nothing(world_size: int, mesh: dict[str, int] | None, prefetch: bool, workers: Pools) -> None:
    assert workers(world_size).run(sent_while_sampling, prefetch, mesh) == [(0, 0)] * world_size


def messages_of_a_step(mesh: dict[str, int] | None) -> list[Counter[str]]:
    """The calls of steps after the first one, by kind, over two layers."""
    data = laid_out(random_graph(60, 900), mesh)
    model = pyg_dist.distribute(nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 4)])).double()
    found = []
    for batch in UniformVertexLoader(data, 20, num_steps=3, input_nodes=data.train_mask):
        with mock.patch.object(Calls, "next", autospec=True, side_effect=Calls.next) as called:
            out = model[1](model[0](batch.x, batch.edge_index).relu(), batch.edge_index)
            F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]).backward()
        found.append(Counter(call.args[1] for call in called.call_args_list))
        assert len(out[batch.train_mask]) == int(batch.train_mask.sum())  # counted when asked for
    return found[1:]


@pytest.mark.parametrize(
    ("world_size", "mesh", "exchanges"),
    [  # of two layers forward and one backward
        (2, None, {"exchange": 3}),
        (2, {"data": 2, "part": 1}, {}),
        (4, {"data": 2, "part": 2}, {"exchange": 3}),
        (2, {"data": 2}, {}),
        # A sum and a root's way a layer, whole rows for the loss; and back, but for what the features need.
        (4, {"data": 2, "x": 2}, {"all-to-all": 5, "gather": 1, "scattered sum": 2}),
        (4, {"data": 2, "z": 2}, {"all-to-all": 5, "gather": 2, "scattered sum": 1}),
    ],
)
def test_a_step_sends_its_exchanges_one_loss_sum_and_one_bucket(
    world_size: int, mesh: dict[str, int] | None, exchanges: dict[str, int], workers: Pools
) -> None:
    for steps in workers(world_size).run(messages_of_a_step, mesh):
        assert steps
        for called in steps:
            assert called == {**exchanges, "sum": 2}


def restarted() -> bool:
    data = distribute(random_graph(30, 100), torch.arange(30) % 2)

    def make() -> Any:
        return quiet(lambda: UniformVertexLoader(data, 7, seed=5))

    loader, drawn, states = make(), [], []
    for _ in range(2):
        for batch in loader:
            drawn.append(batch.n_id.full_tensor().tolist())
            states.append(loader.state_dict())
    assert len(drawn) == 10
    for k in (0, 3, 4, 6):
        other = make()
        list(other)
        other.load_state_dict(states[k])
        rest = [b.n_id.full_tensor().tolist() for b in other]
        assert rest == drawn[k + 1 : 5 if k < 4 else 10]
    third = make()
    for _ in third:
        break
    assert next(iter(third)).n_id.full_tensor().tolist() == drawn[1]
    with pytest.raises(ValueError, match="batch_size"):
        quiet(lambda: UniformVertexLoader(data, 8, seed=5)).load_state_dict(states[0])
    return True


def test_restart(workers: Pools) -> None:
    assert all(workers(2).run(restarted))


@on_ranks(2)
def test_input_nodes() -> None:
    graph = random_graph(60, 200)
    data = distribute(graph, torch.arange(60) % 2)
    loader = UniformVertexLoader(data, 12, input_nodes=data.train_mask)
    number = int(graph.train_mask.sum())
    counts = {int(batch.train_mask.sum()) for batch in loader}
    assert counts == {max(1, round(12 * number / 60))}
    assert {batch.num_nodes for batch in loader} == {12}


def warned(batch_size: int, mask: list[int]) -> list[str]:
    graph = random_graph(60, 200)
    graph.train_mask = torch.zeros(60, dtype=torch.bool)
    graph.train_mask[mask] = True
    data = distribute(graph, torch.arange(60) % 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        UniformVertexLoader(data, batch_size)
    return [str(w.message) for w in caught]


def test_warning_of_batches_without_training_nodes(workers: Pools) -> None:
    first, second = workers(2).run(warned, 6, [3, 4])
    assert len(first) == 1
    assert "81% of the batches" in first[0]  # C(58, 6) / C(60, 6) = 0.808
    assert second == []
    assert workers(2).run(warned, 30, list(range(30)))[0] == []


def profiled() -> list[tuple[bool, bool]]:
    data, found = distribute(random_graph(60, 200), torch.arange(60) % 2), []
    for prefetch in (False, True):
        loader = quiet(partial(UniformVertexLoader, data, 12, prefetch=prefetch))
        with pyg_dist.profile() as profile:
            for batch in loader:
                batch.x.sum()
            next(iter(loader))
        assert ("batches made beside" in str(profile)) == prefetch
        found.append((profile.table(0)[0]["sampling"] > 0, profile.hidden_seconds[1] > 0))
        assert sum(sum(row.values()) for row in profile.table(0)) == pytest.approx(profile.seconds[0])
    return found


def test_profile_has_sampling_and_the_wait_for_it(workers: Pools) -> None:
    assert workers(2).run(profiled)[0] == [(True, False), (True, True)]


def refusals() -> list[str]:
    graph = random_graph(20, 60)
    data = distribute(graph, torch.arange(20) % 2)
    learning = copy.copy(graph)
    learning.edge_weight = graph.edge_weight.clone().requires_grad_()
    learned = distribute(learning, torch.arange(20) % 2)
    rank = pyg_dist.rank()

    def use(data: Any, conv: Any, weight: Callable[[Any], Any]) -> None:
        for batch in UniformVertexLoader(data, 8):
            conv(batch.x, batch.edge_index, weight(batch))

    gcn = pyg_dist.distribute(GCNConv(5, 3).double())
    cached = pyg_dist.distribute(GCNConv(5, 3, cached=True).double())
    calls = [
        lambda: UniformVertexLoader(graph, 4),
        lambda: UniformVertexLoader(data, 1),
        lambda: UniformVertexLoader(data, 21),
        lambda: UniformVertexLoader(data, 2.5),
        lambda: UniformVertexLoader(data, 4, num_steps=0),
        lambda: UniformVertexLoader(data, 4, seed=rank),
        lambda: UniformVertexLoader(data, 4 if rank else 2.0),
        lambda: UniformVertexLoader(data, 4, cover=True, input_nodes=data.train_mask),
        lambda: UniformVertexLoader(data, 2, num_steps=11, cover=True),
        lambda: UniformVertexLoader(data, 4, input_nodes=torch.zeros(20, dtype=torch.bool)),
        lambda: UniformVertexLoader(data, 4, input_nodes=torch.tensor([20])),
        lambda: UniformVertexLoader(data, 4, input_nodes=torch.tensor([rank])),
        lambda: next(iter(UniformVertexLoader(DistributedData(graph, layout="grid", mesh={"data": 2}), 4))).subgraph(
            [1]
        ),
        lambda: DistributedData(graph, mesh={"data": 2, "part": 2}),
        lambda: use(learned, gcn, lambda batch: batch.edge_weight),
        lambda: use(data, gcn, lambda batch: batch.edge_weight * 2),
        lambda: use(data, cached, lambda batch: None),
        lambda: data.subgraph(torch.tensor([rank])),
        lambda: next(iter(UniformVertexLoader(data, 4))).x[data.train_mask],
    ]
    messages = []
    for call in calls:
        try:
            quiet(call)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("no error")
    return messages


def test_refusals(workers: Pools) -> None:
    expected = [
        "DataError: Expected a DistributedData with one type of nodes (got Data)",
        "OptionError: Expected batch_size between 2 and the 20 nodes (got 1)",
        "OptionError: Expected batch_size between 2 and the 20 nodes (got 21)",
        "OptionError: Expected batch_size between 2 and the 20 nodes (got 2.5)",
        "OptionError: Expected num_steps to be a positive integer",
        "AgreementError: Expected the same on every rank: option seed",
        "Error:",
        "OptionError: Expected cover or input_nodes (got both)",
        "OptionError: Expected two nodes at least in each of 11 batches",
        "DataError: Expected input_nodes to be at least one node",
        "DataError: Expected ids in 'input_nodes' between 0 and 19",
        "AgreementError: Expected the same input_nodes on every rank",
        "UnsupportedError: Expected a graph, or a batch of one data group (got a batch of several)",
        "OptionError: Expected a mesh of 2 ranks (got data=2 x part=2, which makes 4)",
        "UnsupportedError: Expected constant edge weights in GCN's norm",
        "UnsupportedError: Expected edge weights of a batch to be an attribute",
        "DataError: A DistributedGCNConv with cached=True",
        "AgreementError: Expected the same subset on every rank",
        "LayoutMismatchError:",
    ]
    for messages in workers(2).run(refusals):
        assert len(messages) == len(expected)
        for message, start in zip(messages, expected, strict=True):
            assert start in message, (message, start)
            assert "\n" not in message


def kept_alive(mesh: dict[str, int] | None) -> tuple[int, int]:
    """Batches alive after their last reference, and threads left."""
    data = laid_out(random_graph(50, 400), mesh)
    loader = quiet(lambda: UniformVertexLoader(data, 11))
    model = pyg_dist.distribute(nn.ModuleList([SAGEConv(5, 5), GCNConv(5, 4)])).double()
    graphs: list[Any] = []
    num_threads = torch.get_num_threads()
    gc.collect()
    gc.disable()
    try:
        for batch in loader:
            out = model[1](model[0](batch.x, batch.edge_index), batch.edge_index)
            loss = out[batch.train_mask].square().sum()
            loss.backward()
            graphs.append(weakref.ref(batch.graph))
            del loss, out
        del batch
        alive = sum(ref() is not None for ref in graphs)
        sampling = [thread for thread in threading.enumerate() if thread.name.startswith("pyg_dist sampling")]
        del loader
        for thread in sampling:
            thread.join(30)
    finally:
        gc.enable()
    assert torch.get_num_threads() == num_threads
    assert len(sampling) == 1
    return alive, sum(thread.is_alive() for thread in sampling)


@pytest.mark.parametrize(("world_size", "mesh"), [(1, None), (2, None), *GRIDS])
def test_a_batch_goes_with_its_last_reference(world_size: int, mesh: dict[str, int] | None, workers: Pools) -> None:
    assert workers(world_size).run(kept_alive, mesh) == [(0, 0)] * world_size


def random_node_loader() -> bool:
    """PyG's own loader, and subgraphs of subgraphs."""
    graph = random_graph(40, 300)
    data = distribute(graph, torch.arange(40) % pyg_dist.world_size())
    conv = GATConv(5, 3).double()
    torch.manual_seed(1)
    conv.reset_parameters()
    twin = copy.deepcopy(conv)
    conv = pyg_dist.distribute(conv)
    torch.manual_seed(3)
    for batch in RandomNodeLoader(data, 4, shuffle=True):
        ids = batch.n_id.full_tensor()
        edges, _ = subgraph(ids, graph.edge_index, relabel_nodes=True, num_nodes=40)
        torch.testing.assert_close(
            conv(batch.x, batch.edge_index).full_tensor(), twin(graph.x[ids], edges), rtol=0, atol=1e-10
        )
        half = batch.subgraph(torch.arange(0, 10, 2))
        edges, _ = subgraph(ids[::2], graph.edge_index, relabel_nodes=True, num_nodes=40)
        torch.testing.assert_close(
            conv(half.x, half.edge_index).full_tensor(), twin(graph.x[ids[::2]], edges), rtol=0, atol=1e-10
        )
    return True


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_node_loader(world_size: int, workers: Pools) -> None:
    assert all(workers(world_size).run(random_node_loader))
