"""``data/hetero.py``: graphs of several types beside PyG's ``HeteroData``: values, gradients, losses and metrics."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same, of_first_rank
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GraphConv, HANConv, HeteroConv, HGTConv, MetaPath2Vec, SAGEConv, to_hetero
from typed_models import (
    AUTHOR,
    MODELS,
    PAPER,
    RELATIONS,
    SIZES,
    VENUE,
    WIDTHS,
    Plain,
    both,
    hetero_graph,
    leaves,
    loss_of,
    owners,
    run_model,
    sage,
)
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute, rank
from pyg_dist.backend.session import session
from pyg_dist.data.hetero import DistributedHeteroData
from pyg_dist.errors import PygDistError
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.loader import NeighborLoader
from pyg_dist.pricing.machine import Machine
from pyg_dist.tensor import EdgeTensor, NodeTensor


def models(num_ranks: int, name: str) -> None:
    # The exchange is no business of a model's: the other one has a case of its own.
    for exchange in ("hybrid", "post") if name == "HeteroConv, mixed" else ("hybrid",):
        stock_data, data = both(num_ranks, exchange=exchange)
        torch.manual_seed(1)
        stock = MODELS[name](stock_data.metadata()).double()
        with torch.no_grad():
            stock(stock_data.x_dict, stock_data.edge_index_dict)
        ours = distribute(copy.deepcopy(stock))
        expected = of_first_rank(partial(run_model, stock, stock_data))
        assert_same(run_model(ours, data), expected, f"{name}, {exchange}")


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        *((3, name) for name in MODELS),
        *((1, name) for name in list(MODELS)[::4]),
        *(pytest.param(4, name, marks=pytest.mark.slow) for name in list(MODELS)[1::3]),
    ],
)
def test_models(workers: Pools, num_ranks: int, name: str) -> None:
    workers(num_ranks).run(models, num_ranks, name)


@pytest.mark.parametrize("name", ["HeteroConv of GAT, cat", "to_hetero of SAGE", "HAN"])
def test_small_graphs_on_one_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """There PyG's own code runs, unless it would add self loops between two types, which several ranks refuse."""
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", "10000000")
    models(1, name)
    _, data = both(1)
    gat = distribute(GATConv((WIDTHS[AUTHOR], WIDTHS[PAPER]), 2).double())
    x, edges = data.x_dict, data.edge_index_dict
    with pytest.raises(PygDistError, match="add_self_loops=False"):
        gat((x[AUTHOR], x[PAPER]), edges[AUTHOR, "writes", PAPER])
    with pytest.raises(PygDistError, match="expected a row for each of the 23 targets"):
        distribute(SAGEConv(4, 2).double())(x[AUTHOR], edges[AUTHOR, "writes", PAPER])


def test_options() -> None:
    """They are those of a graph with one type; what such a graph alone has is refused in one line."""
    graph = hetero_graph()
    with pytest.raises(TypeError, match="unexpected keyword argument 'bit'"):
        DistributedData(graph, bit=8)
    one_type: list[dict[str, Any]] = [
        {"layout": "grid"}, {"mesh": {"data": 1}}, {"model": (2, 8)},
        {"nodes_of": DistributedData(graph)},
    ]  # fmt: skip
    for option in one_type:
        with pytest.raises(PygDistError, match="with a HeteroData"):
            DistributedData(graph, **option)
    assert isinstance(DistributedData(graph, layout="auto", hierarchy="off", partition="random"), DistributedHeteroData)

    class Named(DistributedData):
        def __init__(self, data: Any, name: str) -> None:
            super().__init__(data)

    with pytest.raises(PygDistError, match="Named expected one type of nodes"):
        Named(graph, "mine")
    whole = DistributedData(graph, partition="random")
    assert whole.keys() == list(dict.fromkeys(name for store in whole.stores for name, _ in store.items()))
    for take_apart in (lambda: whole[0], lambda: whole.concat(whole), lambda: whole.to_data_list()):
        with pytest.raises(PygDistError, match=r"would .*take apart a distributed graph"):
            take_apart()
    batch = DistributedData(Batch.from_data_list([graph, graph]))
    assert (batch.num_graphs, len(batch), len(whole)) == (2, 2, len(whole.keys()))
    for join in (Batch.from_data_list, lambda graphs: next(iter(DataLoader(graphs)))):
        with pytest.raises(PygDistError, match="joins plain graphs"):
            join([whole])


def test_plain_edges() -> None:
    """Convs over relations are the stock ones on plain graphs, and name plain edges beside distributed rows."""
    stock_data, data = both(1)
    torch.manual_seed(1)
    for stock in (conv(WIDTHS, 8, stock_data.metadata(), heads=2).double() for conv in (HGTConv, HANConv)):
        ours = distribute(copy.deepcopy(stock))
        results = [conv(stock_data.x_dict, stock_data.edge_index_dict) for conv in (ours, stock)]
        assert all(torch.equal(results[0][kind], out) for kind, out in results[1].items())
        mixed = {**data.edge_index_dict, RELATIONS[2]: stock_data[RELATIONS[2]].edge_index}
        for edges in (mixed, stock_data.edge_index_dict):
            with pytest.raises(PygDistError, match="expected features and edges of a DistributedData"):
                ours(data.x_dict, edges)


@on_ranks(2, 3)
def test_first_values(num_ranks: int) -> None:
    """Ranks that draw different parameters train the same model, lazy ones included."""
    stock, data = both(num_ranks)
    torch.manual_seed(rank())
    model = distribute(to_hetero(Plain(sage), stock.metadata()).double())
    loss_of(model(data.x_dict, data.edge_index_dict), data).backward()
    for name, parameter in model.named_parameters():
        flat = torch.cat([parameter.detach().flatten(), parameter.grad.flatten()]).view(1, -1)  # type: ignore[union-attr]
        group = data[PAPER].sharding.group
        everywhere = group.gather_rows(flat, [1] * group.size)
        assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere)), name


@on_ranks(1, 2, 3)
def test_mapping(num_ranks: int) -> None:
    """What a script sees of the data is what PyG's has."""
    stock, data = both(num_ranks)
    assert data.metadata() == stock.metadata()
    assert (data.num_nodes, data.num_edges, data.name) == (stock.num_nodes, stock.num_edges, "made up")
    assert (data.num_node_features, data.num_edge_features) == (stock.num_node_features, stock.num_edge_features)
    assert isinstance(data, HeteroData)
    assert data.validate()
    assert data.has_isolated_nodes() == stock.has_isolated_nodes()
    assert data.is_undirected() == stock.is_undirected()
    for kind in SIZES:
        assert data[kind].num_nodes == SIZES[kind]
        assert isinstance(data[kind].x, NodeTensor)
        assert_same({"x": data[kind].x, "y": data[kind].y}, {"x": stock[kind].x, "y": stock[kind].y})
        assert data[kind].is_node_attr("x")
    for relation in RELATIONS:
        store = data[relation]
        assert store.num_edges == 60
        assert isinstance(store.edge_attr, EdgeTensor)
        assert_same({"edges": store.edge_index.full_tensor()}, {"edges": stock[relation].edge_index})
        assert_same({"attr": store.edge_attr}, {"attr": stock[relation].edge_attr})
        assert store.size() == stock[relation].size()
        assert store.is_edge_attr("edge_attr")
    assert list(data.edge_index_dict) == RELATIONS
    data[PAPER].z = torch.arange(SIZES[PAPER])
    assert isinstance(data[PAPER].z, NodeTensor)
    data[PAPER].x = F.normalize(data[PAPER].x, dim=-1)
    assert_same({"x": data[PAPER].x}, {"x": F.normalize(stock[PAPER].x, dim=-1)})
    data[PAPER, "cites", PAPER].w = torch.arange(60)
    assert isinstance(data[PAPER, "cites", PAPER].w, EdgeTensor)
    data[PAPER].chosen, order = data[PAPER].x[:3], torch.arange(SIZES[PAPER] - 1, -1, -1)
    data[PAPER].turned = data[PAPER].x[order]
    assert_same({"turned": data[PAPER].turned}, {"turned": data[PAPER].x.full_tensor()[order]})
    assert data[PAPER].is_node_attr("turned")
    assert not data[PAPER].is_node_attr("chosen")
    relation = data[PAPER, "cites", PAPER]
    relation.few = relation.edge_attr[relation.edge_attr[:, 0] > relation.edge_attr[:, 0].mean()]
    assert relation.is_edge_attr("w")
    assert not relation.is_edge_attr("few")
    del relation.few
    assert data.to("cpu") is data
    assert "paper" in repr(data)
    assert copy.copy(data)[PAPER].x is data[PAPER].x
    plan = data.plan
    assert (plan.ranks, sum(plan.nodes), sum(plan.edges)) == (num_ranks, 45, 360)
    assert all(" ".join(relation) in plan.describe() for relation in RELATIONS)
    assert plan.to_dict([8])["bytes"]["8"] == plan.rows["hybrid"] * 32
    assert sum(plan.nodes_of[VENUE][1:]) == 0
    alone = HeteroPlan.of(stock.edge_index_dict, owners(stock, num_ranks), num_ranks)
    assert (alone.hash, alone.describe(), alone.messages) == (plan.hash, plan.describe(), plan.messages)
    walks = [MetaPath2Vec(edges, 4, [RELATIONS[0]], 1, 2) for edges in (data.edge_index_dict, stock.edge_index_dict)]
    assert torch.equal(*(walk.col_dict[RELATIONS[0]] for walk in walks))
    for wrong, message in (
        (lambda: setattr(data[PAPER], "x", torch.zeros(3, 2)), "Expected 'x' to have 23 rows, one per node"),
        (lambda: setattr(data[PAPER], "x", data[AUTHOR].x), "Expected 'x' to have 23 rows, one per node"),
        (lambda: setattr(data[PAPER, "cites", PAPER], "edge_index", torch.zeros(2, 3)), "Assigning 'edge_index'"),
        (lambda: data["reviewer"], "Expected a type of nodes of this graph"),
        (lambda: setattr(data[PAPER, "new", PAPER], "edge_index", torch.zeros(2, 3)), "Assigning 'edge_index'"),
    ):
        with pytest.raises(PygDistError, match=message):
            wrong()


def sampled(model: nn.Module, data: Any, levels: set[bool]) -> list[Tensor]:
    """Outputs and gradients on batches of sampled neighbours, of whose relations some are in two levels."""
    found = []
    for batch in NeighborLoader(data, [3, 2], input_nodes=(PAPER, torch.arange(12)), batch_size=6):
        shares = [store.handle.graph.share for _, store in batch.edge_items()]
        assert {share.row_transfer.relay is not None for share in shares} == levels
        x = leaves(batch)
        outs = model(x, batch.edge_index_dict)
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs.values()), [*x.values()], allow_unused=True)
        found += [rows.full_tensor().detach() for rows in (*outs.values(), *grads) if rows is not None]
    return found


def two_levels(machine: str, hierarchy: str) -> None:
    """Ranks of a machine share what crosses: of all relations, or where that is cheaper by a machine's file."""
    os.environ |= {"PYG_DIST_MACHINES": "0,0,1,1", "PYG_DIST_MACHINE": machine}
    session.shutdown()
    session.init()
    try:
        torch.manual_seed(1)
        stock_data, data = both(4, hierarchy=hierarchy)
        levels = {plan.two_levels for plan in data.plan.relations.values()}
        assert levels == {True} if hierarchy == "on" else levels == {True, False}
        stock = MODELS["HeteroConv, mixed"](None).double()
        with torch.no_grad():
            stock(stock_data.x_dict, stock_data.edge_index_dict)
        ours = distribute(copy.deepcopy(stock))
        assert_same(run_model(ours, data, 1), of_first_rank(partial(run_model, stock, stock_data, 1)))
        assert rank() > 0 or 0 < data.traffic.num_bytes_between < data.traffic.num_bytes
        if hierarchy == "on":  # batches of both kinds come in the other case
            return
        _, one = both(4, hierarchy="off")
        found = [
            sampled(distribute(copy.deepcopy(stock)), of, levels) for of, levels in ((one, {False}), (data, levels))
        ]
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    finally:
        del os.environ["PYG_DIST_MACHINES"], os.environ["PYG_DIST_MACHINE"]
        session.shutdown()
        session.init()


@pytest.mark.parametrize("hierarchy", ["on", "auto"])
def test_two_levels(workers: Pools, tmp_path: Path, hierarchy: str) -> None:
    """A link on which a byte is all that costs: two levels are cheaper wherever fewer rows cross."""
    slow = Machine(call_seconds=0.0, intra_latency=0.0, inter_latency=0.0, inter_bandwidth=1e3)
    workers(4).run(two_levels, str(slow.save(tmp_path / "machine.json")), hierarchy)


@on_ranks(2, 3)
def test_few_bits(num_ranks: int) -> None:
    """Sums in few bits are near the exact ones, the nearer the more bits; exact in evaluation."""
    torch.manual_seed(1)
    conv = distribute(HeteroConv({relation: SAGEConv((32, 32), 8) for relation in RELATIONS}, aggr="sum"))
    found = {}
    for bits in (32, 8, 2):
        _, data = both(num_ranks, bits=bits)
        x = {kind: torch.tanh(rows.float() @ torch.eye(rows.shape[1], 32)) for kind, rows in data.x_dict.items()}
        x = {kind: rows.requires_grad_() for kind, rows in x.items()}
        conv.train()
        outs = conv(x, data.edge_index_dict)
        found[bits] = {kind: out.full_tensor() for kind, out in outs.items()}
        conv.eval()
        exact = conv(x, data.edge_index_dict)
        assert all(torch.allclose(exact[kind].full_tensor(), found[32][kind], atol=1e-5) for kind in exact)
    errors = {
        bits: max(float((found[bits][kind] - out).abs().max()) for kind, out in found[32].items()) for bits in (8, 2)
    }
    assert 0 < errors[8] < 0.03 < errors[2] < 3, errors


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries({kind: st.integers(0, 9) for kind in SIZES}),
            st.lists(st.sampled_from(range(len(RELATIONS))), min_size=1, max_size=5, unique=True),
            st.sampled_from([0, 1, 4, 30]),
            st.integers(0, 99),
        ),
        min_size=3, max_size=3,
    )
)  # fmt: skip
@on_ranks(1, 3)
def test_random_graphs(num_ranks: int, cases: list[tuple[dict[str, int], list[int], int, int]]) -> None:
    """Types without nodes, or on a rank alone, relations without edges, isolated nodes."""
    for sizes, kept, num_edges, seed in cases:
        relations = [RELATIONS[k] for k in kept]
        stock_data = hetero_graph(sizes, num_edges, seed, relations)
        data = DistributedData(copy.copy(stock_data), partition=owners(stock_data, num_ranks, seed))
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types that no relation ends at
            makers = (
                lambda w: SAGEConv(w, 5),
                lambda w: GATConv(w, 5, add_self_loops=False),
                lambda w: GraphConv(w, 5),
            )
            convs = {r: makers[k % 3]((WIDTHS[r[0]], WIDTHS[r[2]])) for k, r in enumerate(relations)}
            stock = HeteroConv(convs, aggr="mean").double()
        ours = distribute(copy.deepcopy(stock))
        found = []
        for model, graph in ((ours, data), (stock, stock_data)):
            x = leaves(graph)
            outs = model(x, graph.edge_index_dict)
            sum(out.square().sum() for out in outs.values()).backward()
            results = {f"out {kind}": out for kind, out in outs.items()}
            results |= {f"x {kind}": rows.grad for kind, rows in x.items()}
            found.append(results | {f"{name}.grad": p.grad for name, p in model.named_parameters()})
        assert_same(*found, f"{sizes} {kept} {num_edges} {seed}")
