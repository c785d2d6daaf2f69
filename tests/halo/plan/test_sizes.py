"""Parts with much traffic share a node; never more rows leave a node than with the given order."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData
from pyg_dist.backend.session import session
from pyg_dist.cli import main
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.sizes import rank_of_part, renumbered, rows_across
from pyg_dist.partition import partition
from pyg_dist.pricing.machine import Machine


def by_rank(rows: Tensor, rank: Tensor) -> Tensor:
    part = torch.argsort(rank)
    return rows[part][:, part]


def communities(num_parts: int, size: int = 12) -> tuple[Data, Tensor]:
    """Part p has many edges with part p + P/2, and a few with all: in the given order, all heavy pairs are split."""
    rng = torch.Generator().manual_seed(0)
    parts = torch.arange(num_parts).repeat_interleave(size)
    graph = random_graph(num_parts * size, 40)
    source = torch.arange(num_parts * size).repeat(4)
    target = (parts[source] + num_parts // 2) % num_parts * size + torch.randint(size, source.shape, generator=rng)
    graph.edge_index = torch.cat([graph.edge_index, torch.stack([source, target])], 1)
    del graph.edge_attr, graph.edge_weight
    return graph, parts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 13), st.integers(1, 14), st.integers(0, 10**6), st.sampled_from([1, 4, 1000]))
def test_a_permutation_that_is_never_worse(num_ranks: int, ranks_per_node: int, seed: int, most: int) -> None:
    rows = torch.randint(0, most, (num_ranks, num_ranks), generator=torch.Generator().manual_seed(seed))
    rows.fill_diagonal_(0)
    rank = rank_of_part(rows, ranks_per_node)
    assert sorted(rank.tolist()) == list(range(num_ranks))
    assert torch.equal(rank, rank_of_part(rows, ranks_per_node))
    before, after = rows_across(rows, ranks_per_node), rows_across(by_rank(rows, rank), ranks_per_node)
    assert after <= before
    if after == before:
        assert rank.tolist() == list(range(num_ranks)), "moved for nothing"


@pytest.mark.parametrize("seed", range(5))
def test_two_nodes_of_two_are_optimal(seed: int) -> None:
    rows = torch.randint(0, 100, (4, 4), generator=torch.Generator().manual_seed(seed)).fill_diagonal_(0)
    best = min(rows_across(by_rank(rows, torch.tensor(p)), 2) for p in itertools.permutations(range(4)))
    assert rows_across(by_rank(rows, rank_of_part(rows, 2)), 2) == best


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(12, 3), (64, 8), (26, 4)])
def test_hidden_communities_are_found(num_ranks: int, ranks_per_node: int) -> None:
    node = torch.arange(num_ranks) // ranks_per_node
    rows = torch.where(node[:, None] == node, 100, 1).fill_diagonal_(0)
    shuffled = torch.randperm(num_ranks, generator=torch.Generator().manual_seed(1))
    rank = rank_of_part(rows[shuffled][:, shuffled], ranks_per_node)
    found = by_rank(rows[shuffled][:, shuffled], rank)
    assert rows_across(found, ranks_per_node) == rows_across(rows, ranks_per_node)


def test_many_parts_take_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange costs O(P), and on random traffic some exchange helps for very long."""
    rows = torch.randint(0, 2, (400, 400), generator=torch.Generator().manual_seed(1)).fill_diagonal_(0)
    rows[:100], rows[:, :100] = 0, 0
    asked = 0

    def argmax(gain: Tensor) -> Tensor:
        nonlocal asked
        asked += gain.dtype == torch.int64
        return torch.argmax(gain)

    monkeypatch.setattr(Tensor, "argmax", argmax)
    rank = rank_of_part(rows, 4)
    assert asked <= 400 + 2 * 8 * 300  # _grown's, and eight passes from two starts over the parts with traffic
    assert rows_across(by_rank(rows, rank), 4) < rows_across(rows, 4)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_plan_is_renumbered(exchange: ExchangeKind) -> None:
    """Rows between two parts do not depend on their numbers, so what was counted for the choice is what is planned."""
    graph, parts = communities(6)
    placed = renumbered(graph.edge_index, parts, 6, 2, exchange)
    before, after = (Plan.of(graph.edge_index, p, 6, exchange) for p in (parts, placed))
    assert sorted(before.rows_between().view(-1).tolist()) == sorted(after.rows_between().view(-1).tolist())
    assert after.rows == before.rows
    split, together = (rows_across(plan.rows_between(), 2) for plan in (before, after))
    assert together < 0.6 * split
    for ranks_per_node in (1, 6, 7):  # nothing to choose
        assert renumbered(graph.edge_index, parts, 6, ranks_per_node, exchange) is parts


def test_counted_in_the_plan() -> None:
    graph, parts = communities(6)
    plan, machine = Plan.of(graph.edge_index, parts, 6), Machine(ranks_per_node=2)
    node = torch.arange(6) // 2
    leave = int(plan.rows_between()[node[:, None] != node].sum())
    assert 0 < leave < plan.rows["hybrid"]
    numbers = plan.to_dict((10,), machine)
    assert (numbers["ranks_per_node"], numbers["rows_between_nodes"]) == (2, leave)
    assert numbers["bytes_between_nodes"] == {"10": leave * 40}
    text = plan.describe((10,), machine)
    assert f"on nodes of 2 ranks: {plan.rows['hybrid'] - leave:,} rows stay inside, {leave:,} leave" in text
    assert f"; {leave * 40:,} forward leave their node" in text
    assert "leave" not in plan.describe((10,), Machine(ranks_per_node=6))
    own = Plan.of(graph.edge_index, parts, 6, ranks_per_node=2)
    assert own.to_dict()["rows_between_nodes"] == leave
    assert own.price().seconds == plan.price(machine=Machine.load().with_ranks_per_node(2)).seconds


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, parts = communities(6)
    file, given_parts = tmp_path / "graph.npz", tmp_path / "parts.npy"
    np.savez(file, num_nodes=graph.num_nodes, edge_index=graph.edge_index.numpy(), undirected=False)
    np.save(given_parts, parts.numpy())
    found = {}
    for name, on_each in (("random", 6), ("random", 2), (str(given_parts), 6), (str(given_parts), 2)):
        saved = tmp_path / "plan.safetensors"
        options = [
            "--ranks",
            "6",
            "--partition",
            name,
            "--ranks-per-node",
            str(on_each),
            "--json",
            "--save",
            str(saved),
        ]
        assert main(["plan", str(file), *options]) == 0
        found[name, on_each] = Plan.load(saved)
        assert found[name, on_each].ranks_per_node == json.loads(capsys.readouterr().out)["ranks_per_node"] == on_each
    assert found[str(given_parts), 2].hash == found[str(given_parts), 6].hash
    ours, expected = found["random", 2], found["random", 6]
    assert expected.parts is not None
    assert ours.parts is not None
    assert torch.equal(expected.parts.int(), partition(graph.edge_index, graph.num_nodes, 6, "random"))
    assert torch.equal(ours.parts, renumbered(graph.edge_index, expected.parts, 6, 2, "hybrid"))
    assert ours.hash != expected.hash
    assert rows_across(ours.rows_between(), 2) < rows_across(expected.rows_between(), 2)


def launched(world_size: int, machines: str) -> tuple[Any, ...]:
    """Plans of ranks on several machines."""
    graph, parts = communities(world_size)
    session.shutdown()
    os.environ["PYG_DIST_MACHINES"] = machines
    try:
        given = (DistributedData(graph, partition=p, seed=3, hierarchy="off") for p in ("random", parts))
        ours, theirs = given
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        session.shutdown()
        session.init()
    return ours.plan.hash, theirs.plan.hash, ours.plan.ranks_per_node, ours.plan.pairs


@pytest.mark.parametrize(("machines", "on_each"), [("7,7,3,3", 2), ("0,0,0,1", 3), ("0,1,0,1", None)])
def test_ranks_of_several_machines(workers: Any, machines: str, on_each: int | None) -> None:
    """Given parts and ranks in another order than their machines' stay as they are."""
    graph, parts = communities(4)
    drawn = partition(graph.edge_index, graph.num_nodes, 4, "random", seed=3)
    placed = drawn if on_each is None else renumbered(graph.edge_index, drawn, 4, on_each, "hybrid")
    assert torch.equal(placed, drawn) == (on_each is None)
    expected, given_plan = (Plan.of(graph.edge_index, p, 4) for p in (placed, parts))
    for found in workers(4).run(launched, 4, machines):
        assert found == (expected.hash, given_plan.hash, on_each, expected.pairs)
