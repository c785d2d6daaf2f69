"""Batches of ``UniformVertexLoader``: drawn without a message, equal to PyG's subgraphs, unbiased, restartable."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import subgraph, to_torch_csr_tensor
from workers import Workers

Pools = Callable[[int], Workers]
WORLD_SIZES = [1, 2, 3]


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def distribute(graph: Data, parts: Tensor, **options: Any) -> Any:
    from pyg_dist import DistributedData

    return DistributedData(graph, partition=parts, **options)


# ---- Samples ---------------------------------------------------------------------------------------------------------


def samples(world_size: int) -> list[list[int]]:
    from pyg_dist.loader import UniformVertexLoader

    graph = random_graph(41, 150)
    loader = quiet(lambda: UniformVertexLoader(distribute(graph, uneven_parts(41, world_size)), 9))
    return [batch.n_id.full_tensor().tolist() for _ in range(2) for batch in loader]


def test_samples_are_alike_on_all_ranks_and_world_sizes(workers: Pools) -> None:
    drawn = [s for size in WORLD_SIZES for s in workers(size).run(samples, size)]
    assert all(s == drawn[0] for s in drawn)
    assert len(drawn[0]) == 10
    assert all(len(set(ids)) == 9 and ids == sorted(ids) for ids in drawn[0])
    assert len({tuple(ids) for ids in drawn[0]}) == 10


def test_seeds_share_no_sample() -> None:
    from pyg_dist.loader.sampling import UniformSampling

    drawn = [{tuple(UniformSampling(1000, 10, 100, seed).node_id(t).tolist()) for t in range(1000)} for seed in (0, 1)]
    assert all(len(samples) == 1000 for samples in drawn)
    assert not drawn[0] & drawn[1]


@pytest.mark.parametrize(("num_nodes", "batch_size", "num_groups"), [(10, 3, 1), (101, 7, 2), (64, 64, 1)])
def test_cover(num_nodes: int, batch_size: int, num_groups: int) -> None:
    from pyg_dist.loader.sampling import UniformSampling

    num_steps = -(-num_nodes // (batch_size * num_groups))
    sampling = UniformSampling(num_nodes, batch_size, num_steps, 0, num_groups, cover=True)
    epochs = [
        [sampling.node_id(epoch * num_steps + t, g) for t in range(num_steps) for g in range(num_groups)]
        for epoch in range(2)
    ]
    for pieces in epochs:
        assert torch.equal(torch.cat(pieces).sort().values, torch.arange(num_nodes))
        assert max(p.numel() for p in pieces) - min(p.numel() for p in pieces) <= 1
        assert max(p.numel() for p in pieces) <= batch_size
    if num_steps > 1:
        assert not all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    smallest = min(range(num_steps * num_groups), key=lambda k: epochs[0][k].numel())
    step, group = divmod(smallest, num_groups)
    pairs = sampling.sample(step, group, rescale=True).pairs
    assert pairs is not None
    assert pairs.table[0, 0].item() == (epochs[0][smallest].numel() - 1) / (num_nodes - 1)


# ---- A batch is PyG's subgraph, rescaled -----------------------------------------------------------------------------


class Case(NamedTuple):
    num_nodes: int
    edges: list[tuple[int, int]]
    owners: list[int]
    batch_size: int
    conv: str
    form: str
    exchange: str
    weights: str  # "none", "constant", "other" (no attribute of the data) or "learned"
    draws: str  # "uniform", "cover", "input" or "plain" (rescale=False)
    seed: int


CONVS: dict[str, Callable[[int], Any]] = {
    "mean": lambda width: SAGEConv(width, 3),
    "sum": lambda width: SAGEConv(width, 3, aggr="sum"),
    "max": lambda width: SAGEConv(width, 3, aggr="max"),
    "gcn": lambda width: GCNConv(width, 3),
    "gcn without loops": lambda width: GCNConv(width, 3, add_self_loops=False),
    "improved gcn": lambda width: GCNConv(width, 3, improved=True),
    "sum gcn": lambda width: GCNConv(width, 3, normalize=False),
    "gat": lambda width: GATConv(width, 3, edge_dim=2),
    "gin": lambda width: GINConv(nn.Linear(width, 3)),
}


@st.composite
def cases(draw: Any, world_size: int) -> Case:
    num_nodes = draw(st.integers(2, 12))
    node = st.integers(0, num_nodes - 1)
    conv = draw(st.sampled_from(sorted(CONVS)))
    takes_weights = "gcn" in conv
    form = draw(st.sampled_from(["edge_index", "edge_index", "adj_t", "weighted adj_t"]))
    if conv in ("gat", "gin", "max"):  # which read the values of an adj_t otherwise than as weights
        form = "edge_index"
    weights = ["none"]
    if takes_weights and form == "edge_index":
        weights = ["none", "constant"] + (["other", "learned"] if conv == "sum gcn" else [])
    return Case(
        num_nodes,
        draw(st.lists(st.tuples(node, node), max_size=40)),
        draw(st.lists(st.integers(0, world_size - 1), min_size=num_nodes, max_size=num_nodes)),
        draw(st.integers(2, num_nodes)),
        conv,
        form,
        draw(st.sampled_from(["hybrid", "post", "pre"])),
        draw(st.sampled_from(weights)),
        draw(st.sampled_from(["uniform", "cover", "input", "plain"])),
        draw(st.integers(0, 3)),
    )


def graph_of(case: Case) -> Data:
    rng = torch.Generator().manual_seed(case.seed)
    edge_index = torch.tensor(case.edges, dtype=torch.int64).view(-1, 2).T.contiguous()
    num_edges = edge_index.shape[1]
    graph = Data(
        x=torch.randn(case.num_nodes, 4, generator=rng, dtype=torch.float64),
        y=torch.randint(0, 3, (case.num_nodes,), generator=rng),
        train_mask=torch.arange(case.num_nodes) % 2 == 0,
    )
    weight = torch.rand(num_edges, generator=rng, dtype=torch.float64) + 0.1
    if case.form == "edge_index":
        graph.edge_index, graph.edge_weight = edge_index, weight
        graph.edge_attr = torch.randn(num_edges, 2, generator=rng, dtype=torch.float64)
    else:
        graph.adj_t = to_torch_csr_tensor(
            edge_index.flip(0), weight if case.form.startswith("weighted") else None, (case.num_nodes, case.num_nodes)
        )
    return graph


def edges_of(graph: Data) -> tuple[Tensor, Tensor | None]:
    """Plain edges and values, those of ``adj_t`` in its own order."""
    if "edge_index" in graph:
        return graph.edge_index, None
    coo = graph.adj_t.to_sparse_coo().coalesce()
    return coo.indices().flip(0), coo.values().double()


def reference(conv: Any, graph: Data, case: Case, ids: Tensor, pairs: Any, x: Tensor, weight: Tensor | None) -> Tensor:
    """The conv on the subgraph: with the matrix of the whole graph, rescaled, where sums of rows are native."""
    edge_index, values = edges_of(graph)
    weight = values if weight is None else weight
    native = case.conv not in ("max", "gat") and pairs is not None
    if not native:
        edges, keep = subgraph(ids, edge_index, relabel_nodes=True, num_nodes=case.num_nodes, return_edge_mask=True)[
            ::2
        ]
        if isinstance(conv, GATConv):
            return conv(x, edges, graph.edge_attr[keep])
        if "adj_t" in graph:
            adj_t = torch.sparse_coo_tensor(edges.flip(0), values[keep], (ids.numel(), ids.numel())).coalesce()
            return conv(x, adj_t.to_sparse_csr())
        return conv(x, edges) if weight is None or not isinstance(conv, GCNConv) else conv(x, edges, weight[keep])
    num_nodes = case.num_nodes
    if isinstance(conv, GCNConv) and conv.normalize:
        loops = 2.0 if conv.improved and (weight is not None or "adj_t" in graph) else 1.0
        if "adj_t" in graph:  # a sparse tensor adds loops beside those that exist
            ones = torch.ones(num_nodes if conv.add_self_loops else 0, dtype=torch.float64)
            node = torch.arange(ones.numel())
            edge_index = torch.cat([edge_index, torch.stack([node, node])], dim=1)
            weight = torch.cat([weight, loops * ones])
            edge_index, weight = gcn_norm(edge_index, weight, num_nodes, False, False, dtype=x.dtype)
        else:
            edge_index, weight = gcn_norm(
                edge_index, weight, num_nodes, conv.improved, conv.add_self_loops, dtype=x.dtype
            )
    elif weight is None or not (isinstance(conv, GCNConv) or "adj_t" in graph):
        weight = torch.ones(edge_index.shape[1], dtype=x.dtype)
    if case.conv == "mean":
        weight = weight / torch.bincount(edge_index[1], minlength=num_nodes).clamp(min=1)[edge_index[1]]
    source, target = edge_index
    matrix = torch.zeros(num_nodes, num_nodes, dtype=x.dtype)
    matrix = matrix.index_put((target, source), weight / pairs.of(source, target), accumulate=True)
    out = matrix[ids][:, ids] @ x
    if isinstance(conv, GCNConv):
        return conv.lin(out) + conv.bias
    if isinstance(conv, GINConv):
        return conv.nn(out + (1 + conv.eps) * x)
    return conv.lin_l(out) + conv.lin_r(x)


def one_step(case: Case) -> str:
    """Compare a step on the second batch: the output, the loss, and every gradient."""
    import pyg_dist
    from pyg_dist.loader import UniformVertexLoader

    graph = graph_of(case)
    learns = case.weights == "learned"
    if learns:
        graph.edge_weight.requires_grad_()
    data = distribute(graph, torch.tensor(case.owners), exchange=case.exchange)
    options = {"cover": {"cover": True}, "input": {"input_nodes": graph.train_mask}, "plain": {"rescale": False}}
    size = max(case.batch_size, 4) if case.draws == "cover" and case.num_nodes >= 4 else case.batch_size
    if case.draws == "cover" and case.num_nodes < 2 * -(-case.num_nodes // size):
        size = case.num_nodes
    loader = quiet(
        lambda: UniformVertexLoader(
            data, size, num_steps=None if case.draws == "cover" else 2, **options.get(case.draws, {})
        )
    )
    sampling = loader.sampling
    embedding = torch.nn.Parameter(torch.linspace(-1, 1, case.num_nodes * 2, dtype=torch.float64).view(-1, 2))
    from pyg_dist.nn import NodeEmbedding

    own = NodeEmbedding(data, 2, dtype=torch.float64)
    own.load_state_dict({"weight": embedding.detach()})
    torch.manual_seed(0)
    conv = CONVS[case.conv](6).double()
    twin = copy.deepcopy(conv)
    distributed = pyg_dist.distribute(conv)
    for step, batch in enumerate(loader):
        sample = sampling.sample(step, 0, loader.rescale)
        ids = sample.node_id
        assert torch.equal(batch.n_id.full_tensor(), ids)
        assert batch.num_nodes == ids.numel()
        assert torch.equal(batch.y.full_tensor(), graph.y[ids])
        plain, _ = edges_of(graph)
        edges, _, keep = subgraph(ids, plain, relabel_nodes=True, num_nodes=case.num_nodes, return_edge_mask=True)
        assert batch.num_edges == edges.shape[1]
        assert torch.equal(batch.e_id.full_tensor(), keep.nonzero().view(-1))
        if "edge_index" in graph:
            assert torch.equal(batch.edge_index.full_tensor(), edges)
            assert torch.equal(batch.edge_attr.full_tensor(), graph.edge_attr[keep])
            assert torch.equal(batch.edge_weight.full_tensor(), graph.edge_weight[keep])
        weight: Any = {"none": None, "constant": batch.get("edge_weight"), "learned": batch.get("edge_weight")}.get(
            case.weights
        )
        if case.weights == "other":
            weight = batch.edge_weight * 1.0
        x = torch.cat([batch.x, own.weight[batch.n_id]], dim=1)
        handle = batch.edge_index if "edge_index" in batch else batch.adj_t
        if case.conv == "gat":
            out = distributed(x, handle, batch.edge_attr)
        elif weight is not None:
            out = distributed(x, handle, weight)
        else:
            out = distributed(x, handle)
        loss = F.cross_entropy(out, batch.y)
        x = torch.cat([graph.x[ids], embedding[ids]], dim=1)
        expected = reference(
            twin, graph, case, ids, sample.pairs, x, None if case.weights == "none" else graph.edge_weight
        )
        expected_loss = F.cross_entropy(expected, graph.y[ids])
        close = {"rtol": 0, "atol": 1e-10}
        torch.testing.assert_close(out.full_tensor(), expected, **close)
        torch.testing.assert_close(loss, expected_loss, **close)
        loss.backward()
        expected_loss.backward()
    for mine, its in zip(conv.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **close)
    torch.testing.assert_close(own.weight.grad.full_tensor(), embedding.grad, **close)
    if learns:
        mine = data.edge_weight.grad
        torch.testing.assert_close(mine.full_tensor(), graph.edge_weight.grad, **close)
    return "same"


NO_EDGES = Case(6, [], [0, 0, 0, 0, 0, 0], 3, "gcn", "edge_index", "hybrid", "none", "uniform", 0)
LOOPS = Case(
    4, [(0, 0), (0, 0), (1, 0), (0, 1), (3, 0), (2, 1), (1, 2)], [0, 0, 0, 0], 3, "gcn", "edge_index", "hybrid",
    "constant", "uniform", 1,
)  # fmt: skip


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_step_is_that_of_one_process(world_size: int, workers: Pools) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases(world_size))
    @example(case=NO_EDGES)
    @example(case=LOOPS)
    def check(case: Case) -> None:
        assert workers(world_size).run(one_step, case) == ["same"] * world_size

    check()


# ---- Unbiased, exactly -----------------------------------------------------------------------------------------------


def mean_over_all_samples(conv_name: str, with_input: bool) -> float:
    """The largest difference to the full aggregation of the mean over all samples that hold a node."""
    import pyg_dist
    from pyg_dist.data.batch import induced, ready
    from pyg_dist.plan.sample import PairProbability, Sample

    graph = random_graph(8, 40)
    data = distribute(graph, torch.arange(8) % pyg_dist.world_size())
    ready(data)
    torch.manual_seed(0)
    conv = {"sage": lambda: SAGEConv(5, 3), "gcn": lambda: GCNConv(5, 3)}[conv_name]().double()
    whole = conv(graph.x, graph.edge_index).detach()
    conv = pyg_dist.distribute(conv)
    is_other = torch.arange(8) >= 3
    pairs = PairProbability.uniform(4, 8)
    if with_input:
        pairs = PairProbability.of_kinds((2, 2), (3, 5), is_other)
    total, count = torch.zeros(8, 3, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
    for chosen in itertools.combinations(range(8), 4):
        ids = torch.tensor(chosen)
        if with_input and int(is_other[ids].sum()) != 2:
            continue
        batch = induced(data, Sample(ids, pairs))
        with torch.no_grad():
            total[ids] += conv(batch.x, batch.edge_index).full_tensor()
        count[ids] += 1
    return float((total / count - whole).abs().max())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("with_input", [False, True])
@pytest.mark.parametrize("conv", ["sage", "gcn"])
def test_unbiased(conv: str, with_input: bool, world_size: int, workers: Pools) -> None:
    assert max(workers(world_size).run(mean_over_all_samples, conv, with_input)) < 1e-12


# ---- No message, and what else batches promise -----------------------------------------------------------------------


def collectives_while_sampling(prefetch: bool) -> list[str]:
    import torch.distributed as dist

    import pyg_dist
    from pyg_dist.backend.comm import group
    from pyg_dist.loader import UniformVertexLoader

    size = pyg_dist.world_size()
    data = distribute(random_graph(50, 400), uneven_parts(50, size))
    loader = quiet(lambda: UniformVertexLoader(data, 11, prefetch=prefetch))
    called: list[str] = []
    real = {}
    for name in dir(dist):
        value = getattr(dist, name)
        if callable(value) and not isinstance(value, type) and not name.startswith(("get_", "is_", "_")):
            real[name] = value
            setattr(dist, name, lambda *a, _name=name, **k: (called.append(_name), real[_name](*a, **k))[1])
    gather, group._all_gather = group._all_gather, lambda *a, **k: (called.append("all_gather"), gather(*a, **k))[1]
    try:
        batches = list(loader)
        if prefetch:
            loader._next._thread.join()
        sampled = list(called)
        batches[0].n_id.full_tensor()
    finally:
        group._all_gather = gather
        for name, value in real.items():
            setattr(dist, name, value)
    assert len(batches) == 5
    assert size == 1 or len(called) > len(sampled), "the spy sees nothing"
    return sampled


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sampling_sends_nothing(world_size: int, prefetch: bool, workers: Pools) -> None:
    assert workers(world_size).run(collectives_while_sampling, prefetch) == [[]] * world_size


def restarted() -> bool:
    from pyg_dist.loader import UniformVertexLoader

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


def input_nodes() -> list[int]:
    from pyg_dist.loader import UniformVertexLoader

    graph = random_graph(60, 200)
    data = distribute(graph, torch.arange(60) % 2)
    loader = UniformVertexLoader(data, 12, input_nodes=data.train_mask)
    number = int(graph.train_mask.sum())
    counts = {int(batch.train_mask.sum()) for batch in loader}
    assert counts == {max(1, round(12 * number / 60))}
    assert {batch.num_nodes for batch in loader} == {12}
    return sorted(counts)


def test_input_nodes(workers: Pools) -> None:
    workers(2).run(input_nodes)


def warned(batch_size: int, mask: list[int]) -> list[str]:
    from pyg_dist.loader import UniformVertexLoader

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


def refusals() -> list[str]:
    import pyg_dist
    from pyg_dist import DistributedData
    from pyg_dist.loader import UniformVertexLoader

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
        lambda: UniformVertexLoader(DistributedData(graph, layout="grid"), 4),
        lambda: DistributedData(graph, mesh={"data": 2, "part": 1}),
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
        "DataError: Expected a DistributedData (got Data)",
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
        "UnsupportedError: Subgraphs and batches of layout='grid'",
        "UnsupportedError: mesh with layout='halo'",
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


def kept_alive() -> tuple[int, int]:
    """Batches alive after their last reference, and threads left."""
    import pyg_dist
    from pyg_dist.loader import UniformVertexLoader

    data = distribute(random_graph(50, 400), uneven_parts(50, pyg_dist.world_size()))
    loader = quiet(lambda: UniformVertexLoader(data, 11))
    model = pyg_dist.distribute(nn.ModuleList([SAGEConv(5, 5), GCNConv(5, 4)])).double()
    graphs: list[Any] = []
    num_threads = torch.get_num_threads()
    gc.collect()
    gc.disable()
    try:
        for batch in loader:
            loss = model[1](model[0](batch.x, batch.edge_index), batch.edge_index).square().mean()
            loss.backward()
            graphs.append(weakref.ref(batch.graph))
            del loss
        del batch
        loader._next.result()
        loader._next = None
        alive = sum(ref() is not None for ref in graphs)
    finally:
        gc.enable()
    assert torch.get_num_threads() == num_threads
    return alive, sum(thread.name.startswith("pyg_dist sampling") for thread in threading.enumerate())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_goes_with_its_last_reference(world_size: int, workers: Pools) -> None:
    assert workers(world_size).run(kept_alive) == [(0, 0)] * world_size


def failing_thread() -> str:
    from pyg_dist.loader import UniformVertexLoader

    def broken(step: int) -> Any:
        raise RuntimeError(f"step {step}")

    data = distribute(random_graph(20, 60), torch.arange(20) % 2)
    loader = quiet(lambda: UniformVertexLoader(data, 4))
    batches = iter(loader)
    next(batches)
    loader._next._thread.join()
    loader._make = broken
    next(batches)
    try:
        next(batches)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_exception_of_the_thread_reaches_next(workers: Pools) -> None:
    assert workers(2).run(failing_thread) == ["step 2", "step 2"]


def random_node_loader() -> bool:
    """PyG's own loader, and subgraphs of subgraphs."""
    import pyg_dist

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
