"""Batches of neighbours: of several data groups, of stores and after a restart."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from batch_cases import laid_out
from launching import run_script
from random_graphs import random_graph, uneven_parts
from test_neighbor_loader import N, graph_of, loader_of, model, step, whole_of
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph
from workers import Workers, WorkersError

Pools = Callable[[int], Workers]
GROUPS: list[list[tuple[int, dict[str, int]]]] = [
    [(2, {"data": 2, "part": 1}), (4, {"data": 2, "x": 2})],
    [(4, {"data": 2, "part": 2}), (2, {"data": 2})],
]  # whose batches are the same


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_a_fan_out_over_every_degree_gives_the_k_hop_subgraph(num_hops: int) -> None:
    """Edge for edge, with node k of the batch at its distance from the seeds."""
    from pyg_dist.loader import NeighborLoader

    graph = random_graph(60, 200)
    for batch in NeighborLoader(graph, [200] * num_hops, batch_size=3, subgraph_type="directional"):
        seeds = batch.n_id[: batch.batch_size]
        before, first = seeds.sort().values, 0
        for hop in range(num_hops + 1):
            nodes, *_ = k_hop_subgraph(seeds, hop, graph.edge_index, num_nodes=60)
            count = batch.num_sampled_nodes[hop]
            new = nodes[~torch.isin(nodes, before)] if hop else before
            assert torch.equal(batch.n_id[first : first + count].sort().values, new)
            first, before = first + count, nodes
        inner, *_ = k_hop_subgraph(seeds, num_hops - 1, graph.edge_index, num_nodes=60)
        assert torch.equal(batch.e_id.sort().values, torch.isin(graph.edge_index[1], inner).nonzero().view(-1))
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])


# ---- Several data groups ------------------------------------------------------------------------


def trained_in_groups(name: str, mesh: dict[str, int], steps: int) -> list[tuple[Any, ...]]:
    """Facts of batches; their losses are those of stock PyG on the same edges, step after step."""
    import pyg_dist
    from pyg_dist.loader import NeighborLoader

    graph = graph_of(name)
    data, twin = laid_out(graph, mesh), model()
    convs = pyg_dist.distribute(copy.deepcopy(twin))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (convs, twin)]
    found, loader = [], loader_of(data, name)
    assert isinstance(loader, NeighborLoader)
    for _, batch in zip(range(steps), loader, strict=False):
        n_id, e_id, edge_index = (whole_of(batch[key]) for key in ("n_id", "e_id", "edge_index"))
        assert torch.equal(n_id[edge_index], graph.edge_index[:, e_id])
        assert torch.equal(n_id[: batch.batch_size], batch.input_id)
        assert sum(batch.num_sampled_nodes) == n_id.numel() == batch.num_nodes
        plain = Data(x=graph.x[n_id], y=graph.y[n_id], edge_index=edge_index, batch_size=batch.batch_size)
        plain.edge_attr, plain.edge_weight = graph.edge_attr[e_id], graph.edge_weight[e_id]
        losses = [step(m, b) for m, b in ((convs, batch), (twin, plain))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0].item(), losses[1].item(), rtol=0, atol=1e-10)
        trees = whole_of(batch.batch).tolist() if "disjoint" in name else None
        found.append((n_id.tolist(), e_id.tolist(), edge_index.tolist(), batch.num_sampled_nodes, trees))
    return found


@pytest.mark.parametrize(("name", "turn"), [("directional", 0), ("induced", 1), ("disjoint", 1), ("replace", 0)])
def test_a_batch_of_data_groups_is_the_union_of_theirs(name: str, turn: int, workers: Pools) -> None:
    runs = [found for size, mesh in GROUPS[turn] for found in workers(size).run(trained_in_groups, name, mesh, 3)]
    assert all(found == runs[0] for found in runs)
    for n_id, _, edge_index, counts, _ in runs[0]:
        edges = torch.tensor(edge_index).view(2, -1)
        group = torch.zeros(len(n_id), dtype=torch.int64)  # by which seeds a node is reached
        group[-(-counts[0] // 2) : counts[0]] = 1
        for _ in range(4):
            group.scatter_reduce_(0, edges[0], group[edges[1]], "amax")
        assert torch.equal(group[edges[0]], group[edges[1]])
        assert int(group[: counts[0]].sum()) == counts[0] // 2
        if name != "disjoint" and counts[0] > 1:
            repeated = Counter(zip(n_id, group.tolist(), strict=True))
            assert max(repeated.values()) == 1


def test_four_ranks(workers: Pools) -> None:
    from test_neighbor_loader import trained

    (stock,) = workers(1).run(trained, "directional", "stock")
    for found in workers(4).run(trained, "directional", {"x": 2, "y": 2}):
        assert [batch[:-1] for batch in found] == [batch[:-1] for batch in stock]
        torch.testing.assert_close([b[-1] for b in found], [b[-1] for b in stock], rtol=0, atol=1e-10)


def link_facts(mesh: dict[str, int], negatives: Any) -> list[Any]:
    from pyg_dist.loader import LinkNeighborLoader

    graph = random_graph(N, 150)
    found = []
    loader = LinkNeighborLoader(laid_out(graph, mesh), [3, 2], batch_size=20, shuffle=True, neg_sampling=negatives)
    for batch in loader:
        n_id, edges = whole_of(batch.n_id), graph.edge_index[:, batch.input_id]
        if negatives == "binary":
            assert torch.equal(n_id[batch.edge_label_index][:, batch.edge_label == 1], edges)
            ends = [batch.edge_label_index]
        else:
            assert torch.equal(n_id[torch.stack([batch.src_index, batch.dst_pos_index])], edges)
            ends = [batch.src_index, batch.dst_pos_index, batch.dst_neg_index]
        found.append((n_id.tolist(), [end.tolist() for end in ends]))
    return found


@pytest.mark.parametrize(("negatives", "turn"), [("binary", 0), ("triplet", 1)])
def test_links_of_data_groups(negatives: str, turn: int, workers: Pools) -> None:
    runs = [found for size, mesh in GROUPS[turn] for found in workers(size).run(link_facts, mesh, negatives)]
    assert all(found == runs[0] for found in runs)
    assert len(runs[0]) == 4


def disjoint_links(mesh: dict[str, int] | str | None, negatives: str) -> list[Any]:
    """As PyG's: each end has a tree, and a tree's number is that of its edge."""
    from pyg_dist.loader import LinkNeighborLoader

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


# ---- Other ways to a batch ----------------------------------------------------------------------


def continued(mesh: dict[str, int] | None, state: Any, num_steps: int, path: str | None = None) -> Any:
    """Facts and losses of some steps after a state, and the state then."""
    import pyg_dist

    data: Any = laid_out(graph_of("directional"), mesh) if path is None else pyg_dist.DistributedData.open(path)
    loader, convs = loader_of(data, "directional"), pyg_dist.distribute(model())
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.1)
    if state is not None:
        loader.load_state_dict(state[0])
        convs.load_state_dict(state[1])
    found: list[tuple[Any, ...]] = []
    while len(found) < num_steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = step(convs, batch)
            loss.backward()
            optimizer.step()
            found.append((*(whole_of(batch[key]).tolist() for key in ("n_id", "e_id", "edge_index")), loss.item()))
            if len(found) == num_steps:
                break
    return found, (loader.state_dict(), {key: value.detach().clone() for key, value in convs.state_dict().items()})


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [batch[:-1] for batch in found] == [batch[:-1] for batch in expected]
    torch.testing.assert_close([b[-1] for b in found], [b[-1] for b in expected], rtol=0, atol=1e-10)


def test_a_state_continues_on_any_number_of_ranks(workers: Pools) -> None:
    """At each step of an epoch and after it."""
    whole, _ = workers(1).run(continued, None, None, 5)[0]
    state, done = None, 0
    for size, mesh in ((1, None), (2, None), (3, None), (2, {"x": 2}), (4, None)):
        results = workers(size).run(continued, mesh, state, 1)
        for found, _ in results:
            assert_same(found, whole[done : done + 1])
        state, done = results[0][1], done + 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_of_a_store(world_size: int, workers: Pools, tmp_path: Path) -> None:
    from pyg_dist import save_graph
    from pyg_dist.cli.conversion import StoreOptions, write_halo_store
    from pyg_dist.store.sources import open_source

    whole, _ = workers(1).run(continued, None, None, 3)[0]
    save_graph(graph_of("directional"), tmp_path / "graph.safetensors")
    np.save(tmp_path / "parts.npy", uneven_parts(N, world_size).numpy())
    options = StoreOptions(parts=world_size, method=str(tmp_path / "parts.npy"))
    write_halo_store(open_source(str(tmp_path / "graph.safetensors")), tmp_path / "store", options)
    for found, _ in workers(world_size).run(continued, None, None, 3, str(tmp_path / "store")):
        assert_same(found, whole)


def test_batches_of_a_grid_store(workers: Pools, tmp_path: Path) -> None:
    from pyg_dist import save_graph
    from pyg_dist.cli.conversion import StoreOptions, write_grid_store
    from pyg_dist.store.sources import open_source

    whole, _ = workers(1).run(continued, None, None, 3)[0]
    save_graph(graph_of("directional"), tmp_path / "graph.safetensors")
    source, options = open_source(str(tmp_path / "graph.safetensors")), StoreOptions(parts=2)
    write_grid_store(source, tmp_path / "store", options, (2, 2), {"x": 2})
    for found, _ in workers(2).run(continued, None, None, 3, str(tmp_path / "store")):
        assert_same(found, whole)


# ---- As with PyG's loaders ----------------------------------------------------------------------


def test_edges_are_ordered_by_hop() -> None:
    """So that PyG's own trimming of hops changes nothing for the seeds."""
    from torch_geometric.nn import GraphSAGE

    from pyg_dist.loader import NeighborLoader

    graph = random_graph(N, 150)
    torch.manual_seed(0)
    trimmed = GraphSAGE(5, 8, 3, 4).double()
    for replace in (False, True):
        for batch in NeighborLoader(graph, [3, 2, 2], batch_size=6, replace=replace):
            nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
            hop = torch.repeat_interleave(torch.arange(3), torch.tensor(edges))
            of_node = torch.repeat_interleave(torch.arange(4), torch.tensor(nodes))
            assert torch.equal(of_node[batch.edge_index[1]], hop)
            assert bool((of_node[batch.edge_index[0]] <= hop + 1).all())
            whole = trimmed(batch.x, batch.edge_index)
            some = trimmed(batch.x, batch.edge_index, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=edges)
            torch.testing.assert_close(some[: batch.batch_size], whole[: batch.batch_size], rtol=0, atol=1e-12)


def windows(world_size: int) -> None:
    """Small batches of several ranks share messages, more steps each time; large ones and one rank's do not."""
    from pyg_dist.backend.comm.ids import IdLists
    from pyg_dist.loader import NeighborLoader

    data = laid_out(random_graph(41, 150), None)

    def sampler_of(counts: list[int], size: int, **options: Any) -> Any:
        return NeighborLoader(data, counts, batch_size=size, shuffle=True, **options).sampler

    small, *others = sampler_of([3, 2], 5), sampler_of([900, 200], 20), sampler_of([-1, 0], 5)
    others.append(sampler_of([3, 2], 5, subgraph_type="induced"))
    assert [small.window, *(other.window for other in others)] == [8 if world_size > 1 else 1, 1, 1, 1]

    def calls_of(steps: list[int]) -> int:
        with patch.object(IdLists, "exchange", autospec=True, side_effect=IdLists.exchange) as exchange:
            drawn.extend(small.sample(step) for step in steps)
        return exchange.call_count // 3

    drawn: list[Any] = []
    expected = [1, 1, 0, 1, 0, 0, 0, 1] if world_size > 1 else [0] * 8
    assert [calls_of([step]) for step in range(8)] == expected  # 0, 1 and 2, 3 to 6, 7 to 14
    assert calls_of([*range(8, 15)]) == 0
    assert calls_of([15, 2, 3, 4, 20, 16]) == (5 if world_size > 1 else 0)  # a restart and a jump, and back
    assert drawn[16].node_id.tolist() == drawn[2].node_id.tolist()
    drawn[2].attributes["batch_size"] = 0
    assert drawn[16].attributes["batch_size"] == 5


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_that_are_drawn_at_once(world_size: int, workers: Pools) -> None:
    workers(world_size).run(windows, world_size)


def an_error_of_a_later_step() -> int:
    """How many batches there are before one whose edge has no opposite."""
    from pyg_dist.errors import DataError
    from pyg_dist.loader import NeighborLoader

    path = torch.stack([torch.arange(39), torch.arange(1, 40)])
    edge_index = torch.cat([path, path.flip(0)[:, :-1]], 1)
    graph = Data(edge_index=edge_index, x=torch.ones(40, 2), num_nodes=40)
    found: list[Any] = []
    with pytest.raises(DataError, match="bidirectional"):
        found += NeighborLoader(laid_out(graph, None), [2], batch_size=4, subgraph_type="bidirectional")
    return len(found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_comes_with_its_step(world_size: int, workers: Pools) -> None:
    assert workers(world_size).run(an_error_of_a_later_step) == [9] * world_size


def out_of_memory_ahead() -> None:
    """One rank fails while a thread draws what is ahead: its error is told, and nobody waits for it for ever."""
    import pyg_dist
    from pyg_dist.loader import NeighborLoader, neighbors

    data, drawn = laid_out(random_graph(41, 150), None), neighbors._Batch._in_edges

    def fails(batch: Any, code: Any, key: Any, hop: int) -> Any:
        if pyg_dist.rank() == 1 and batch.step == 5 and hop == 1:
            raise MemoryError("of step 5")
        return drawn(batch, code, key, hop)

    with patch.object(neighbors._Batch, "_in_edges", fails):
        for _ in NeighborLoader(data, [3, 2], batch_size=2, shuffle=True):
            pass


def test_a_rank_that_fails_ahead(workers: Pools) -> None:
    with pytest.raises(WorkersError, match="of step 5"):
        workers(2).run(out_of_memory_ahead)


def inferred(mesh: dict[str, int] | None) -> None:
    """Layer-wise inference over subgraph loaders, as PyG's examples do it, and `model(data)`: equal."""
    from torch_geometric.nn import GraphSAGE

    import pyg_dist
    from pyg_dist.loader import NeighborLoader

    graph = random_graph(N, 150)
    torch.manual_seed(0)
    twin = GraphSAGE(5, 8, 2, 4).double().eval()
    model, data = pyg_dist.distribute(copy.deepcopy(twin)).eval(), laid_out(graph, mesh)
    with torch.no_grad():
        whole = twin(graph.x, graph.edge_index)
        torch.testing.assert_close(model(data.x, data.edge_index).full_tensor(), whole, rtol=0, atol=1e-10)
        loader = NeighborLoader(copy.copy(data), [-1], batch_size=16)
        del loader.data.x
        x = data.x
        for k, conv in enumerate(model.convs):
            found = []
            for batch in loader:
                h = conv(x[batch.n_id], batch.edge_index)
                found.append((h.relu() if k == 0 else h)[: batch.batch_size])
            x = torch.cat(found)
        assert torch.equal(x.argmax(1)[data.train_mask].full_tensor(), whole.argmax(1)[graph.train_mask])
        x = x.full_tensor()
        torch.testing.assert_close(x, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("world_size", "mesh"), [(1, None), (2, None), (2, {"x": 2})])
def test_layer_wise_inference(world_size: int, mesh: dict[str, int] | None, workers: Pools) -> None:
    workers(world_size).run(inferred, mesh)


def trimmed_on_ranks() -> str:
    from torch_geometric.nn import GraphSAGE

    import pyg_dist
    from pyg_dist.loader import NeighborLoader

    model = pyg_dist.distribute(GraphSAGE(5, 8, 2, 4).double())
    batch = next(iter(NeighborLoader(laid_out(random_graph(N, 150), None), [3, 2], batch_size=6)))
    try:
        model(
            batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_trimming_on_ranks(workers: Pools) -> None:
    for message in workers(2).run(trimmed_on_ranks):
        assert "leave out num_sampled" in message, message
        assert "\n" not in message


DIVERGING = """
import pyg_dist
from batch_cases import laid_out
from launching import run_script
from random_graphs import random_graph
from pyg_dist.loader import NeighborLoader

data = laid_out(random_graph(41, 150), None)
batches = iter(NeighborLoader(data, [3, 2], batch_size=6))
next(batches)
if pyg_dist.rank():
    next(batches)
print(data.x.sum().item())
"""


def test_a_rank_that_draws_another_batch_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[1]}")
    script = tmp_path / "diverging.py"
    script.write_text(DIVERGING)
    ended = run_script("ranks", 2, script)
    assert all(ended.codes), ended.stdout + ended.stderr
    assert "mini-batch" in ended.stderr
    assert "Expected the same calls on every rank" in ended.stderr


def test_arguments_stand_where_those_of_pyg_do() -> None:
    from pyg_dist.errors import OptionError
    from pyg_dist.loader import LinkNeighborLoader, NeighborLoader

    graph, transform = random_graph(N, 150), lambda batch: batch.num_nodes
    graph.weight = graph.edge_weight.abs()
    more = (None, True, "induced", True, "uniform", None, "weight", transform)
    loader = NeighborLoader(graph, [3, 2], graph.train_mask, *more)
    assert (loader.sampler.replace, loader.sampler.subgraph_type, loader.sampler.disjoint) == (True, "induced", True)
    assert all(edges.weight is not None for edges in loader.sampler.in_edges.values())
    assert loader.transform is transform
    links = LinkNeighborLoader(
        graph, [2], graph.edge_index, None, None, True, "directional", False, "uniform", "triplet"
    )
    assert links.sampler.seeds.negatives.mode == "triplet"  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"at most 16 positional arguments \(got 43\)"):
        NeighborLoader(graph, [2], *range(41))


def test_batches_of_mapped_features_and_of_edges_in_32_bits(tmp_path: Path) -> None:
    """As PyG's tests have them."""
    from pyg_dist.loader import NeighborLoader

    x = np.random.default_rng(0).standard_normal((N, 3))
    np.save(tmp_path / "x.npy", x)
    graph = Data(x=np.load(tmp_path / "x.npy", mmap_mode="r"), edge_index=random_graph(N, 150).edge_index.int())
    for batch in NeighborLoader(graph, [3, 2], batch_size=7):
        assert torch.equal(batch.x, torch.from_numpy(x)[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
