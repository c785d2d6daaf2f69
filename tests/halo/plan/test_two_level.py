"""What crosses machines in two levels, against SciPy's matchings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graphs import load_npz
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from stored_graphs import differences, planned_together
from torch import Tensor

from pyg_dist.backend.ops.quantize import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.cli import main
from pyg_dist.halo.plan.cover import RemoteEdges
from pyg_dist.halo.plan.levels import LevelCounts
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.halo.plan.transfer import UNIT, Transfer
from pyg_dist.halo.plan.two_level import MachineEdges, Routes
from pyg_dist.partition import partition
from pyg_dist.pricing.machine import Machine


def fewest(edge_index: Tensor, owner: Tensor, is_apart: Tensor) -> int:
    """König: as many rows as edges in maximum matchings, of each pair of owners whose edges count."""
    source, target = edge_index[:, is_apart].numpy()
    pairs = (owner[source] * (int(owner.max()) + 1) + owner[target]).numpy()
    total = 0
    for pair in np.unique(pairs):
        ends = [np.unique(end[pairs == pair], return_inverse=True)[1] for end in (source, target)]
        total += int((maximum_bipartite_matching(csr_array((np.ones(len(ends[0])), ends))) >= 0).sum())
    return total


TABLE = [
    ("pubmed", 8, 4), pytest.param("amazon_computers", 32, 8, marks=pytest.mark.slow),
    pytest.param("soc_slashdot0902", 8, 4, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_ranks", "on_each"), TABLE)
def test_rows_that_cross_machines(
    shared_data: Any, tmp_path: Any, capsys: Any, name: str, num_ranks: int, on_each: int
) -> None:
    graph = load_npz(shared_data / f"{name}.npz")
    parts = partition(graph.edge_index, graph.num_nodes, num_ranks).long()
    np.save(tmp_path / "parts.npy", parts.numpy())
    given = ["--ranks", str(num_ranks), "--ranks-per-node", str(on_each), "--partition", str(tmp_path / "parts.npy")]
    assert main(["plan", str(shared_data / f"{name}.npz"), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["between_machines"]
    machine = parts // on_each
    crosses = machine[graph.edge_index[0]] != machine[graph.edge_index[1]]
    expected = {kind: fewest(graph.edge_index, owner, crosses) for kind, owner in
                (("rank_pairs", parts), ("machine_pairs", machine))}  # fmt: skip
    assert found == expected
    ways = routes(graph.edge_index, parts, num_ranks, on_each, "hybrid")
    assert len(ways.link.item) == expected["machine_pairs"] < expected["rank_pairs"]
    check(ways, graph.edge_index, parts, on_each)


def routes(edge_index: Tensor, parts: Tensor, num_ranks: int, on_each: int, exchange: Any, rank: int = -1) -> Routes:
    """Those between all machines, or between that of a rank and the others."""
    if rank < 0:
        return MachineEdges.of(RemoteEdges.of(edge_index, parts, num_ranks), on_each).routes(exchange)
    ranks = parts[edge_index]
    machines = ranks // on_each == rank // on_each
    columns = (*edge_index, *ranks)
    load = torch.bincount(ranks[1], minlength=num_ranks)
    some = (column[machines[0] != machines[1]] for column in columns)
    return MachineEdges.of_list(*some, parts.numel(), load, on_each, rank).routes(exchange)


def check(ways: Routes, edge_index: Tensor, parts: Tensor, on_each: int) -> None:
    """Each item crosses once, between ranks that have edges; its other ranks are on the agent's machine."""
    assert sorted(ways.link.item.tolist()) == list(range(len(ways.node)))
    sender, receiver = parts[edge_index]
    num_ranks = ways.num_ranks
    touch = torch.zeros(num_ranks, num_ranks, dtype=torch.bool)
    touch[sender, receiver] = True
    assert bool(touch[ways.link.sender, ways.link.receiver].all()), "no message that one level would not send"
    assert bool((ways.link.sender // on_each != ways.link.receiver // on_each).all())
    for hops in (ways.gather, ways.spread):
        assert bool((hops.sender // on_each == hops.receiver // on_each).all())
        assert bool((hops.sender != hops.receiver).all())
    agent_of_sum, agent_of_row = (torch.full((len(ways.node),), -1) for _ in range(2))
    agent_of_sum[ways.link.item] = ways.link.sender
    agent_of_row[ways.link.item] = ways.link.receiver
    assert torch.equal(agent_of_sum[ways.gather.item], ways.gather.receiver)
    assert torch.equal(agent_of_row[ways.spread.item], ways.spread.sender)


def test_both_machines_of_a_pair_find_the_same_ways() -> None:
    edge_index, parts = random_edges(400, 4000, 12)
    whole = routes(edge_index, parts, 12, 4, "hybrid")
    for rank in range(12):
        own = routes(edge_index, parts, 12, 4, "hybrid", rank)
        for name in ("link", "gather", "spread"):
            for way in ("leaving", "arriving"):
                of_all, of_one = (getattr(ways, way)(getattr(ways, name), rank) for ways in (whole, own))
                assert torch.equal(whole.node[of_all.item], own.node[of_one.item])
                assert torch.equal(whole.is_sum[of_all.item], own.is_sum[of_one.item])
                assert torch.equal(of_all.sender, of_one.sender)
                assert torch.equal(of_all.receiver, of_one.receiver)


@pytest.mark.parametrize(("exchange", "end"), [("post", 0), ("pre", 1)])
def test_agents_share_the_load(exchange: Any, end: int) -> None:
    """Rows choose who receives them, sums who sends them: here most have several agents to choose from."""
    edge_index, parts = random_edges(600, 40_000, 8)
    rows = routes(edge_index, parts, 8, 4, exchange).link.rows(8).sum(end).view(2, 4).double()
    assert bool((rows.max(1).values <= 1.05 * rows.mean(1)).all())


def random_edges(num_nodes: int, num_edges: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """A graph with hubs, and random parts."""
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, num_edges, generator=generator) ** 3 * num_nodes).long()
    return ends, torch.randint(0, num_ranks, (num_nodes,), generator=generator)


@pytest.mark.parametrize("exchange", ["post", "pre", "hybrid"])
def test_the_plan_counts_both_levels(exchange: Any) -> None:
    edge_index, parts = random_edges(300, 3000, 6)
    one, two = (Plan.of(edge_index, parts, 6, exchange, ranks_per_node=2, hierarchy=h) for h in ("off", "on"))  # type: ignore[arg-type]
    assert (one.two_levels, two.two_levels) == (False, True)
    across = edge_index[:, (parts // 2)[edge_index[0]] != (parts // 2)[edge_index[1]]]
    covers = [RemoteEdges.of(across, owner, 6).cover("hybrid") for owner in (parts, parts // 2)]
    assert one.across == two.across == tuple(int(c.left.sum() + c.right.sum()) for c in covers)
    ways = routes(edge_index, parts, 6, 2, exchange)
    numbers = two.to_dict()
    assert numbers["rows_between_nodes"] == len(ways.node) < one.to_dict()["rows_between_nodes"]
    sent = two.rows_between()
    by_machine = sent.view(3, 2, 3, 2).sum((1, 3))
    assert numbers["rows_by_nodes"] == by_machine.tolist()
    assert numbers["rows_leaving_node"] == ways.link.rows(6).sum(1).tolist()
    hops = [hop.rows(6) for hop in (ways.gather, ways.spread)]
    inside = sent - ways.link.rows(6)
    by_link = [hop.rows(6) for hop in ways.kinds[:2]]
    assert torch.equal(by_link[0] + by_link[1], ways.link.rows(6))
    assert numbers["messages_between_nodes"] == sum(int((rows > 0).sum()) for rows in by_link)
    direct = inside - hops[0] - hops[1]
    assert numbers["messages_inside_nodes"] == sum(int((rows > 0).sum()) for rows in (direct, *hops))
    assert two.to_dict([4])["bytes_inside_nodes"] == {"4": int(inside.sum()) * 16}
    assert one.rows == two.rows
    auto = Plan.of(edge_index, parts, 6, exchange, ranks_per_node=2)
    assert auto.price().seconds == min(one.price().seconds, two.price().seconds)
    assert "two levels" in two.describe()


@pytest.mark.parametrize(("bits", "two_levels"), [(32, True), (2, False)])
def test_levels_are_priced_in_the_bits_of_messages(bits: int, two_levels: bool) -> None:
    """In few bits so little crosses that the exact messages inside a machine cost more than the link saves."""
    edge_index, parts = random_edges(300, 3000, 6)
    machine = Machine(inter_bandwidth=2.5e7, intra_bandwidth=1e8, call_seconds=0, inter_latency=0, intra_latency=0)
    one, two, auto = (
        Plan.of(edge_index, parts, 6, "hybrid", "given", 2, h, None, machine, (bits, bits))  # type: ignore[arg-type]
        for h in ("off", "on", "auto")
    )
    assert auto.two_levels == two_levels
    prices = [plan.price(machine=machine.with_ranks_per_node(2)).seconds for plan in (one, two, auto)]
    assert prices[2] == prices[two_levels] < prices[not two_levels]


def test_rows_that_arrivals_are_added_to() -> None:
    """An all-to-all-v is added to boundary rows once, a message of two levels to them each; never more than entries."""
    edge_index, parts = random_edges(300, 3000, 6)
    one, two = (LevelCounts.of(edge_index, parts, 6, 2).counted("hybrid", levels) for levels in (False, True))
    for counted, pieces in ((one, 1), (two, 4)):  # to one rank of this machine, and to four of two others
        for s in counted.sizes:
            assert s.messages - s.link_messages == (3 if counted.two_levels else 5)
            arriving = s.work - (s.edges - s.halo_edges)
            assert counted._rows_added_to(s) == min(pieces * (s.nodes - s.inner), arriving)
    few = one._replace(sizes=tuple(replace(s, messages=2) for s in one.sizes))  # a message each
    for s in few.sizes:
        assert few._rows_added_to(s) == min(2 * (s.nodes - s.inner), s.work - (s.edges - s.halo_edges))


def delivered(sent: list[Tensor], counts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Tensor]:
    """What an exchange does: every rank gets its pieces, by sender. Both sides must count alike."""
    pieces = [rows.split(of[0]) for rows, of in zip(sent, counts, strict=True)]
    for receiver, (_, expected) in enumerate(counts):
        assert [len(piece[receiver]) for piece in pieces] == list(expected)
    return [torch.cat([piece[receiver] for piece in pieces]) for receiver in range(len(sent))]


def moved(lists: list[Transfer], sent: list[Tensor]) -> list[Tensor]:
    """What arrives in the slots of each rank."""
    relays = [t.relay for t in lists]
    assert all(relay is not None for relay in relays)
    sizes = [[sum(t.send_counts), *(sum(counts[0]) for counts in t.relay[:3])] for t in lists]  # type: ignore[index]
    direct, rows, sums, addends = ([x.split(n)[k] for x, n in zip(sent, sizes, strict=True)] for k in range(4))
    near = delivered(direct, [(t.send_counts, t.recv_counts) for t in lists])
    gathered = delivered(addends, [relay.gather for relay in relays])  # type: ignore[union-attr]
    crossing = [
        x.index_add(0, relay.into, more)  # type: ignore[union-attr]
        for x, relay, more in zip(sums, relays, gathered, strict=True)
    ]
    of_sums = delivered(crossing, [relay.sums for relay in relays])  # type: ignore[union-attr]
    far = delivered(rows, [relay.rows for relay in relays])  # type: ignore[union-attr]
    copies = [x[relay.out_of] for x, relay in zip(far, relays, strict=True)]  # type: ignore[union-attr]
    spread = delivered(copies, [relay.spread for relay in relays])  # type: ignore[union-attr]
    return [torch.cat(pieces) for pieces in zip(near, of_sums, far, spread, strict=True)]


def matrix(pattern: CSR, storage: Tensor) -> Tensor:
    """The dense matrix of a pattern whose values are ``storage`` by edge, and one for UNIT."""
    dense = torch.zeros(pattern.num_rows, pattern.num_cols, dtype=storage.dtype)
    value = torch.where(pattern.edge == UNIT, 1.0, torch.cat([storage, storage.new_ones(1)])[pattern.edge])
    return dense.index_put((pattern.row(), pattern.col.long()), value, accumulate=True)


def product(shares: list[HaloShare], lists: list[Transfer], x: Tensor, weight: Tensor) -> Tensor:
    """The graph's, made by all ranks' lists."""
    stored = [weight[s.edge_id] for s in shares]
    remote = delivered(
        [values[t.weights_to_send] for values, t in zip(stored, lists, strict=True)],
        [(t.weight_send_counts, t.weight_recv_counts) for t in lists],
    )
    sent = [matrix(t.outgoing, b) @ x[s.node_id] for s, t, b in zip(shares, lists, remote, strict=True)]
    y = torch.zeros_like(x)
    for share, lists_of, values, rows in zip(shares, lists, stored, moved(lists, sent), strict=True):
        mine = matrix(share.local, values) @ x[share.node_id]
        mine[share.num_inner :] += matrix(lists_of.incoming, values) @ rows
        y[share.node_id] = mine
    return y


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 30), st.integers(0, 150), st.sampled_from([(4, 2), (5, 2), (6, 3), (6, 2), (3, 1)]),
    st.integers(0, 10**6), st.sampled_from(["post", "pre", "hybrid"]),
)  # fmt: skip
def test_two_levels_are_the_same_product(
    num_nodes: int, num_edges: int, ranks: tuple[int, int], seed: int, exchange: Any
) -> None:
    """Of sums and of rows; halo slots have the rows that they say; sizes by counting are those of the lists."""
    num_ranks, on_each = ranks
    graph = random_graph(num_nodes, num_edges, seed=seed)
    parts = torch.randint(0, num_ranks, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    shares = [
        halo_share(graph.edge_index, parts, rank, num_ranks, exchange, ranks_per_machine=on_each)
        for rank in range(num_ranks)
    ]
    source, target = graph.edge_index
    expected = torch.zeros_like(graph.x).index_add_(0, target, graph.edge_weight.view(-1, 1) * graph.x[source])
    for lists in ([s.sum_transfer for s in shares], [s.row_transfer for s in shares]):
        found = product(shares, lists, graph.x, graph.edge_weight)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    rows = [s.row_transfer for s in shares]
    slots = moved(
        rows, [matrix(t.outgoing, graph.x[:0, 0]) @ graph.x[s.node_id] for s, t in zip(shares, rows, strict=True)]
    )
    for share, arrived in zip(shares, slots, strict=True):
        assert torch.equal(arrived, graph.x[share.halo_id])
        assert torch.equal(parts[share.halo_id], share.halo_owner.long())
    if on_each > 1:  # else it counts one level
        counted = LevelCounts.of(graph.edge_index, parts, num_ranks, on_each).counted(exchange, two_levels=True)
        assert counted.sizes == tuple(ShareSizes.of(share) for share in shares)
        assert [torch.tensor(s.sum_transfer.sent).sum(0).tolist() for s in shares] == counted.rows.tolist()


def test_keys_of_what_crosses() -> None:
    """Both ends of the link name a slot alike, up to who makes a sum; no two slots of a rank have one key."""
    edge_index, parts = random_edges(300, 3000, 6)
    shares = [halo_share(edge_index, parts, rank, 6, ranks_per_machine=2) for rank in range(6)]
    relays = [share.sum_transfer.relay for share in shares]
    for kind in range(2):
        keys = [share.sum_transfer.keys[1 + kind] for share in shares]
        arrived = delivered([sent for sent, _ in keys], [relay[kind] for relay in relays])  # type: ignore[index]
        assert sum(map(len, arrived)) > 0
        for (sent, received), expected in zip(keys, arrived, strict=True):
            assert torch.equal(received % SUM_KEY, expected % SUM_KEY)
            assert bool(((received >= SUM_KEY) != kind).all())
            assert bool(((sent >= SUM_KEY) == kind).all())
            assert kind == 0 or sent.unique().numel() == len(sent)


@pytest.mark.parametrize(("num_ranks", "on_each"), [(6, 2), (8, 4), (7, 3)])
@pytest.mark.parametrize("exchange", ["post", "hybrid"])
def test_ranks_that_plan_together_find_the_shares_of_each_alone(exchange: Any, num_ranks: int, on_each: int) -> None:
    edge_index, parts = random_edges(300, 3000, num_ranks)
    shares = planned_together(
        num_ranks,
        lambda rank, send: halo_share(
            edge_index, parts, rank, num_ranks, exchange, ranks_per_machine=on_each, send=send
        ),
    )
    for rank, share in enumerate(shares):
        assert differences(share, halo_share(edge_index, parts, rank, num_ranks, exchange, None, on_each)) == []
