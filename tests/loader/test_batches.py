"""Steps on batches: those of one process on PyG's subgraphs, rescaled; and unbiased, exactly."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from batch_cases import Case, cases, distribute, one_step
from hypothesis import HealthCheck, example, given, settings
from random_graphs import random_graph
from torch_geometric.nn import GCNConv, SAGEConv
from workers import Pools

import pyg_dist
from pyg_dist.backend import ops
from pyg_dist.backend.session.state import current
from pyg_dist.backend.sparse import csr
from pyg_dist.data.batch import induced, ready
from pyg_dist.graph.sample import PairProbability, Subset
from pyg_dist.loader import UniformVertexLoader

WORLD_SIZES = [1, 3]
MESHES = {
    1: [{"x": 1}],
    2: [{"x": 2}, {"y": 2}, {"z": 2}],
    4: [{"x": 4}, {"y": 4}, {"z": 4}, {"x": 2, "y": 2}, {"x": 2, "z": 2}, {"y": 2, "z": 2}],
}
WITH_GROUPS = {2: [{"data": 2}], 4: [{"data": 2, "x": 2}, {"data": 2, "y": 2}, {"data": 2, "z": 2}, {"data": 4}]}

NO_EDGES = Case(6, [], [0, 0, 0, 0, 0, 0], 3, "gcn", "edge_index", "hybrid", "none", "uniform", 0)
LOOPS = Case(
    4, [(0, 0), (0, 0), (1, 0), (0, 1), (3, 0), (2, 1), (1, 2)], [0, 0, 0, 0], 3, "gcn", "edge_index", "hybrid",
    "constant", "uniform", 1,
)  # fmt: skip


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_step_is_that_of_one_process(world_size: int, workers: Pools) -> None:
    @settings(
        max_examples=8 if world_size == 3 else 3, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=True,
    )  # fmt: skip
    @given(case=cases(world_size))
    @example(case=NO_EDGES)
    @example(case=LOOPS)
    @example(case=LOOPS._replace(conv="gates", weights="none"))
    @example(case=LOOPS._replace(conv="tag"))
    def check(case: Case) -> None:
        assert workers(world_size).run(one_step, case) == ["same"] * world_size

    check()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_on_the_grid_is_that_of_one_process(world_size: int, workers: Pools) -> None:
    @settings(
        max_examples=3 if world_size == 1 else 8, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=True,
    )  # fmt: skip
    @given(case=cases(world_size, MESHES[world_size]))
    @example(case=NO_EDGES._replace(mesh=MESHES[world_size][-1]))
    @example(case=LOOPS._replace(mesh=MESHES[world_size][-1]))
    def check(case: Case) -> None:
        assert workers(world_size).run(one_step, case) == ["same"] * world_size

    check()


HALO_GROUPS = {2: [{"data": 2, "part": 1}], 4: [{"data": 2, "part": 2}]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_several_halo_groups_is_that_of_the_union(world_size: int, workers: Pools) -> None:
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases(world_size // 2, HALO_GROUPS[world_size]))
    @example(case=NO_EDGES._replace(mesh=HALO_GROUPS[world_size][0]))
    @example(case=LOOPS._replace(mesh=HALO_GROUPS[world_size][0]))
    def check(case: Case) -> None:
        assert workers(world_size).run(one_step, case) == ["same"] * world_size

    check()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_of_several_data_groups_is_that_of_the_union(world_size: int, workers: Pools) -> None:
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases(world_size, WITH_GROUPS[world_size]))
    @example(case=NO_EDGES._replace(mesh=WITH_GROUPS[world_size][0]))
    @example(case=LOOPS._replace(mesh=WITH_GROUPS[world_size][0]))
    def check(case: Case) -> None:
        assert workers(world_size).run(one_step, case) == ["same"] * world_size

    check()


def mean_over_all_samples(conv_name: str, draws: str, mesh: dict[str, int] | None = None) -> float:
    """The largest difference to the full aggregation of the mean over all samples that hold a node."""
    graph, with_input = random_graph(6, 30), draws == "input"
    if draws == "loop-free":
        graph = graph.edge_subgraph(graph.edge_index[0] != graph.edge_index[1])
    if mesh is None:
        data = distribute(graph, torch.arange(6) % pyg_dist.world_size())
    else:
        data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
    ready(data)
    torch.manual_seed(0)
    conv = {"sage": lambda: SAGEConv(5, 3), "gcn": lambda: GCNConv(5, 3)}[conv_name]().double()
    whole = conv(graph.x, graph.edge_index).detach()
    conv = pyg_dist.distribute(conv)
    is_other = torch.arange(6) >= 2
    pairs = PairProbability.uniform(4, 6)
    if with_input:
        pairs = PairProbability.of_kinds((2, 2), (2, 4), is_other)
    total, count = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64)
    for chosen in itertools.combinations(range(6), 4):
        ids = torch.tensor(chosen)
        if with_input and int(is_other[ids].sum()) != 2:
            continue
        batch = induced(data, Subset(ids, scale=pairs))
        with torch.no_grad():
            total[ids] += conv(batch.x, batch.edge_index).full_tensor()
        count[ids] += 1
    return float((total / count - whole).abs().max())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("conv", "draws"),
    [("sage", "uniform"), ("sage", "loop-free"), ("sage", "input"), ("gcn", "uniform"), ("gcn", "input")],
)
def test_unbiased(conv: str, draws: str, world_size: int, workers: Pools) -> None:
    assert max(workers(world_size).run(mean_over_all_samples, conv, draws)) < 1e-12


@pytest.mark.parametrize("mesh", [mesh for size in (1, 2) for mesh in MESHES[size]], ids=str)
@pytest.mark.parametrize("conv", ["sage", "gcn"])
def test_unbiased_on_the_grid(conv: str, mesh: dict[str, int], workers: Pools) -> None:
    world_size = max(mesh.values())
    assert max(workers(world_size).run(mean_over_all_samples, conv, "input", mesh)) < 1e-12


def products_of_steps(has_edges_of_its_own: bool) -> list[int]:
    """How many products each of some steps takes: on batches, or on edges that are drawn anew."""
    parts = torch.arange(400) % pyg_dist.world_size()
    data = distribute(random_graph(400, 6000, 8, dtype=torch.float32), parts)
    conv = pyg_dist.distribute(SAGEConv(8, 8))
    batches = iter(UniformVertexLoader(data, batch_size=200, num_steps=7))
    counted = []
    current().add(csr._TrialsBySize())
    with patch.object(csr, "_WORTH_A_TRIAL", 0), patch.object(ops, "spmm_csr", side_effect=ops.spmm_csr) as seen:
        for _ in range(7):
            x, edges = data.x, data.edge_index
            if has_edges_of_its_own:
                edges = torch.randint(0, 400, (2, 3000))
            else:
                batch = next(batches)
                x, edges = batch.x, batch.edge_index
            seen.reset_mock()
            conv(x.detach().clone().requires_grad_(), edges).sum().backward()
            counted.append(seen.call_count)
    return counted


@pytest.mark.parametrize("has_edges_of_its_own", [False, True])
def test_steps_do_not_repeat_trials(workers: Pools, has_edges_of_its_own: bool) -> None:
    """Each step has patterns of its own; which form of a product is faster is tried in the first ones."""
    for counted in workers(2).run(products_of_steps, has_edges_of_its_own):
        assert counted[0] > 9 > max(counted[-2:]), counted
