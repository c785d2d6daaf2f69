"""A plan counted for all ranks at once is what the ranks' shares say; it prices, prints, saves and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from safetensors.torch import save_file

from pyg_dist.errors import AgreementError, DataError
from pyg_dist.plan import Machine, Plan, ShareSizes, halo_share
from pyg_dist.plan.cost import exchange_seconds
from pyg_dist.plan.remote import EXCHANGES, Exchange


def example(
    num_ranks: int = 4, exchange: Exchange = "hybrid", seed: int = 4
) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    graph = random_graph(50, 300, seed=seed)
    parts = torch.randint(0, num_ranks, (50,), generator=torch.Generator().manual_seed(2))
    return graph.edge_index, parts, Plan.of(graph.edge_index, parts, num_ranks, exchange)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 150), st.integers(1, 7), st.integers(0, 10**6), st.sampled_from(EXCHANGES))
def test_counted_as_the_ranks_do(num_nodes: int, num_edges: int, num_ranks: int, seed: int, exchange: Exchange) -> None:
    edge_index = random_graph(num_nodes, num_edges, seed=seed).edge_index
    parts = torch.randint(0, num_ranks, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    shares = [halo_share(edge_index, parts, rank, num_ranks, exchange) for rank in range(num_ranks)]
    plan = Plan.of(edge_index, parts, num_ranks, exchange)
    assert plan.sizes == tuple(ShareSizes.of(share) for share in shares)
    assert plan.rows_between().tolist() == [list(share.sums.send_counts) for share in shares]
    assert plan.rows["hybrid"] <= min(plan.rows["post"], plan.rows["pre"])


def test_to_dict_and_describe() -> None:
    _, parts, plan = example()
    numbers = json.loads(json.dumps(plan.to_dict((10, 3))))
    assert numbers["ranks"] == 4
    assert numbers["nodes"] == torch.bincount(parts).tolist()
    assert numbers["rows"] == plan.rows
    assert numbers["bytes"] == {"10": plan.rows["hybrid"] * 40, "3": plan.rows["hybrid"] * 12}
    assert numbers["messages"] == 12
    assert numbers["all_to_all"]
    assert len(numbers["memory_bytes"]) == 4
    assert plan.to_dict((10, 3), Machine(bandwidth=1e6))["predicted_seconds"] > numbers["predicted_seconds"] > 0
    assert f"{plan.rows['hybrid']:,}" in plan.describe()
    assert len(Plan.of(*example()[:2], 500).describe().splitlines()) < 50


def test_eq_2() -> None:
    """Rank 0 sends two messages of 30 and 10 rows, 1 column; rank 2 none."""
    rows = torch.tensor([[0, 30, 10], [35, 0, 0], [0, 0, 0]])
    machine = Machine(latency=0.5, bandwidth=4.0)
    assert exchange_seconds(rows, 1, machine) == pytest.approx(30 + 10 + 2 * 0.5)
    assert exchange_seconds(rows, 2, Machine(latency=0.0, bandwidth=4.0)) == pytest.approx(80)
    assert exchange_seconds(rows, 1, Machine(latency=0.0, bandwidth=4.0)) == 40


def test_saved_and_stale(tmp_path: Path) -> None:
    edge_index, parts, plan = example()
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors", plan.hash)
    assert loaded == plan
    assert torch.equal(loaded.parts_for(edge_index, 4, "hybrid"), parts)
    for inputs, stale in (
        ((edge_index.flip(1), 4, "hybrid"), "for this graph"),
        ((edge_index, 5, "hybrid"), "ranks 5 .got 4"),
        ((edge_index, 4, "post"), "exchange post .got hybrid"),
    ):
        with pytest.raises(AgreementError, match=stale):
            loaded.parts_for(*inputs)
    others = [
        Plan.of(edge_index.flip(1), parts, 4),
        Plan.of(edge_index, parts.flip(0), 4),
        Plan.of(edge_index, parts, 5),
        Plan.of(edge_index, parts, 4, "post"),
    ]
    for other in others:
        with pytest.raises(AgreementError, match="plan again"):
            Plan.load(tmp_path / "plan.safetensors", other.hash)
    save_file({"parts": parts}, tmp_path / "old.safetensors", metadata={"plan": '{"format": 1}'})
    save_file({"parts": parts}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("{}")
    for name in ("old", "other", "text"):
        with pytest.raises(DataError, match="plan again"):
            Plan.load(tmp_path / f"{name}.safetensors")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, plan = example()
    plan.plot(tmp_path / "plan.svg")
    drawing = (tmp_path / "plan.svg").read_text()
    assert drawing.count("<image") >= 1, "no heat map"
    plan.plot(tmp_path / "plan.png", width=8)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def run_plan(world_size: int, exchange: Any) -> tuple[str, Any]:
    from pyg_dist import DistributedData

    graph = random_graph(50, 300, seed=4)
    parts = torch.randint(0, world_size, (50,), generator=torch.Generator().manual_seed(2))
    plan = DistributedData(graph, partition=parts, exchange=exchange).plan
    return plan.hash, plan


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_planned_without_a_launch_as_with_one(workers: Any, exchange: Exchange) -> None:
    *_, expected = example(3, exchange)
    for digest, plan in workers(3).run(run_plan, 3, exchange):
        assert digest == expected.hash
        assert plan == expected


def run_again(world_size: int, folder: str) -> None:
    """A saved plan brings its parts; everyone refuses a stale one."""
    import pyg_dist
    from pyg_dist import DistributedData

    graph, path = random_graph(50, 300, seed=4), Path(folder) / "plan.safetensors"
    first = DistributedData(graph, partition="random", seed=7)
    if pyg_dist.is_main():
        first.plan.save(path)
    else:
        with pytest.raises(DataError, match="is_main"):
            first.plan.save(path)
    first.graph.axis.reduce_(torch.zeros(1))
    loaded = Plan.load(path)
    again = DistributedData(graph, partition=loaded)
    assert again.plan == first.plan == loaded
    assert torch.equal(again.graph.node_rows.key, first.graph.node_rows.key)
    other = random_graph(50, 300, seed=5)
    for stale, options in ((other, {}), (graph, {"exchange": "post"})):
        with pytest.raises(AgreementError, match="plan again"):
            DistributedData(stale, partition=loaded, **options)
    if not pyg_dist.is_main():
        with pytest.raises(DataError, match="plan with its parts"):
            first.plan.parts_for(graph.edge_index, world_size, "hybrid")


def test_used_again(workers: Any, tmp_path: Path) -> None:
    workers(2).run(run_again, 2, str(tmp_path))
