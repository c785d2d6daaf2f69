"""A plan counted for all ranks at once is what the ranks' shares say; it prices, prints, saves and refuses."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from safetensors.torch import save_file
from workers import on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.ops.quantize import row_bytes
from pyg_dist.errors import AgreementError, DataError, UnsupportedError
from pyg_dist.halo.plan.cost import (
    HaloLoad,
    exchange_seconds,
    halo_price,
    memory_bytes,
    pre_quantize_seconds,
    quantize_seconds,
    sent_by_rank,
)
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.share import halo_share
from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model


def example(
    num_ranks: int = 4, exchange: ExchangeKind = "hybrid", seed: int = 4
) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    graph = random_graph(50, 300, seed=seed)
    parts = torch.randint(0, num_ranks, (50,), generator=torch.Generator().manual_seed(2))
    return graph.edge_index, parts, Plan.of(graph.edge_index, parts, num_ranks, exchange)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 150), st.integers(1, 7), st.integers(0, 10**6), st.sampled_from(EXCHANGES))
def test_counted_as_the_ranks_do(
    num_nodes: int, num_edges: int, num_ranks: int, seed: int, exchange: ExchangeKind
) -> None:
    edge_index = random_graph(num_nodes, num_edges, seed=seed).edge_index
    parts = torch.randint(0, num_ranks, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    shares = [halo_share(edge_index, parts, rank, num_ranks, exchange) for rank in range(num_ranks)]
    plan = Plan.of(edge_index, parts, num_ranks, exchange)
    assert plan.sizes == tuple(ShareSizes.of(share) for share in shares)
    assert plan.rows_between().tolist() == [list(share.sum_transfer.send_counts) for share in shares]
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
    slow = Machine(intra_bandwidth=1e3)
    assert plan.to_dict((10, 3), slow)["predicted_seconds"] > 10 * numbers["predicted_seconds"] > 0
    assert "predicted" not in plan.describe()
    priced = plan.describe(model=Model.of_layers(50, 300, 10, 3, (2, 8)))
    assert "predicted for a 2-layer GCN, columns 10 8 3: " in priced
    assert "memory of a rank, about: 0.0 MiB" in priced
    assert f"{plan.rows['hybrid']:,}" in plan.describe()
    assert len(Plan.of(*example()[:2], 500).describe().splitlines()) < 50


def test_memory_counts_a_piece_for_each_message() -> None:
    """Eight parts in a ring, two neighbours each: what the pieces of both directions hold, they are predicted with."""
    rng = torch.Generator().manual_seed(0)
    parts = torch.arange(8).repeat_interleave(9)
    source = torch.arange(72).repeat(5)
    step = torch.randint(-1, 2, source.shape, generator=rng)
    target = (parts[source] + step) % 8 * 9 + torch.randint(9, source.shape, generator=rng)
    edge_index = torch.stack([source, target])
    plan = Plan.of(edge_index, parts, 8)
    assert not plan.is_dense
    model = Model(72, 360, (10, 10))
    for rank, sizes in enumerate(plan.sizes):
        sums = halo_share(edge_index, parts, rank, 8).sum_transfer
        held = 0
        for matrix, counts in ((sums.incoming, sums.recv_counts), (sums.outgoing.transposed, sums.send_counts)):
            bounds = [0, *accumulate(counts)]
            for low, high in pairwise(bounds):
                piece = matrix.columns(low, high)
                tensors = (piece.rowptr[:-1], piece.col, piece.edge) if high > low else ()
                held += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        slots = sizes.rows_sent + sizes.rows_received
        uncut = memory_bytes(sizes.nodes, sizes.edges, sizes.work + sizes.halo_edges, slots, model)
        assert plan.memory_bytes(model)[rank] == uncut + held
        assert held > 0
    *_, dense = example()
    assert dense.is_dense  # all arrives as one
    sizes = dense.sizes[0]
    slots = sizes.rows_sent + sizes.rows_received
    expected = memory_bytes(sizes.nodes, sizes.edges, sizes.work + sizes.halo_edges, slots, model)
    assert dense.memory_bytes(model)[0] == expected
    assert dense.memory_bytes(Model(50, 300, (20, 10)))[0] == expected + 4 * (20 * sizes.nodes + 10 * slots + 4 * 100)


ROWS = torch.tensor([[0, 30, 10], [35, 0, 0], [0, 0, 0]])
BARE = Machine(quantize_rate=7e9, call_seconds=0.0, intra_latency=0.5, intra_bandwidth=4.0, ranks_per_node=4, cores=4)


def loads_of(entries: tuple[int, ...], rows: torch.Tensor, ranks_per_node: int, **others: float) -> list[HaloLoad]:
    """Of ranks of one node each."""
    sent = sent_by_rank(rows, ranks_per_node)
    return [HaloLoad(1, of_rank, *numbers, **others) for of_rank, numbers in zip(entries, sent, strict=True)]  # type: ignore[arg-type]


def test_eq_2() -> None:
    """Rank 0 sends two messages of 30 and 10 rows, 1 column; rank 2 none."""
    first, second, third = loads_of((0, 0, 0), ROWS, 4)
    assert exchange_seconds(first, 1, BARE, 3) == pytest.approx(30 + 10 + 2 * 0.5)
    assert exchange_seconds(second, 2, BARE, 3) == pytest.approx(70 + 0.5)
    assert exchange_seconds(third, 2, BARE, 3) == 0


def test_eq_2_between_machines() -> None:
    """Two ranks on a machine share its link; ranks beyond the cores take turns, and a network card does not."""
    machine = replace(BARE, ranks_per_node=2, cores=1, inter_bandwidth=1.0, inter_latency=7.0)
    first = loads_of((0, 0, 0), ROWS, 2)[0]
    assert first[2:6] == (30, 10, 1, 1)
    assert exchange_seconds(first, 1, machine, 3) == pytest.approx(2 * (30 + 0.5) + 2 * 4 * 10 + 7)


def test_fewer_bits() -> None:
    """SuperGCN, eq. 4 and 5: data, four bytes of parameters a row, and the time to quantize."""
    assert [row_bytes(256, 4, bits) for bits in (32, 16, 8, 4, 2)] == [1024, 512, 260, 132, 68]
    assert row_bytes(5, 4, 2) == 2 + 4
    first = loads_of((0, 0, 0), ROWS, 4)[0]
    assert exchange_seconds(first, 256, BARE, 3, 2) == pytest.approx(40 * 68 / 4 + 1)
    assert quantize_seconds(first, 256, BARE, 3, 2) == pytest.approx(2 * 40 * (1024 + 68) / BARE.quantize_rate)
    assert quantize_seconds(first, 256, BARE, 3, 32) == 0
    assert pre_quantize_seconds(first, 256, BARE, 3, 2) == pytest.approx(1024 / BARE.stream_rate)
    silent = loads_of((0,), torch.zeros(1, 1), 4)[0]
    assert pre_quantize_seconds(silent, 256, BARE, 1, 2) == 0
    assert halo_price(Model(3, 30, (256, 256)), [silent], BARE, 1, (2, 2)).quantize == 0
    assert quantize_seconds(first, 1, BARE, 3, 8) == 0  # a column goes as it is
    assert exchange_seconds(first, 1, BARE, 3, 8) == exchange_seconds(first, 1, BARE, 3)
    model, loads = Model(3, 30, (256, 256, 256)), [first]
    full, low = halo_price(model, loads, BARE, 3), halo_price(model, loads, BARE, 3, (32, 2))
    assert low.quantize == pytest.approx(2 * 40 * (1024 + 68) / BARE.quantize_rate + 1024 / BARE.stream_rate)
    assert full.messages - low.messages == pytest.approx(40 * (1024 - 68) / 4)


def test_price_of_a_step() -> None:
    """By hand. Two layers, 8 to 16 to 4 columns, on a rank of one node with 10 entries that sends 30 and 10 rows.

    The first layer's sums are remembered; the second narrows: projected, then aggregated at 4 columns, there and back.
    """
    machine = replace(BARE, spmm=(1.0, 100.0, 1e4), gemm_rate=0.5, stream_rate=0.25)
    model, loads = Model(3, 30, (8, 16, 4)), loads_of((10, 10, 10), ROWS, 4)
    price = halo_price(model, loads, machine, 3)
    aggregation = 10 * 4 + 100 * 10 + 1e4 * 1 * 4
    assert price.sparse == pytest.approx(2 * aggregation)
    first, second = 2 * 8 * 16, 2 * 16 * 4  # flops of x W
    assert price.dense == pytest.approx((2 * first + 3 * second) / 0.5)  # with W's gradient; the second with x's, too
    weights = 16 * (8 + 1) + 4 * (16 + 1)
    assert price.streams == pytest.approx((12 * weights * 4 + 8 * (16 + 4) * 4) / 0.25)
    exchange = 40 * 16 / 4 + 2 * 0.5  # 40 rows of 16 bytes at 4 bytes a second, two messages
    gradients = 2 * 2 * weights * 4 // 3 / 4 + 2 * 4 * 0.5
    assert price.messages == pytest.approx(2 * exchange + gradients)


def test_a_root_hides_the_link() -> None:
    """SAGE multiplies the root's rows, once forward and twice backward, while messages are between machines."""
    machine = replace(BARE, ranks_per_node=1, inter_bandwidth=1.0, inter_latency=0.0, gemm_rate=4.0)
    loads = loads_of((0, 0, 0), ROWS, 1)[1:2]
    of_sage, of_gcn = (halo_price(Model(3, 30, (8, 8, 8), conv), loads, machine, 3) for conv in ("sage", "gcn"))  # type: ignore[arg-type]
    root = 2 * 8 * 8 / 4
    link, weights = 35 * 8 * 4, {"sage": 2 * 8 * (2 * 8 + 1), "gcn": 2 * 8 * (8 + 1)}
    gradients = {conv: 2 * 2 * number * 4 // 3 for conv, number in weights.items()}
    assert of_gcn.messages == pytest.approx(2 * link + gradients["gcn"])
    assert of_sage.messages == pytest.approx(2 * link - root - 2 * root + gradients["sage"])


def test_local_edges_and_messages_inside_hide_the_link() -> None:
    """Two ranks a machine of one core: rank 0 sends 30 rows inside it and 10 by the link, beside 6 local entries.

    What the link's messages take of the core is never hidden, unless a GPU sends them.
    """
    machine = replace(BARE, spmm=(1.0, 0.0, 0.0), ranks_per_node=2, cores=1, inter_bandwidth=0.5, inter_latency=0.0)
    loads = loads_of((10, 10, 10), ROWS, 2, local_entries=6)[:1]
    price = halo_price(Model(3, 30, (8, 8, 8)), loads, machine, 3)
    inside, core, link = 2 * (30 * 32 / 4 + 0.5), 2 * (10 * 32 / 4 + 0.5), 2 * 10 * 32 / 0.5
    shares = Model(3, 30, (8, 8, 8)).gradient_bytes(2)  # inside a machine, and then between the two
    gradients = 2 * (shares / 4 + 4 * 0.5) + shares / 0.5
    assert price.messages == pytest.approx(2 * (inside + link - inside - 2 * 6 * 8) + gradients)
    hidden = [loads[0]._replace(local_entries=1e6)]
    for device, taken in (("cpu", core), ("cuda", 0.0)):
        narrow = halo_price(Model(3, 30, (8, 8, 8)), hidden, replace(machine, device=device), 3)
        assert narrow.messages == pytest.approx(2 * (inside + taken) + gradients)


def test_ranks_that_share_cores_take_the_sum_of_their_work() -> None:
    """Of 30 and 10 entries on one core 40, with a core each 30; between, what the busier of the two bounds is.

    Rows that packing writes and arrivals are added to count beside the nodes.
    """
    model = replace(Model(3, 30, (8, 8, 8)), activation_passes=0)
    machine = replace(BARE, spmm=(1.0, 0.0, 0.0), stream_rate=math.inf, gemm_rate=math.inf, ranks_per_node=2)
    loads = loads_of((30, 10, 5), ROWS, 2)
    for cores, entries in ((1, 40), (2, 30)):
        assert halo_price(model, loads, replace(machine, cores=cores), 3).sparse == pytest.approx(2 * 8 * entries)
    idle = loads_of((36, 1, 1), 0 * ROWS, 3)
    shared = halo_price(model, idle, replace(machine, ranks_per_node=3, cores=2), 3)
    assert shared.sparse == pytest.approx(2 * 8 * 36)  # 38 entries are 19 a core
    by_rows = replace(machine, spmm=(0.0, 0.0, 1.0), cores=2)
    made = loads_of((0, 0, 0), 0 * ROWS, 2)
    made[0] = made[0]._replace(rows_made=4)
    assert halo_price(model, made, by_rows, 3).sparse == pytest.approx(2 * 8 * (1 + 4))


def test_what_is_no_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    """As ``/dev/null``, here a pipe."""
    os.mkfifo(tmp_path / "pipe")
    received: list[bytes] = []
    reader = Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    example()[2].save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    reader.join(30)
    (tmp_path / "plan.safetensors").write_bytes(*received)
    assert Plan.load(tmp_path / "plan.safetensors") == example()[2]


def test_saved_and_stale(tmp_path: Path) -> None:
    edge_index, parts, plan = example()
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors", plan.hash)
    assert loaded == plan
    assert torch.equal(loaded.parts_for(edge_index, 50, 4, "hybrid"), parts)
    for inputs, stale in (
        ((edge_index.flip(1), 50, 4, "hybrid"), "for this graph"),
        ((edge_index, 53, 4, "hybrid"), "nodes 53 .got 50"),  # three without edges more
        ((edge_index, 50, 5, "hybrid"), "ranks 5 .got 4"),
        ((edge_index, 50, 4, "post"), "exchange post .got hybrid"),
        ((edge_index, 50, 4, "hybrid", (4, 4)), r"bits \(4, 4\) .got \(32, 32\)"),
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
    graph = random_graph(50, 300, seed=4)
    parts = torch.randint(0, world_size, (50,), generator=torch.Generator().manual_seed(2))
    plan = DistributedData(graph, partition=parts, exchange=exchange).plan
    return plan.hash, plan


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_planned_without_a_launch_as_with_one(workers: Any, exchange: ExchangeKind) -> None:
    *_, expected = example(3, exchange)
    for digest, plan in workers(3).run(run_plan, 3, exchange):
        assert digest == expected.hash
        assert plan == expected


@on_ranks(2)
def test_used_again(world_size: int, tmp_path: Path) -> None:
    """A saved plan brings its parts; everyone refuses a stale one."""
    graph, path = random_graph(50, 300, seed=4), tmp_path / "plan.safetensors"
    first = DistributedData(graph, partition="random", seed=7)
    if pyg_dist.is_main():
        first.plan.save(path)
    else:
        with pytest.raises(DataError, match="is_main"):
            first.plan.save(path)
    first.graph.group.all_reduce_(torch.zeros(1))
    loaded = Plan.load(path)
    again = DistributedData(graph, partition=loaded)
    assert again.plan == first.plan == loaded
    assert torch.equal(again.graph.node_sharding.global_id, first.graph.node_sharding.global_id)
    other = random_graph(50, 300, seed=5)
    for stale, options in ((other, {}), (graph, {"exchange": "post"}), (graph, {"bits": 4})):
        with pytest.raises(AgreementError, match="plan again"):
            DistributedData(stale, partition=loaded, **options)
    if not pyg_dist.is_main():
        with pytest.raises(DataError, match="plan with its parts"):
            first.plan.parts_for(graph.edge_index, 50, world_size, "hybrid")
    assert DistributedData(graph, partition=first.plan).plan == first.plan  # its parts are on rank 0
    with pytest.raises(UnsupportedError, match="distributed already"):
        DistributedData(first)
