"""Batches of graphs with types: those of one process on any number of ranks, and steps are those of stock PyG."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, Linear, SAGEConv
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.utils import trim_to_layer
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData, cli
from pyg_dist.errors import PygDistError
from pyg_dist.loader import LinkNeighborLoader, NeighborLoader, UniformVertexLoader
from pyg_dist.nn import NodeEmbedding

Batch = dict[str, Any]

PAPER, AUTHOR, VENUE, ALONE = "paper", "author", "venue", "alone"
SIZES = {PAPER: 31, AUTHOR: 23, VENUE: 5, ALONE: 3}
WRITES, BY, CITES, IN, HAS = (
    (AUTHOR, "writes", PAPER), (PAPER, "by", AUTHOR), (PAPER, "cites", PAPER), (PAPER, "in", VENUE),
    (VENUE, "has", PAPER),
)  # fmt: skip
LIKES = (PAPER, "likes", PAPER)  # of which the graph has no edges
RELATIONS = {WRITES: 90, BY: 70, CITES: 120, IN: 31, HAS: 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "list": {"num_neighbors": [3, 2], "shuffle": True},
    "by relation": {"num_neighbors": {WRITES: [2, 3], BY: [4, 1], CITES: [0, 2], IN: [1, 1], HAS: [2, 2]}},
    "default": {"num_neighbors": NumNeighbors({CITES: [1, 1, 0]}, default=[2, 2, 2]), "drop_last": True},
    "replace": {"num_neighbors": [2, 2], "replace": True},
    "weighted": {"num_neighbors": [2, 2], "weight_attr": "weight"},
    "all": {"num_neighbors": [-1, -1]},
    "induced": {"num_neighbors": [2, 2], "subgraph_type": "induced"},
    "disjoint": {"num_neighbors": [2, 2], "disjoint": True, "shuffle": True},
}


def graph_of() -> HeteroData:
    """With a type without edges, a relation without edges, and one without weights."""
    rng, data = torch.Generator().manual_seed(3), HeteroData()
    for kind, size in SIZES.items():
        data[kind].x = torch.randn(size, 4, generator=rng, dtype=torch.float64)
    data[PAPER].y = torch.randint(0, 3, (SIZES[PAPER],), generator=rng)
    data[PAPER].train_mask = torch.rand(SIZES[PAPER], generator=rng) < 0.7
    for relation, number in RELATIONS.items():
        ends = [torch.randint(0, SIZES[kind], (number,), generator=rng) for kind in (relation[0], relation[-1])]
        data[relation].edge_index = torch.stack(ends)
        data[relation].edge_attr = torch.randn(number, 2, generator=rng, dtype=torch.float64)
        if relation != BY:
            data[relation].weight = torch.rand(number, generator=rng, dtype=torch.float64)
    data.name = "made up"
    return data


def laid_out(form: str, graph: HeteroData, path: str | None = None) -> Any:
    """``"plain"``: the graph itself; else over ranks, the last of which has nothing, venues all on the second one."""
    if form == "plain":
        return graph
    if form == "store":
        return pyg_dist.DistributedData.open(path)
    size, rng = pyg_dist.world_size(), torch.Generator().manual_seed(1)
    used = max(size - 1, 1) if size > 2 else size
    parts = {kind: torch.randint(0, used, (n,), generator=rng) for kind, n in SIZES.items()}
    parts[VENUE] = torch.full((SIZES[VENUE],), min(1, size - 1))
    return pyg_dist.DistributedData(graph, partition=parts)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def facts(batch: Any) -> Batch:
    """All that a batch has, by name."""
    found: Batch = {}
    for kind, store in batch.node_items():
        found[f"{kind}.num_nodes"] = store.num_nodes
    for key, store in [*batch.node_items(), *batch.edge_items()]:
        for name, value in store.items():
            value = whole(value)
            found[f"{key}.{name}"] = value.tolist() if isinstance(value, Tensor) else value
    return found


class Net(nn.Module):
    """HGT, then SAGE between types and attention, with attributes of edges, within one."""

    def __init__(self) -> None:
        super().__init__()
        self.hgt = HGTConv(4, 4, (list(SIZES), list(RELATIONS)), heads=2)
        self.convs = nn.ModuleList(
            HeteroConv(
                {
                    relation: GATConv(4, 4, edge_dim=2, add_self_loops=False) if relation == CITES else SAGEConv(4, 4)
                    for relation in RELATIONS
                }
            )
            for _ in range(2)
        )
        self.lin = Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        x = {**batch.x_dict, **self.hgt(batch.x_dict, batch.edge_index_dict)}
        for conv in self.convs:
            out = conv(x, batch.edge_index_dict, edge_attr_dict={CITES: batch[CITES].edge_attr})
            x = {kind: out[kind].relu() if kind in out else rows for kind, rows in x.items()}
        return self.lin(x[PAPER])


def model_for(data: Any) -> Any:
    torch.manual_seed(0)
    net = Net().double()
    return pyg_dist.distribute(net) if getattr(data, "is_distributed", False) else net


def trained(form: str, name: str, path: str | None = None) -> list[tuple[Batch, float]]:
    """The batches of an epoch, or of two in the first form, and their losses while a model trains."""
    data = laid_out(form, graph_of(), path)
    loader = NeighborLoader(data, input_nodes=(PAPER, data[PAPER].train_mask), batch_size=9, **OPTIONS[name])
    net, found = model_for(data), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2 if name == "list" else 1):
        for batch in loader:
            optimizer.zero_grad()
            size = batch[PAPER].batch_size
            loss = F.cross_entropy(net(batch)[:size], batch[PAPER].y[:size])
            loss.backward()
            optimizer.step()
            assert batch.name == "made up"
            found.append((facts(batch), loss.item()))
    again = NeighborLoader(data, input_nodes=(PAPER, data[PAPER].train_mask), batch_size=9, **OPTIONS[name])
    again.load_state_dict(json.loads(json.dumps({**loader.state_dict(), "step": 1})))  # as a checkpoint keeps it
    assert facts(next(iter(again))) == found[1][0]
    return found


def check(graph: HeteroData, batch: Batch) -> None:
    """Against the graph it was drawn of."""
    for kind in SIZES:
        n_id = torch.tensor(batch[f"{kind}.n_id"], dtype=torch.int64)
        tree = torch.tensor(batch.get(f"{kind}.batch", [0] * n_id.numel()), dtype=torch.int64)
        distinct = torch.stack([n_id, tree]).unique(dim=1)
        assert distinct.shape[1] == n_id.numel() == sum(batch[f"{kind}.num_sampled_nodes"])
        assert torch.equal(torch.tensor(batch[f"{kind}.x"], dtype=torch.float64).view(-1, 4), graph[kind].x[n_id])
    for relation in RELATIONS:
        e_id = torch.tensor(batch[f"{relation}.e_id"], dtype=torch.int64)
        ends = torch.tensor(batch[f"{relation}.edge_index"], dtype=torch.int64).view(2, -1)
        assert sum(batch.get(f"{relation}.num_sampled_edges", [e_id.numel()])) == e_id.numel()
        for end, kind in enumerate((relation[0], relation[-1])):
            n_id = torch.tensor(batch[f"{kind}.n_id"], dtype=torch.int64)
            assert torch.equal(n_id[ends[end]], graph[relation].edge_index[end, e_id])
        if f"{PAPER}.batch" in batch:
            source, target = (torch.tensor(batch[f"{kind}.batch"], dtype=torch.int64) for kind in relation[::2])
            assert torch.equal(source[ends[0]], target[ends[1]])
        attr = torch.tensor(batch[f"{relation}.edge_attr"], dtype=torch.float64).view(-1, 2)
        assert torch.equal(attr, graph[relation].edge_attr[e_id])
    size = batch[f"{PAPER}.batch_size"]
    assert batch[f"{PAPER}.n_id"][:size] == batch[f"{PAPER}.input_id"]
    assert batch[f"{PAPER}.num_sampled_nodes"][0] == size


SLOW = ("by relation", "replace", "all")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPTIONS])
def test_training_is_that_of_one_process(name: str, workers: Pools) -> None:
    (stock,) = workers(1).run(trained, "plain", name)
    for batch, _ in stock:
        check(graph_of(), batch)
    assert len({str(batch) for batch, _ in stock}) == len(stock) or name == "all"
    for size in (1, 3) if name == "disjoint" else (3,):
        for found in workers(size).run(trained, "memory", name):
            assert [batch for batch, _ in found] == [batch for batch, _ in stock]
            torch.testing.assert_close([loss for _, loss in found], [loss for _, loss in stock], rtol=0, atol=1e-10)


def neighbourhood(graph: HeteroData, seeds: Tensor, hops: int) -> tuple[dict[str, set[int]], dict[Any, set[int]]]:
    """What is reached from papers along the edges of all relations, hop by hop."""
    reached: dict[str, set[int]] = {kind: set() for kind in SIZES}
    reached[PAPER] = set(seeds.tolist())
    edges: dict[Any, set[int]] = {relation: set() for relation in RELATIONS}
    for _ in range(hops):
        before = {kind: torch.tensor(sorted(ids), dtype=torch.int64) for kind, ids in reached.items()}
        for relation in RELATIONS:
            source, target = graph[relation].edge_index
            chosen = torch.isin(target, before[relation[-1]]).nonzero().view(-1)
            edges[relation] |= set(chosen.tolist())
            reached[relation[0]] |= set(source[chosen].tolist())
    return reached, edges


def test_a_large_fan_out_gives_the_neighbourhood() -> None:
    graph = graph_of()
    for num_neighbors in ([-1, -1], [200, 200]):
        for batch in NeighborLoader(graph, num_neighbors, input_nodes=PAPER, batch_size=4):
            nodes, edges = neighbourhood(graph, batch[PAPER].n_id[: batch[PAPER].batch_size], 2)
            for kind in SIZES:
                assert set(batch[kind].n_id.tolist()) == nodes[kind]
            for relation in RELATIONS:
                assert set(batch[relation].e_id.tolist()) == edges[relation]
                assert batch[relation].e_id.numel() == len(edges[relation])


def test_counts_of_edges() -> None:
    """Of each node min(fan-out, degree) in-edges of each relation, for the nodes of the first hop."""
    graph = graph_of()
    for batch in NeighborLoader(graph, {**{key: [2] for key in RELATIONS}, BY: [1]}, input_nodes=PAPER, batch_size=9):
        for relation in (WRITES, CITES):
            degree = torch.bincount(graph[relation].edge_index[1], minlength=SIZES[PAPER])
            found = torch.bincount(batch[relation].edge_index[1], minlength=batch[PAPER].num_nodes)
            size = batch[PAPER].batch_size
            assert torch.equal(found[:size], degree[batch[PAPER].n_id[:size]].clamp(max=2))
        assert batch[BY].num_edges == batch[HAS].num_edges == 0


def test_an_attribute_like_edge_index() -> None:
    """Edges of a plain graph are in the last dimension of ``edge_label_index``, as after ``RandomLinkSplit``."""
    graph = graph_of()
    graph[PAPER].pair_index = torch.arange(2 * SIZES[PAPER]).view(2, -1)
    graph[CITES].edge_label_index = graph[CITES].edge_index
    (batch,) = NeighborLoader(graph, [2], input_nodes=PAPER, batch_size=SIZES[PAPER])
    assert torch.equal(batch[CITES].edge_label_index, graph[CITES].edge_index[:, batch[CITES].e_id])
    assert torch.equal(batch[PAPER].pair_index, graph[PAPER].pair_index[:, batch[PAPER].n_id])
    plain = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), pair_index=torch.arange(6).view(2, 3), num_nodes=3)
    (of_one_type,) = NeighborLoader(plain, [2], input_nodes=torch.tensor([2]))
    assert torch.equal(of_one_type.pair_index, plain.pair_index[:, of_one_type.n_id])


def links(form: str, relation: Any, negatives: Any) -> list[Any]:
    graph = graph_of()
    data = laid_out(form, graph)
    sampling = NegativeSampling("triplet", 2) if negatives == "two" else negatives
    edges = graph[CITES if relation == LIKES else relation].edge_index[:, ::3]
    loader = LinkNeighborLoader(
        data, [2, 2], edge_label_index=(relation, edges), batch_size=15, shuffle=True, neg_sampling=sampling
    )
    net, found = model_for(data), []
    for batch in loader:
        loss = net(batch).square().mean()
        of_batch = facts(batch)
        n_id = [torch.tensor(of_batch[f"{kind}.n_id"]) for kind in (relation[0], relation[-1])]
        if "edge_label_index" in batch[relation]:
            source, target = batch[relation].edge_label_index
        else:
            source, target = batch[relation[0]].src_index, batch[relation[-1]].dst_pos_index
        ids = batch[relation].input_id
        for ends, kind in ((source, relation[0]), (target, relation[-1])):  # those of negative edges, too, are seeds
            assert int(ends.max()) < of_batch[f"{kind}.num_sampled_nodes"][0]
        assert torch.equal(torch.stack([n_id[0][source[: ids.numel()]], n_id[1][target[: ids.numel()]]]), edges[:, ids])
        found.append((of_batch, loss.item()))
    return found


@pytest.mark.parametrize(
    ("relation", "negatives"), [(WRITES, "binary"), (CITES, "two"), (BY, "triplet"), (IN, None), (LIKES, "binary")]
)
def test_links(relation: Any, negatives: Any, workers: Pools) -> None:
    (stock,) = workers(1).run(links, "plain", relation, negatives)
    for size in (1, 3) if relation == WRITES else (3,):
        for found in workers(size).run(links, "memory", relation, negatives):
            assert [batch for batch, _ in found] == [batch for batch, _ in stock]
            torch.testing.assert_close([loss for _, loss in found], [loss for _, loss in stock], rtol=0, atol=1e-10)


def test_of_a_store(workers: Pools, tmp_path: Path) -> None:
    pyg_dist.save_graph(graph_of(), tmp_path / "graph.safetensors")
    cli.main(["partition", str(tmp_path / "graph.safetensors"), str(tmp_path / "store"), "--parts", "3"])
    (stock,) = workers(1).run(trained, "plain", "default")
    for found in workers(3).run(trained, "store", "default", str(tmp_path / "store")):
        assert [batch for batch, _ in found] == [batch for batch, _ in stock]
        torch.testing.assert_close([loss for _, loss in found], [loss for _, loss in stock], rtol=0, atol=1e-10)


def learning(form: str) -> dict[str, Tensor]:
    """The gradients of rows and weights of edges that learn, and of an embedding by ``n_id``."""
    graph = graph_of()
    graph[AUTHOR].x.requires_grad_()
    graph[WRITES].edge_attr.requires_grad_()
    data = laid_out(form, graph)
    table = torch.linspace(-1, 1, SIZES[VENUE] * 4, dtype=torch.float64).view(-1, 4)
    venues: Any = nn.Parameter(table)
    if form != "plain":
        embedding = NodeEmbedding(data[VENUE], 4, dtype=torch.float64)
        embedding.load_state_dict({"weight": table})
        venues = embedding.weight
    net = model_for(data)
    for batch in NeighborLoader(data, [3, 3], input_nodes=PAPER, batch_size=10):
        batch[VENUE].x = venues[batch[VENUE].n_id]
        loss = net(batch).square().sum() + batch[WRITES].edge_attr.square().sum()
        loss.backward()
    grads = {f"{name}.grad": p.grad for name, p in net.named_parameters() if p.grad is not None}
    rows = {"author": data[AUTHOR].x.grad, "attr": data[WRITES].edge_attr.grad, "venue": venues.grad}
    return {**grads, **{name: whole(value) for name, value in rows.items()}}


def test_what_learns(workers: Pools) -> None:
    (stock,) = workers(1).run(learning, "plain")
    for found in workers(3).run(learning, "memory"):
        for name, value in stock.items():
            mine = found.get(name, torch.zeros_like(value))  # of HGT's maps of a type without relations
            torch.testing.assert_close(mine, value, rtol=0, atol=1e-10, msg=name)


def trimmed(batch: Any) -> Any:
    hops = batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict
    return trim_to_layer(1, *hops, batch.x_dict, batch.edge_index_dict)


def test_what_is_refused() -> None:
    data: Any = DistributedData(copy.copy(graph_of()))
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: NeighborLoader(data, [2]), "Expected input_nodes to be a type of nodes"),
        (lambda: NeighborLoader(data, [2], input_nodes=("reviewer", None)), "Expected input_nodes to be a type"),
        (lambda: NeighborLoader(data, [2], input_nodes=(PAPER, data[AUTHOR].x[:, 0] > 0)), "over the nodes of data"),
        (lambda: NeighborLoader(data, {CITES: [2]}, input_nodes=PAPER), "Missing number of neighbors"),
        (lambda: NeighborLoader(data, [2, -2], input_nodes=PAPER), "list of counts of each hop"),
        (lambda: NeighborLoader(data, [2], input_nodes=PAPER, subgraph_type="bidirectional"), "another relation's"),
        (lambda: NeighborLoader(data, [2], input_nodes=PAPER, weight_attr="none"), "attribute of a relation"),
        (lambda: LinkNeighborLoader(data, [2], (PAPER, "to", AUTHOR)), "to be a relation of the graph"),
        (lambda: UniformVertexLoader(data, 4), "one type of nodes .* use NeighborLoader"),
        (lambda: trimmed(next(iter(NeighborLoader(data, [2], input_nodes=PAPER)))), "Expected whole batches"),
    ]
    for call, message in wrong:
        with pytest.raises(PygDistError, match=message):
            call()
