"""Neighbours drawn hop by hop, several steps at once: each step's own, and each step's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from batch_cases import laid_out
from launching import run_script
from neighbor_cases import N
from random_graphs import random_graph
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph
from workers import Pools, WorkersError, on_ranks

import pyg_dist
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.errors import DataError
from pyg_dist.loader import NeighborLoader, neighbors


@pytest.mark.parametrize("num_neighbors", [[200], [-1, -1], [200, 200], [200, 200, 200]])
def test_a_fan_out_over_every_degree_gives_the_k_hop_subgraph(num_neighbors: list[int]) -> None:
    """Edge for edge, with node k of the batch at its distance from the seeds; or with all edges between its nodes."""
    graph, num_hops = random_graph(60, 200), len(num_neighbors)
    for batch in NeighborLoader(graph, num_neighbors, batch_size=3, subgraph_type="directional"):
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
    for batch in NeighborLoader(graph, num_neighbors, batch_size=3, subgraph_type="induced"):
        nodes, _, _, mask = k_hop_subgraph(batch.n_id[: batch.batch_size], num_hops, graph.edge_index, num_nodes=60)
        assert torch.equal(batch.n_id.sort().values, nodes)
        assert torch.equal(batch.e_id.sort().values, mask.nonzero().view(-1))


def test_edges_are_ordered_by_hop() -> None:
    """So that PyG's own trimming of hops changes nothing for the seeds."""
    from torch_geometric.nn import GraphSAGE

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


@on_ranks(1, 2)
def test_steps_that_are_drawn_at_once(world_size: int) -> None:
    """Small batches of several ranks share messages, more steps each time; large ones and one rank's do not."""
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


def an_error_of_a_later_step() -> int:
    """How many batches there are before one whose edge has no opposite."""
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
