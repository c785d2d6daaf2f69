"""Parts for the hybrid exchange: rounds never send more, and what does not go together is refused."""

from __future__ import annotations

import math
import multiprocessing.spawn
import os
import signal
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pymetis
import pytest
import torch
from graphs import load_npz
from limits import COMMAND_SECONDS
from random_graphs import random_graph
from torch import Tensor

from pyg_dist.errors import DataError, OptionError
from pyg_dist.halo.plan.levels import LevelCounts
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.sizes import renumbered
from pyg_dist.partition import Batches
from pyg_dist.partition.hypergraph import build_cover_model, choice_by_degree
from pyg_dist.partition.metis import build_graph_model
from pyg_dist.plan import budget as budget_module
from pyg_dist.plan import parts as parts_module
from pyg_dist.plan.budget import solve_within
from pyg_dist.plan.parts import PartsOptions, covered, find_parts, refine, solve
from pyg_dist.pricing.machine import Machine


def test_a_round_never_sends_more() -> None:
    """A ring in four arcs, one node in six on a wrong rank: rounds put them back."""
    num_nodes, rng = 240, torch.Generator().manual_seed(0)
    node = torch.arange(num_nodes)
    edge_index = torch.cat([torch.stack([node, (node + step) % num_nodes]) for step in range(1, 5)], 1)
    parts = node // 60
    moved = torch.randperm(num_nodes, generator=rng)[:40]
    parts[moved] = parts[moved[torch.randperm(40, generator=rng)]]
    start = covered(edge_index, parts, 4, choice_by_degree(edge_index, num_nodes))
    rows: list[int] = []

    def report(step: str, parts: Tensor) -> None:
        rows.append(Plan.of(edge_index, parts, 4).rows["hybrid"])

    found = refine(edge_index, start, 4, PartsOptions("cover"), None, report)
    assert rows == sorted(rows, reverse=True)
    assert found.rows == rows[-1] < start.rows
    assert found.rows == Plan.of(edge_index, found.parts, 4).rows["hybrid"]


def test_the_model_of_the_cover_s_choice_is_the_plan() -> None:
    for seed in range(5):
        edge_index = random_graph(60, 400, seed=seed).edge_index
        parts = torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(seed))
        first = covered(edge_index, parts, 5, choice_by_degree(edge_index, 60))
        model = build_cover_model(edge_index, 60, first.is_post)
        assert model.connectivity(parts.numpy()) == first.rows == Plan.of(edge_index, parts, 5).rows["hybrid"]


def test_a_local_edge_follows_the_net_that_reaches_more() -> None:
    """Row 0 goes to two parts; so the edge 0 -> 1 is post, and 2 -> 1, where neither end reaches any, stays."""
    edge_index = torch.tensor([[0, 0, 0, 2], [1, 3, 4, 1]])
    parts = torch.tensor([0, 0, 0, 1, 2])
    for stays in (False, True):
        is_post = torch.tensor([False, True, True, stays]).numpy()
        # Rows 0 to parts 1 and 2, or sums of 3 and 4: as many. The rank with fewer in-edges multiplies.
        found = covered(edge_index, parts, 3, is_post)
        assert found.rows == 2
        assert found.is_post.tolist() == [True, True, True, stays]


def test_cover_sends_fewer_hybrid_rows_than_metis(shared_data: Path) -> None:
    data = load_npz(shared_data / "cora.npz")
    rows = {
        method: Plan.of(data.edge_index, solve(data.edge_index, data.num_nodes, 8, PartsOptions(method)), 8).rows
        for method in ("metis", "cover")
    }
    assert rows["cover"]["hybrid"] < rows["metis"]["hybrid"]


@pytest.mark.parametrize(("num_parts", "share"), [(2, 0.9), (8, 1.0)])
def test_metis_cover_saves_rows_where_there_are_hubs(num_parts: int, share: float) -> None:
    """Against METIS; edges and nodes together are about as balanced, each edge where it is multiplied."""
    num_nodes = 3000
    ends = num_nodes * torch.rand(2, 40_000, generator=torch.Generator().manual_seed(0)) ** 3
    edge_index = torch.cat([ends.long(), ends.long().flip(0)], 1)
    plans = [
        Plan.of(edge_index, solve(edge_index, num_nodes, num_parts, PartsOptions(method)), num_parts)
        for method in ("metis-cover", "metis")
    ]
    rows = [plan.rows["hybrid"] for plan in plans]
    assert rows[0] < share * rows[1]
    mean = edge_index.shape[1] / num_nodes
    heaviest = [max(s.work - s.rows_sent - s.rows_received + mean * s.nodes for s in plan.sizes) for plan in plans]
    assert heaviest[0] <= 1.1 * heaviest[1]


@pytest.mark.slow
def test_metis_takes_parts_for_sums_where_ranks_share_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows cross, the step costs no more, and in-edges at most double; in one level parts are those of before."""
    num_nodes = 1000
    ends = num_nodes * torch.rand(2, 12_000, generator=torch.Generator().manual_seed(0)) ** 3
    edge_index = torch.cat([ends.long(), ends.long().flip(0)], 1)
    slow = Machine(inter_bandwidth=25e6)
    wanted = PartsOptions(ranks_per_node=2, machine=slow)
    found_by: list[str] = []
    found = find_parts(edge_index, num_nodes, 4, wanted, report=lambda name, _: found_by.append(name))
    assert torch.equal(found, find_parts(edge_index, num_nodes, 4, wanted))
    monkeypatch.setattr(parts_module, "_MOST_IN_EDGES", 0.0)
    metis = find_parts(edge_index, num_nodes, 4, wanted, report=lambda name, _: found_by.append(name))
    assert found_by == ["metis-cover"]
    plans = [Plan.of(edge_index, parts, 4, ranks_per_node=2, machine=slow) for parts in (found, metis)]
    assert plans[0].rows_between_nodes() < plans[1].rows_between_nodes()
    assert plans[0].price(machine=slow).seconds <= plans[1].price(machine=slow).seconds
    most = [max(size.edges for size in plan.sizes) for plan in plans]
    assert most[0] <= 2 * most[1]
    monkeypatch.undo()
    monkeypatch.setattr(parts_module, "_for_sums", None)
    for one_level in ({"hierarchy": "off"}, {"exchange": "post"}, {"ranks_per_node": 4}):
        find_parts(edge_index, num_nodes, 4, PartsOptions(**({"ranks_per_node": 2} | one_level)))


@pytest.mark.parametrize("method", ["cover", "metis-cover"])
@pytest.mark.parametrize(("num_nodes", "num_parts"), [(1, 1), (3, 5), (40, 4)])
def test_cover_of_awkward_graphs(method: str, num_nodes: int, num_parts: int) -> None:
    """One part, more parts than nodes, no edges, loops alone."""
    loops = torch.arange(num_nodes).repeat(2, 1)
    for edge_index in (torch.empty(2, 0, dtype=torch.long), loops):
        parts = find_parts(edge_index, num_nodes, num_parts, PartsOptions(method, ranks_per_node=2))
        assert parts.unique().numel() == min(num_nodes, num_parts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "cover", "exchange": "post"}, "exchange='hybrid' with partition='cover'.*'hypergraph'"),
        ({"method": "metis-cover", "exchange": "pre"}, "partition='metis-cover' .got 'pre'"),
        ({"method": "cover", "solver": "kahypar"}, "solver='mt-kahypar' with partition='cover'"),
        ({"method": "covers"}, "metis, .*cover.*'covers'"),
        ({"epsilon": -0.1}, "epsilon.*-0.1"),
        ({"method": "cover", "preset": "fast"}, "preset"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        PartsOptions(**options)
    assert "\n" not in str(caught.value)


def test_given_parts_stay_on_their_ranks() -> None:
    graph = random_graph(40, 300, seed=1)
    given = torch.arange(40) % 4
    assert torch.equal(find_parts(graph.edge_index, 40, 4, PartsOptions(given, ranks_per_node=2)).long(), given)


class Kept(list[Any]):
    """The end of a pipe on the side of the process that solves; full after the start and three results."""

    def send(self, parts: Any) -> None:
        self.append(parts)
        if len(self) == 4:
            raise BrokenPipeError


def test_each_seed_s_parts_are_sent_if_none_before_was_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "count", lambda first: range(first, first + 100))
    graph, kept, options = random_graph(300, 3000, seed=1), Kept(), PartsOptions("metis-cut")
    with pytest.raises(BrokenPipeError):
        budget_module._solve(kept, graph.edge_index.numpy(), 300, 4, options, None)  # type: ignore[arg-type]
    start, *found = kept
    assert start is None
    assert found[0].tolist() == solve(graph.edge_index, 300, 4, options).tolist()
    rows = [Plan.of(graph.edge_index, torch.from_numpy(parts), 4).rows["hybrid"] for parts in found]
    assert rows[0] > rows[1] > rows[2]


class UntilTheFirst:
    """A clock that stands still until the process has started and has found parts; then the time is up."""

    def __init__(self) -> None:
        self.asked = 0

    def monotonic(self) -> float:
        self.asked += 1
        return 0.0 if self.asked < 5 else math.inf


@pytest.mark.slow
def test_seeds_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until then counts; the process answers with the solver's own error."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(forked_python.executable()))
    graph = random_graph(300, 3000, seed=1)
    options = PartsOptions("metis-cut")
    first = Plan.of(graph.edge_index, solve(graph.edge_index, 300, 4, options), 4).rows["hybrid"]
    small = random_graph(40, 200).edge_index
    with monkeypatch.context() as patch:
        patch.setattr(budget_module, "time", UntilTheFirst())
        best = solve_within(COMMAND_SECONDS, graph.edge_index, 300, 4, options)
        patch.setattr(budget_module, "time", UntilTheFirst())
        found = solve_within(COMMAND_SECONDS, small, 40, 4, PartsOptions("stochastic"))
    assert Plan.of(graph.edge_index, best, 4).rows["hybrid"] <= first
    assert found.unique().numel() == 4
    with pytest.raises(DataError, match="train_mask"):
        solve_within(COMMAND_SECONDS, graph.edge_index, 300, 4, options, torch.ones(7, dtype=torch.bool))
    with pytest.raises(OptionError, match=r"within 1e-09 s .it did not."):
        solve_within(1e-9, *large(), 8, PartsOptions("hypergraph"))
    for wrong, seconds in ((options, 0.0), (PartsOptions(torch.zeros(300)), 1.0)):
        with pytest.raises(OptionError, match="time budget above 0"):
            solve_within(seconds, graph.edge_index, 300, 4, wrong)
    drawn = PartsOptions("stochastic", batches=Batches(draw=lambda seed, step: [0]))
    with pytest.raises(OptionError, match="a callable"):
        solve_within(1.0, graph.edge_index, 300, 4, drawn)
    monkeypatch.setattr(budget_module, "_solve", crash)
    with pytest.raises(OptionError, match="its process ended with -11"):
        solve_within(COMMAND_SECONDS, graph.edge_index, 300, 4, options)


def crash(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def large() -> tuple[Tensor, int]:
    """A graph that no solver partitions at once."""
    return torch.randint(20_000, (2, 400_000), generator=torch.Generator().manual_seed(0)), 20_000


def rows_across(edge_index: Tensor, parts: Tensor, num_ranks: int, on_each: int, two_levels: bool) -> int:
    across = LevelCounts.of(edge_index, parts, num_ranks, on_each).across
    assert across is not None
    return across[two_levels]


@pytest.mark.parametrize("name", ["cora", pytest.param("pubmed", marks=pytest.mark.slow)])
def test_fewer_rows_cross_than_with_plain_metis(shared_data: Any, name: str) -> None:
    """Of 8 ranks on 2 machines; METIS' plain parts have as many nodes each, and up to 2.8 times the mean's edges."""
    graph = load_npz(shared_data / f"{name}.npz")
    edge_index, model = graph.edge_index, build_graph_model(graph.edge_index, graph.num_nodes)
    adjacency = pymetis.CSRAdjacency(model.start.astype(np.int64), model.neighbor.astype(np.int64))
    plain = torch.tensor(pymetis.part_graph(8, adjacency)[1])
    found = find_parts(edge_index, graph.num_nodes, 8, PartsOptions("metis", ranks_per_node=4), graph.train_mask)
    both = found, renumbered(edge_index, plain, 8, 4, "hybrid")
    crossing = [rows_across(edge_index, parts, 8, 4, two_levels=True) for parts in both]
    assert crossing[0] <= crossing[1]


@pytest.mark.parametrize(
    ("method", "two_levels"),
    [
        ("metis", False),
        ("metis", True),
        pytest.param("metis-cover", True, marks=pytest.mark.slow),
        pytest.param("cover", True, marks=pytest.mark.slow),
    ],
)
def test_machines_first_where_fewer_rows_cross(shared_data: Any, method: str, two_levels: bool) -> None:
    """Never more than with the parts that are found at once; on a graph with communities fewer."""
    graph = load_npz(shared_data / "cora.npz")
    options = PartsOptions(
        method,
        preset="deterministic" if method == "cover" else None,
        ranks_per_node=4,
        hierarchy="auto" if two_levels else "off",
    )
    found = find_parts(graph.edge_index, graph.num_nodes, 16, options)
    at_once = solve(graph.edge_index, graph.num_nodes, 16, options)
    placed = renumbered(graph.edge_index, at_once, 16, 4, "hybrid")
    crossing = [rows_across(graph.edge_index, parts, 16, 4, two_levels=two_levels) for parts in (found, placed)]
    assert crossing[0] <= crossing[1] - two_levels
    assert found.bincount(minlength=16).min() > 0
    plans = [
        Plan.of(graph.edge_index, parts, 16, ranks_per_node=4, hierarchy="on" if two_levels else "off")
        for parts in (found, placed)
    ]
    mean = graph.num_edges / graph.num_nodes
    load = [max(s.edges if method == "metis" else s.work + mean * s.nodes for s in plan.sizes) for plan in plans]
    takes_parts_for_sums = method == "metis" and two_levels
    assert load[0] <= (2.0 if takes_parts_for_sums else 1.05) * load[1]
