"""``NeighborLoader`` and ``LinkNeighborLoader``: batches and steps are those of one process and stock PyG."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batch_cases import laid_out
from neighbor_cases import OPTIONS, N, graph_of, loader_of, trained, whole_of
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NegativeSampling
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.loader import LinkNeighborLoader, NeighborLoader

LAYOUTS = [(1, None), (2, {"x": 2}), (3, {"y": 3})]  # in turn, beside three ranks in the halo layout


SLOW = ("induced", "disjoint", "replace")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPTIONS])
def test_training_is_that_of_one_process(name: str, workers: Pools) -> None:
    (stock,) = workers(1).run(trained, name, "stock")
    graph = graph_of(name)
    for n_id, e_id, edge_index, input_id, facts, trees, _ in stock:
        nodes, edges = torch.tensor(n_id), torch.tensor(edge_index, dtype=torch.int64).view(2, -1)
        assert facts[0] == len(input_id)
        assert n_id[: facts[0]] == input_id  # of a mask
        assert torch.equal(nodes[edges], graph.edge_index[:, e_id])
        assert sum(facts[1]) == len(n_id)
        assert facts[2] is None or sum(facts[2]) == len(e_id)
        if trees is not None:
            assert trees[: facts[0]] == list(range(facts[0]))
            assert torch.equal(torch.tensor(trees)[edges[0]], torch.tensor(trees)[edges[1]])
    layouts = [(3, None), LAYOUTS[list(OPTIONS).index(name) % 3], *[(4, {"x": 2, "y": 2})] * (name == "directional")]
    for size, mesh in layouts:
        for found in workers(size).run(trained, name, mesh):
            assert [batch[:-1] for batch in found] == [batch[:-1] for batch in stock]
            torch.testing.assert_close([b[-1] for b in found], [b[-1] for b in stock], rtol=0, atol=1e-10)


def test_counts_of_edges() -> None:
    """Of each node min(fan-out, degree) in-edges; each once without replacement; those of isolated seeds are none."""
    graph = random_graph(N, 150)
    degree = torch.bincount(graph.edge_index[1], minlength=N)
    isolated = (degree == 0).nonzero().view(-1)
    assert isolated.numel()
    seen: set[tuple[int, ...]] = set()
    loader = NeighborLoader(graph, [2], batch_size=7)
    for _ in range(20):
        for batch in loader:
            counts = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
            assert torch.equal(counts[: batch.batch_size], degree[batch.n_id[: batch.batch_size]].clamp(max=2))
            assert batch.e_id.unique().numel() == batch.e_id.numel()
            seen.add(tuple(batch.e_id.tolist()))
    assert len(seen) > 100  # epochs draw anew
    (batch,) = NeighborLoader(graph, [2, 2], input_nodes=isolated, batch_size=N)
    assert torch.equal(batch.n_id, isolated)
    assert batch.num_edges == 0
    assert batch.num_sampled_nodes == [isolated.numel(), 0, 0]


def test_steps() -> None:
    graph, nodes = random_graph(N, 150), torch.tensor([7, 3, 30, 1, 9])
    given = [b.n_id[: b.batch_size].tolist() for b in NeighborLoader(graph, [1], input_nodes=nodes, batch_size=2)]
    assert given == [[7, 3], [30, 1], [9]]
    loader = NeighborLoader(graph, [1], input_nodes=nodes, batch_size=2, drop_last=True, shuffle=True)
    assert len(loader) == 2
    epochs = [[b.input_id.tolist() for b in loader] for _ in range(6)]
    assert len({str(epoch) for epoch in epochs}) > 1
    assert all(len({k for ids in epoch for k in ids}) == 4 for epoch in epochs)
    assert next(iter(NeighborLoader(Data(num_nodes=9), [2], batch_size=4))).n_id.tolist() == [0, 1, 2, 3]
    transformed = NeighborLoader(graph, [1], batch_size=2, transform=lambda batch: batch.num_nodes)
    assert all(isinstance(count, int) for count in transformed)


def of_some_inputs(mesh: dict[str, int] | str | None) -> list[Any]:
    """Between two batches of an epoch, which stay the same."""
    graph = graph_of("directional")
    loader = loader_of(graph if isinstance(mesh, str) else laid_out(graph, mesh), "directional")
    found = []
    for batch in (next(iter(loader)), loader([3, 0, 5]), next(iter(loader))):
        found.append([whole_of(batch[key]).tolist() for key in ("n_id", "e_id", "edge_index", "input_id")])
    seeds = graph.train_mask.nonzero().view(-1)[[3, 0, 5]]
    assert found[1][0][:3] == seeds.tolist()
    assert found[1][3] == seeds.tolist()
    assert torch.equal(torch.tensor(found[1][0])[torch.tensor(found[1][2])], graph.edge_index[:, found[1][1]])
    for wrong in ([], [0, 0], [-1], [999], 3):
        with pytest.raises(ValueError, match=r"Expected .*numbers of inputs"):
            loader(wrong)
    return found


def test_a_batch_of_some_inputs(workers: Pools) -> None:
    (stock,) = workers(1).run(of_some_inputs, "stock")
    assert [found[0] for found in (stock[0], stock[2])] == [
        batch[0] for batch in workers(1).run(trained, "directional", "stock")[0][:2]
    ]
    for size, mesh in ((1, None), (2, None), (2, {"x": 2})):
        assert all(found == stock for found in workers(size).run(of_some_inputs, mesh))


def disjoint_links(mesh: dict[str, int] | str | None, negatives: str) -> list[Any]:
    """As PyG's: each end has a tree, and a tree's number is that of its edge."""
    graph = random_graph(N, 150)
    data: Any = graph if isinstance(mesh, str) else laid_out(graph, mesh)
    found = []
    for batch in LinkNeighborLoader(data, [3, 2], batch_size=50, disjoint=True, neg_sampling=negatives):
        n_id, tree, edge_index = (whole_of(batch[key]) for key in ("n_id", "batch", "edge_index"))
        assert torch.equal(tree[edge_index[0]], tree[edge_index[1]])
        n = len(batch.input_id)
        if negatives == "binary":
            assert torch.equal(batch.edge_label_index, torch.arange(4 * n).view(2, 2, n).transpose(0, 1).reshape(2, -1))
            assert torch.equal(tree[batch.edge_label_index], torch.stack([torch.arange(2 * n)] * 2))
            assert torch.equal(n_id[batch.edge_label_index[:, :n]], graph.edge_index[:, batch.input_id])
        else:
            ends = [batch.src_index, batch.dst_pos_index, batch.dst_neg_index]
            assert torch.equal(torch.cat(ends), torch.arange(3 * n))
            assert all(torch.equal(tree[end], torch.arange(n)) for end in ends)
        found.append((n_id.tolist(), tree.tolist(), edge_index.tolist(), whole_of(batch.e_id).tolist()))
    return found


@pytest.mark.parametrize("negatives", ["binary", "triplet"])
def test_disjoint_links(negatives: str, workers: Pools) -> None:
    (stock,) = workers(1).run(disjoint_links, "stock", negatives)
    for size, mesh in ((3, None), (2, {"x": 2})):
        assert all(found == stock for found in workers(size).run(disjoint_links, mesh, negatives))


def link_losses(mesh: dict[str, int] | str | None, negatives: str) -> list[tuple[Any, ...]]:
    graph = random_graph(N, 150)
    data: Any = graph if isinstance(mesh, str) else laid_out(graph, mesh)
    torch.manual_seed(0)
    conv = SAGEConv(5, 4).double()
    convs = conv if isinstance(mesh, str) else pyg_dist.distribute(conv)
    sampling = {"none": None, "two": NegativeSampling("triplet", 2), "weighted labels": "binary"}.get(
        negatives, negatives
    )
    label = torch.arange(150) % 3 if negatives == "weighted labels" else None
    found = []
    for batch in LinkNeighborLoader(data, [3, 2], edge_label=label, batch_size=50, shuffle=True, neg_sampling=sampling):
        z = convs(batch.x, batch.edge_index)
        if sampling is not None and negatives not in ("binary", "weighted labels"):
            source, target, negative = batch.src_index, batch.dst_pos_index, batch.dst_neg_index
            pairs = [(source, target), (source, negative.reshape(len(source), -1)[:, 0])]
            ends = [source, target, negative]
        else:
            pairs, ends = [tuple(batch.edge_label_index)], [batch.edge_label_index]
        loss = sum((z[a] * z[b]).sum(-1).sigmoid().mean() for a, b in pairs)
        loss.backward()
        n_id = whole_of(batch.n_id)
        labels = batch.edge_label.tolist() if "edge_label" in batch else None
        found.append((batch.input_id.tolist(), [n_id[end].tolist() for end in ends], labels, loss.item()))
    return found


@pytest.mark.parametrize(
    ("negatives", "other"),
    [
        *[("none", (1, None)), ("binary", (2, {"x": 2})), ("triplet", (3, {"y": 3}))],
        *[("two", (2, {"x": 2})), ("weighted labels", (2, None))],
    ],
)
def test_links(negatives: str, other: tuple[int, Any], workers: Pools) -> None:
    (stock,) = workers(1).run(link_losses, "stock", negatives)
    graph = random_graph(N, 150)
    assert sorted(k for batch in stock for k in batch[0]) == list(range(150))
    for input_id, ends, labels, _ in stock:
        edges = graph.edge_index[:, input_id].tolist()
        if negatives in ("triplet", "two"):
            assert ends[:2] == edges
            assert torch.tensor(ends[2]).shape == ((50,) if negatives == "triplet" else (50, 2))
        else:
            assert [side[:50] for side in ends[0]] == edges
            expected = {"none": None, "binary": [1.0] * 50 + [0.0] * 50}.get(
                negatives, [k % 3 + 1 for k in input_id] + [0] * 50
            )
            assert labels == expected
    for size, mesh in ((3, None), other):
        for found in workers(size).run(link_losses, mesh, negatives):
            assert [batch[:-1] for batch in found] == [batch[:-1] for batch in stock]
            torch.testing.assert_close([b[-1] for b in found], [b[-1] for b in stock], rtol=0, atol=1e-10)


def refusals() -> list[str]:
    graph, rank = random_graph(20, 60), pyg_dist.rank()
    graph.signed = graph.edge_weight - 0.5
    data = laid_out(graph, None)
    grouped = DistributedData(graph, layout="grid", mesh={"data": 2})
    edges = graph.edge_index

    def first(loader: Any) -> None:
        next(iter(loader))

    calls: list[Callable[[], Any]] = [
        lambda: NeighborLoader(graph, [2]),
        lambda: NeighborLoader([graph], [2]),
        lambda: NeighborLoader(data, [1.5]),
        lambda: NeighborLoader(data, [2, -2]),
        lambda: NeighborLoader(data, [1.5]),
        lambda: NeighborLoader(data, {("v", "e", "v"): [2]}),
        lambda: NeighborLoader(data, [2], batch_size=0),
        lambda: NeighborLoader(data, [2], batch_size=21, drop_last=True),
        lambda: NeighborLoader(data, [2], subgraph_type="undirected"),
        lambda: NeighborLoader(data, [2], input_nodes=torch.tensor([1, 1])),
        lambda: NeighborLoader(data, [2], input_nodes=torch.tensor([20])),
        lambda: NeighborLoader(data, [2], input_nodes=torch.tensor([rank])),
        lambda: NeighborLoader(data, [2], input_nodes=("v", torch.tensor([1]))),
        lambda: NeighborLoader(data, [2], seed=rank),
        lambda: NeighborLoader(data, [2], time_attr="time"),
        lambda: NeighborLoader(data, [2], weight_attr="x"),
        lambda: NeighborLoader(data, [2], weight_attr="signed"),
        lambda: NeighborLoader(data, [2], num_neighbours=2),
        lambda: first(NeighborLoader(data, [2], batch_size=20, subgraph_type="bidirectional")),
        lambda: NeighborLoader(grouped, [2], batch_size=11, drop_last=True),
        lambda: LinkNeighborLoader(data, [2], edges[:1]),
        lambda: LinkNeighborLoader(data, [2], edges, torch.ones(7)),
        lambda: LinkNeighborLoader(data, [2], edges, torch.ones(60), neg_sampling="triplet"),
        lambda: LinkNeighborLoader(data, [2], edges, neg_sampling="some"),
        lambda: LinkNeighborLoader(data, [2], edges, neg_sampling_ratio=-1.0),
        lambda: LinkNeighborLoader(data, [2], edges, edge_label_time=edges[0]),
        lambda: LinkNeighborLoader(
            data, [2], edges, neg_sampling=NegativeSampling("binary", 1, src_weight=torch.ones(19))
        ),
        lambda: LinkNeighborLoader(data, [2], edges.double()),
        lambda: LinkNeighborLoader(data, [2], edges[:, :2], ["a", "b"]),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("no error")
    return messages


def test_refusals(workers: Pools) -> None:
    expected = [
        "DataError: Expected a DistributedData on several ranks (got Data)",
        "DataError: Expected a Data or DistributedData (got list)",
        "OptionError: Expected num_neighbors to be a list of counts of each hop, -1 for all (got [1.5])",
        "OptionError: Expected num_neighbors to be a list of counts of each hop",
        "OptionError: Expected num_neighbors to be a list of counts of each hop, -1 for all (got [1.5])",
        "OptionError: Expected num_neighbors to be a list of counts of each hop",
        "OptionError: Expected batch_size to be an integer from 1 to 9223372036854775807 (got 0)",
        "OptionError: Expected at least one batch of 21 inputs (got 20 inputs and drop_last=True)",
        "OptionError: Expected subgraph_type to be one of directional, induced, bidirectional (got 'undirected')",
        "DataError: Expected distinct 'input_nodes'",
        "DataError: Expected ids in 'input_nodes' between 0 and 19 (got 20 to 20)",
        "AgreementError: Expected the same on every rank: option input_nodes",
        "DataError: Expected 'input_nodes' without a node type",
        "AgreementError: Expected the same on every rank: option seed",
        "UnsupportedError: Expected NeighborLoader without time_attr (got 'time')",
        "DataError: Expected weight_attr to be the name of a one-dimensional edge attribute (got 'x')",
        "DataError: Expected finite weights of at least 0 in 'signed' (got others)",
        "OptionError: Expected an option of NeighborLoader (got num_neighbours=2)",
        "DataError: Expected an undirected graph for subgraph_type='bidirectional'",
        "OptionError: Expected at least one batch of 22 inputs (got 20 inputs and drop_last=True)",
        "DataError: Expected 'edge_label_index' to be a tensor of shape [2, n] (got [1, 60])",
        "DataError: Expected 'edge_label' to have 60 rows (got shape [7])",
        "OptionError: Expected no edge_label with neg_sampling='triplet'",
        "OptionError: Expected neg_sampling to be 'binary', 'triplet' or a NegativeSampling (got 'some')",
        "OptionError: Expected neg_sampling to be 'binary', 'triplet' or a NegativeSampling (got None), and "
        "neg_sampling_ratio a number from 0 (got -1.0)",
        "UnsupportedError: Expected LinkNeighborLoader without edge_label_time",
        "DataError: Expected 'src_weight' of neg_sampling to be 20 weights of at least 0, not all 0 (got shape [19])",
        "DataError: Expected ids in 'edge_label_index' (got torch.float64): pass integers",
        "DataError: Expected 'edge_label' to be numbers (got a list of others)",
    ]
    for messages in workers(2).run(refusals):
        assert len(messages) == len(expected)
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), (message, start)
            assert "\n" not in message


@pytest.mark.parametrize(
    ("label", "expected"),
    [([0.0, 1.0, 2.5], [1.0, 2.0, 3.5, 0.0]), ([0.5, 1.0, 2.5], [0.5, 1.0, 2.5, 0.0]), ([torch.nan, 1.0], None)],
)
def test_labels_from_zero_alone_are_raised(label: list[float], expected: list[float] | None) -> None:
    graph = random_graph(N, 150)
    edges = graph.edge_index[:, : len(label)]
    (batch,) = LinkNeighborLoader(graph, [2], edges, torch.tensor(label), batch_size=3, neg_sampling_ratio=0.3)
    found = batch.edge_label.tolist()
    if expected is None:
        assert math.isnan(found[0])
        assert found[1:] == [1.0, 0.0]
    else:
        assert found == expected


def test_a_copy_of_a_loader_has_steps_of_its_own() -> None:
    loader = NeighborLoader(random_graph(N, 150), [2], batch_size=8)
    first = next(iter(loader)).n_id
    copied = copy.deepcopy(loader)
    assert copied.state_dict()["step"] == 1
    assert len(list(copied)) == len(loader) - 1
    assert loader.state_dict()["step"] == 1
    assert not torch.equal(next(iter(loader)).n_id, first)


def test_options_of_workers_have_no_effect() -> None:
    graph = random_graph(N, 150)
    with pytest.warns(UserWarning, match="num_workers has no effect: a thread makes the next batch"):
        NeighborLoader(graph, [2], batch_size=8, num_workers=2, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.copy(NeighborLoader(graph, [2], batch_size=8, num_workers=0, is_sorted=True, directed=False))
    assert copied.sampler.subgraph_type == "induced"
    assert isinstance(next(iter(copied)).e_id, Tensor)
