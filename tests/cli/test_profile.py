"""A profile's parts add up, belong to the right layers, and leave the numbers of the training alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bits import assert_same_bits
from random_graphs import random_graph
from workers import on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv


class Trained:
    """Two convs on one graph, and an epoch."""

    def __init__(self, world_size: int, **options: Any) -> None:
        torch.manual_seed(0)
        graph = random_graph(60, 600, seed=1)
        graph.x = torch.randn(60, 5)
        if not options:
            options["partition"] = torch.arange(60) % world_size
        self.data = DistributedData(graph, **options)
        self.convs = [DistributedSAGEConv(5, 40), DistributedGCNConv(40, 30)]
        self.x = self.data.x.clone().requires_grad_()

    def epoch(self) -> list[torch.Tensor]:
        x = self.x
        for conv in self.convs:
            x = conv(x, self.data.edge_index).relu()
        x.square().mean().backward()
        parameters = [p for conv in self.convs for p in conv.parameters()]
        gradients = [p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        return gradients


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(3)
def test_parts_and_layers(world_size: int, tmp_path: Path, overlap: bool) -> None:
    trained = Trained(world_size)
    expected = trained.epoch()
    sent_before = trained.data.traffic.num_bytes
    with pyg_dist.profile(overlap=overlap) as found:
        gradients = trained.epoch()
        if pyg_dist.rank() == 0:
            time.sleep(1.0)  # everyone else waits in the second epoch
        trained.epoch()
    for a, b in zip(gradients, expected, strict=True):
        assert_same_bits(a, b)

    assert found.product_forms == [[]] * world_size, "these products are too small for two forms"
    assert len(found.layers) == 3
    assert found.layers[1].startswith("1: SAGEConv(5, 40")
    assert len(found.seconds) == world_size
    for rank in range(world_size):
        table = found.table(rank)
        assert sum(sum(row.values()) for row in table) == pytest.approx(found.seconds[rank])
        for layer in (1, 2):
            named = {"aggregate", "pack", "exchange", "unpack", "dense"} | (set() if overlap else {"wait"})
            assert all(table[layer][p] > 0 for p in named), (layer, table[layer])
        assert table[0]["sums"] > 0
        assert table[0]["aggregate"] == table[0]["pack"] == 0, "the backward pass belongs to layers, too"
    waits = [sum(row["wait"] for row in found.table(rank)) for rank in range(world_size)]
    exchanges = [sum(row["exchange"] for row in found.table(rank)) for rank in range(world_size)]
    named, other = (exchanges, waits) if overlap else (waits, exchanges)
    assert all(of_named > of_other for of_named, of_other in zip(named[1:], other[1:], strict=True))

    # Twice two layers, forward and backward.
    aggregations = [s for s in found.spans[0] if pyg_dist.backend.timing.PHASES[s.phase] == "aggregate"]
    assert [s.layer for s in aggregations] == 2 * [1, 2, 2, 1]
    assert [len(line.split()) > 5 for line in found.describe().splitlines()] == [True] * (1 + 4 * world_size)
    assert found.to_dict()["ranks"][0]["layers"][found.layers[1]]["dense"] > 0

    if pyg_dist.is_main():
        path = tmp_path / "trace.json"
        found.export_chrome_trace(path)
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert {e["pid"] for e in events} == set(range(world_size))
        rows = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "thread_name"]
        assert [e["args"]["name"] for e in rows] == world_size * found.layers
        assert all(found.layers[e["tid"]] == e["args"]["layer"] for e in events)
        assert all(0 <= e["ts"] <= e["ts"] + e["dur"] <= 1e6 * max(found.seconds) for e in events)
    assert found.sent_bytes[pyg_dist.rank()] == trained.data.traffic.num_bytes - sent_before
    assert min(found.sent_bytes) > 0
    assert min(found.peak_bytes) > 50 * 2**20
    summary = str(found).splitlines()
    assert summary[0].split() == ["layer", "phase", "mean", "ms", "share", "min", "ms", "max", "ms"]
    assert max(map(len, [*summary, *found.describe().splitlines()])) <= 120
    assert summary[-1].startswith(f"{world_size} ranks: ")
    assert "MiB, peak memory of a process" in summary[-1]
    assert abs(sum(int(line.split()[-3][:-1]) for line in summary[1:-1]) - 100) <= len(summary) / 2 + 1
    if pyg_dist.is_main():
        pytest.importorskip("matplotlib")
        found.to_html(tmp_path / "profile.html")
        assert (tmp_path / "profile.html").read_text().count("<svg") == 1
    with pyg_dist.profile(), pytest.raises(pyg_dist.errors.OptionError, match="at a time"), pyg_dist.profile():
        pass
    assert not pyg_dist.backend.timing.is_recording()


@on_ranks(2)
def test_quantized_messages() -> None:
    """Narrowing and widening are told apart, in both directions, and exact messages have none."""
    for bits in (2, 32):
        trained = Trained(2, partition=torch.arange(60) % 2, bits=bits)
        with pyg_dist.profile() as found:
            trained.epoch()
        spans = [s for s in found.spans[pyg_dist.rank()] if pyg_dist.backend.timing.PHASES[s.phase] == "quantize"]
        # Packed and unpacked, by the forward passes of both layers and the backward passes in the opposite order.
        assert [s.layer for s in spans] == ([1, 1, 2, 2, 2, 2, 1, 1] if bits == 2 else [])
        assert all(found.table(rank)[layer]["quantize"] > 0 for rank in range(2) for layer in (1, 2)) == (bits == 2)
        assert ("quantize" in found.describe().splitlines()[0].split()) == (bits == 2)


@on_ranks(2)
def test_on_the_grid(world_size: int) -> None:
    trained = Trained(world_size, layout="grid")
    trained.epoch()
    with pyg_dist.profile() as found:
        trained.epoch()
    whole = {p: sum(row[p] for row in found.table(0)) for p in pyg_dist.backend.timing.PHASES}
    assert all(whole[p] > 0 for p in ("aggregate", "exchange", "dense", "other"))


@on_ranks(2)
def test_labels_for_the_profiler_of_torch(world_size: int) -> None:
    trained = Trained(world_size)
    trained.epoch()
    with torch.profiler.profile() as found:
        trained.epoch()
    names = {event.key for event in found.key_averages()}
    assert {f"pyg_dist: {p}" for p in ("aggregate", "pack", "exchange", "unpack", "sums")} <= names


@on_ranks(1)
def test_on_one_rank() -> None:
    trained = Trained(1)
    with pyg_dist.profile() as found:
        trained.epoch()
    assert "aggregate" in found.describe()
    assert "exchange" not in found.describe()


@on_ranks(1)
def test_forms_of_products_are_named() -> None:
    with patch("pyg_dist.cli.profile.timed_forms", lambda: ["A by x: blocks, 32 ahead"]), pyg_dist.profile() as found:
        pass
    assert found.describe().splitlines()[-1] == "rank 0: product of A by x: blocks, 32 ahead"
    assert found.to_dict()["ranks"][0]["product_forms"] == found.product_forms[0] == ["A by x: blocks, 32 ahead"]
