"""Two levels beside one and stock PyG: values, gradients, bytes by level. ``PYG_DIST_MACHINES`` makes the machines."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from against_stock import of_first_rank
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINEConv, GraphConv, SAGEConv
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.ops.quantize import row_bytes
from pyg_dist.backend.session import session
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.cli import main
from pyg_dist.cli.stored_plan import plan_of_store
from pyg_dist.data import layout_choice
from pyg_dist.data.stored_graph import rank_of_part
from pyg_dist.errors import OptionError
from pyg_dist.graph.protocol import Norm
from pyg_dist.halo.exchange import Exchange
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.two_level import MachineEdges
from pyg_dist.loader import NeighborLoader, UniformVertexLoader
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import Manifest

NUM_NODES = 61
CONVS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: SAGEConv(5, 4),
    "gcn": lambda: GCNConv(5, 4),
    "gat": lambda: GATConv(5, 4, heads=2),
    "max": lambda: SAGEConv(5, 4, aggr="max"),
    "gine": lambda: GINEConv(nn.Linear(5, 4), edge_dim=3),
    "weights": lambda: GraphConv(5, 4),
}
MACHINES = {4: "0,0,1,1", 6: "0,0,1,1,2,2", 3: "0,0,1"}


@contextmanager
def machines(world_size: int, of_rank: str | None = None) -> Iterator[None]:
    """A session whose ranks share machines."""
    session.shutdown()
    os.environ["PYG_DIST_MACHINES"] = MACHINES[world_size] if of_rank is None else of_rank
    session.init()
    try:
        yield
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        session.shutdown()
        session.init()


def hub_graph() -> Data:
    """With hubs, self loops and duplicate edges."""
    graph = random_graph(NUM_NODES, 700, num_features=5, seed=3)
    graph.edge_index[0] = graph.edge_index[0] * torch.rand(700) ** 2 // 1
    graph.edge_attr = torch.randn(700, 3, dtype=torch.float64)
    graph.x = torch.randn(NUM_NODES, 5, dtype=torch.float64)
    graph.edge_weight = torch.rand(700, dtype=torch.float64) + 0.5
    return graph


def results(conv: Any, data: Any, name: str) -> list[Any]:
    """The output, all gradients, and a second derivative."""
    x, weight = (data[key].detach().clone().requires_grad_() for key in ("x", "edge_weight"))
    if name == "weights":
        out = conv(x, data.edge_index, weight)
    elif name == "gine":
        out = conv(x, data.edge_index, data.edge_attr)
    else:
        out = conv(x, data.edge_index)
    inputs = [x, *conv.parameters(), *([weight] if name == "weights" else [])]
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=name not in ("gat", "max"))
    found = [out.detach(), *(grad.detach() for grad in grads)]
    if name not in ("gat", "max"):
        found += torch.autograd.grad(grads[0].square().sum(), inputs[:2])
    return found


def whole(found: Any) -> Tensor:
    return found.full_tensor() if hasattr(found, "full_tensor") else found  # type: ignore[no-any-return]


def equal(
    world_size: int, exchange: Any, names: list[str], of_rank: str | None = None, empty: int | None = None
) -> None:
    with machines(world_size, of_rank):
        torch.manual_seed(0)
        graph = hub_graph()
        parts = torch.arange(NUM_NODES) * 7 % world_size
        parts[parts == empty] = 0
        one, two = (
            pyg_dist.DistributedData(graph, partition=parts, exchange=exchange, hierarchy=h) for h in ("off", "on")
        )
        assert (one.plan.two_levels, two.plan.two_levels) == (False, True)
        for name in names:
            stock = CONVS[name]().double()
            expected = of_first_rank(partial(results, stock, graph, name))
            before = copy.copy(two.traffic)
            ours = pyg_dist.distribute(copy.deepcopy(stock))
            for found, theirs in zip(results(ours, two, name), expected, strict=True):
                torch.testing.assert_close(whole(found), theirs, rtol=1e-10, atol=1e-10, msg=f"{name} {exchange}")
            assert two.traffic.num_bytes > before.num_bytes or pyg_dist.rank() == empty
            assert two.traffic.num_bytes_between <= two.traffic.num_bytes


@pytest.mark.parametrize("exchange", ["hybrid", "post", "pre"])
@pytest.mark.parametrize("world_size", [3, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_two_levels_equal_stock(workers: Pools, world_size: int, exchange: Any) -> None:
    workers(world_size).run(equal, world_size, exchange, list(CONVS))


@pytest.mark.parametrize(("of_rank", "empty"), [("0,0,0,1", 1), ("0,0,0,1", 3), ("0,0,1,1", 2)])
def test_uneven_machines_and_ranks_without_nodes(workers: Pools, of_rank: str, empty: int) -> None:
    workers(4).run(equal, 4, "hybrid", ["sage", "gat", "weights"], of_rank, empty)


@on_ranks(4, pytest.param(6, marks=pytest.mark.slow))
def test_bytes_by_level(world_size: int) -> None:
    """One product sends by the link what the plan counts; the other way as much."""
    with machines(world_size):
        torch.manual_seed(0)
        graph = hub_graph()
        parts = torch.arange(NUM_NODES) * 7 % world_size
        data = pyg_dist.DistributedData(graph, partition=parts, hierarchy="on")
        assert data.plan.across is not None
        conv = pyg_dist.distribute(SAGEConv(5, 7, project=False)).double()
        x = data.x.detach().clone().requires_grad_()
        out = None
        for _ in ("forward", "backward"):
            before = copy.copy(data.traffic)
            if out is None:
                out = conv(x, data.edge_index)
            else:
                out.square().sum().backward()
            sent = [
                sum(data.graph.group.gather_counts(getattr(data.traffic, n) - getattr(before, n)))
                for n in ("num_bytes", "num_bytes_between")
            ]
            numbers = data.plan.to_dict()
            row = 5 * 8
            assert sent[1] == data.plan.across[1] * row
            assert (
                sent[0]
                == (numbers["rows_inside_nodes"] + numbers["rows_between_nodes"]) * row
                == 40 * sum(s.rows_sent for s in data.plan.sizes)
            )


@on_ranks(4)
def test_the_links_messages_leave_first(world_size: int) -> None:
    """By the link rows first; addends to agents, and the sums by the link; inside machines; local; the rest."""
    with machines(world_size):
        parts = torch.arange(NUM_NODES) * 7 % world_size
        data = pyg_dist.DistributedData(hub_graph(), partition=parts, hierarchy="on")
        conv = pyg_dist.distribute(SAGEConv(5, 4)).double()
        x = data.x.detach().clone().requires_grad_()
        conv(x, data.edge_index).sum().backward()
        operator = data.graph.operator(Norm.MEAN, None, torch.float64)
        names = {}
        for way in (operator, operator.transposed):
            relay = way.halo.relay
            parts_of = {name: getattr(relay, name) for name in ("rows", "gather", "sums", "spread")}
            parts_of["inside"] = way.halo.exchange
            names |= {id(part): name for name, part in parts_of.items()} | {id(way.local): "local"}
        order: list[str] = []

        def noting(call: Any) -> Any:
            def noted(self: Any, *args: Any, **options: Any) -> Any:
                order.extend([names[id(self)]] if id(self) in names else [])
                return call(self, *args, **options)

            return noted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "start", noting(Exchange.start))
            patch.setattr(Matrix, "multiply", noting(Matrix.multiply))
            out = conv(x, data.edge_index)
            assert order == ["rows", "gather", "sums", "inside", "local", "spread"]
            order.clear()
            out.sum().backward()
            assert order == ["rows", "gather", "sums", "inside", "local", "spread"]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "exchange"),
    [(4, "hybrid"), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((6, "hybrid"), (4, "post"), (4, "pre")))],
)
def test_batches(world_size: int, exchange: Any) -> None:
    """Subgraphs, uniform samples and sampled neighbours: as in one level, which other tests compare to PyG."""
    with machines(world_size):
        graph = hub_graph()
        parts = torch.arange(NUM_NODES) * 7 % world_size
        convs = [pyg_dist.distribute(CONVS[name]().double()) for name in ("sage", "gat", "weights")]
        found: dict[str, list[Tensor]] = {}
        crossing = []
        for hierarchy in ("off", "on"):
            data = pyg_dist.DistributedData(graph, partition=parts, exchange=exchange, hierarchy=hierarchy)  # type: ignore[arg-type]
            assert data.plan.two_levels == (hierarchy == "on")
            graphs = [data.subgraph(torch.arange(0, NUM_NODES, 2)), data.subgraph(torch.arange(3))]
            graphs += UniformVertexLoader(data, 24, num_steps=3, prefetch=False)
            sampled = NeighborLoader(data, [4, 3], input_nodes=torch.arange(12), batch_size=6)
            results = found[hierarchy] = []
            for number, batch in enumerate([*graphs, *sampled]):
                if number == len(graphs):
                    before = data.traffic.num_bytes_between
                assert (batch.graph.share.row_transfer.relay is None) == (hierarchy == "off")
                for conv in convs[: 3 if number < 2 else 2]:
                    x = batch.x.detach().clone().requires_grad_()
                    given = (batch.edge_weight,) if isinstance(conv, GraphConv) else ()
                    out = conv(x, batch.edge_index, *given)
                    results += [
                        whole(t) for t in (out, *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()]))
                    ]
            crossing.append(sum(data.graph.group.gather_counts(data.traffic.num_bytes_between - before)))
        assert 0 < crossing[1] < crossing[0], "bytes of sampled neighbours that cross, in two levels and in one"
        for one, two in zip(*found.values(), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10)


@on_ranks(4)
@pytest.mark.parametrize("bits", [8, 2])
def test_few_bits_by_the_link_alone(world_size: int, bits: int) -> None:
    """What stays inside machines is exact, unless ``PYG_DIST_LOCAL_BITS`` says otherwise; what crosses is near."""
    with machines(world_size):
        torch.manual_seed(0)
        graph, width = hub_graph(), 40
        graph.x = torch.randn(NUM_NODES, width)
        del graph.edge_weight, graph.edge_attr
        parts = torch.arange(NUM_NODES) * 7 % world_size
        inside = parts[graph.edge_index[0]] // 2 == parts[graph.edge_index[1]] // 2
        near = Data(x=graph.x, edge_index=graph.edge_index[:, inside])
        conv = SAGEConv(width, width, aggr="sum", root_weight=False, bias=False)
        with torch.no_grad():
            conv.lin_l.weight.copy_(torch.eye(width))

        def out(given: Data, **options: Any) -> tuple[Any, Tensor]:
            data = pyg_dist.DistributedData(given, partition=parts, hierarchy="on", **options)
            x = data.x.detach().clone().requires_grad_()
            return data, pyg_dist.distribute(copy.deepcopy(conv))(x, data.edge_index).full_tensor().detach()

        assert torch.equal(out(near, bits=bits)[1], out(near)[1])
        os.environ["PYG_DIST_LOCAL_BITS"] = "2"
        try:
            assert not torch.equal(out(near, bits=bits)[1], out(near)[1])
        finally:
            del os.environ["PYG_DIST_LOCAL_BITS"]

        data, exact = out(graph)
        data, coded = out(graph, bits=bits)
        sent = sum(data.graph.group.gather_counts(data.traffic.num_bytes_between))
        assert sent == data.plan.across[1] * row_bytes(width, 4, bits)
        # Each of a target's addends that cross is off by less than a step of its range; a sum's is that of its terms.
        source, target = graph.edge_index
        crosses = parts[source] // 2 != parts[target] // 2
        span = (graph.x.max(1).values - graph.x.min(1).values)[source[crosses]]
        bound = torch.zeros(NUM_NODES).index_add_(0, target[crosses], span) * (1 / (2**bits - 1) + 2**-7) + 1e-4
        error = (coded - exact).abs().max(1).values
        assert bool((error <= bound).all())
        assert float(error.max()) > 0


def refused(world_size: int) -> list[str]:
    found = []
    with machines(world_size):
        given: list[dict[str, Any]] = [{"hierarchy": "yes"}, {"hierarchy": "on", "mesh": {"data": 2, "part": 2}}]
        for options in given:
            with pytest.raises(OptionError) as error:
                pyg_dist.DistributedData(hub_graph(), **options)
            found.append(str(error.value))
    with machines(world_size, "0,1,0,1"):
        with pytest.raises(OptionError) as error:
            pyg_dist.DistributedData(hub_graph(), hierarchy="on")
        assert not pyg_dist.DistributedData(hub_graph(), partition="random").plan.two_levels
    return [*found, str(error.value)]


def test_refused(workers: Pools) -> None:
    for unknown, apart, mixed in workers(4).run(refused, 4):
        assert "one data group, with hierarchy='on' (got machines (0, 1, 0, 1))" in mixed
        assert "Expected hierarchy to be 'auto' or 'off' or 'on' (got 'yes')" in unknown
        assert "Expected ranks of a machine to follow one another" in apart


def opened(world_size: int, path: str, crossing: int) -> None:
    """A store in two levels trains as the graph in one; one rank alone plans each edge that crosses machines."""
    planned, routes = list[int](), MachineEdges.routes

    def counted(edges: MachineEdges, exchange: Any) -> Any:
        planned.append(len(edges.edges.row))
        return routes(edges, exchange)

    with machines(world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MachineEdges, "routes", counted)
        graph = hub_graph()
        stock = SAGEConv(5, 4).double()
        torch.manual_seed(1)
        expected = results(stock, graph, "sage")
        for hierarchy in ("on", "auto"):
            data = pyg_dist.DistributedData.open(path, hierarchy=hierarchy)  # type: ignore[arg-type]
            assert data.plan.two_levels or hierarchy == "auto"
            for_rows, for_sums = planned
            assert for_rows == for_sums
            assert sum(world_group().gather_counts(for_rows)) == crossing
            planned.clear()
            found = results(pyg_dist.distribute(copy.deepcopy(stock)), data, "sage")
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(whole(ours), theirs, rtol=1e-10, atol=1e-10)


def test_a_store(workers: Pools, tmp_path: Any, capsys: Any) -> None:
    """It is planned as the graph is, by ranks and by merged parts, and trains."""
    graph, path = hub_graph(), tmp_path / "store"
    pyg_dist.save_graph(graph, tmp_path / "graph.safetensors")
    assert main(["partition", str(tmp_path / "graph.safetensors"), str(path), "--parts", "6", "--model", "random"]) == 0
    store = HaloStore(path, Manifest.load(path))
    for ranks in (6, 4):
        parts = torch.empty(NUM_NODES, dtype=torch.int64)
        for part, rank in enumerate(rank_of_part(store.path, [store], ranks).tolist()):
            parts[store.node_id([part])] = rank
        for hierarchy in ("on", "off"):
            planned: Any = plan_of_store(path, ranks, "hybrid", 2, hierarchy=hierarchy)  # type: ignore[arg-type]
            expected = Plan.of(graph.edge_index, parts, ranks, ranks_per_node=2, hierarchy=hierarchy)  # type: ignore[arg-type]
            assert (planned.sizes, planned.pairs, planned.across) == (expected.sizes, expected.pairs, expected.across)
            assert planned.two_levels == (hierarchy == "on")
    machine = rank_of_part(store.path, [store], 4) // 2
    crossing = int(store.edges_between[machine.view(-1, 1) != machine].sum())
    store.close()
    capsys.readouterr()
    assert main(["plan", str(path), "--ranks", "4", "--ranks-per-node", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["between_machines"]["machine_pairs"] == expected.across[1]  # type: ignore[index]
    workers(4).run(opened, 4, str(path), crossing)


def name_of_partition() -> list[str]:
    """Of the plans for parts of METIS, and for those of another method that were better."""
    find, names = layout_choice.find_parts, []

    def find_others(*given: Any) -> Tensor:
        *most, report = given
        parts = find(*most)
        report("metis-cover", parts)
        return parts

    with machines(4), pytest.MonkeyPatch.context() as patch:
        names.append(DistributedData(hub_graph(), hierarchy="off").plan.partition)
        patch.setattr(layout_choice, "find_parts", find_others)
        data = DistributedData(hub_graph())
    return [*names, data.plan.partition]


def test_the_plan_names_the_method_whose_parts_it_has(workers: Pools) -> None:
    assert workers(4).run(name_of_partition) == [["metis", "metis-cover"]] * 4
