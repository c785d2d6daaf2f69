"""Shares of the halo layout: together they are the graph, and both sides of every message agree. One process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph
from torch import Tensor

from pyg_dist.halo.plan.share import HaloShare, halo_share


def global_edges(share: HaloShare) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target and global id of the edges that a share executes, read off its two patterns."""
    source = torch.cat([share.node_id[share.local.col.long()], share.halo_id[share.row_transfer.incoming.col.long()]])
    target = torch.cat(
        [share.node_id[share.local.row()], share.node_id[share.num_inner + share.row_transfer.incoming.row()]]
    )
    return source, target, share.edge_id[torch.cat([share.local.edge, share.row_transfer.incoming.edge])]


def check(edge_index: Tensor, parts: Tensor, num_ranks: int) -> list[HaloShare]:
    shares = [halo_share(edge_index, parts, rank, num_ranks) for rank in range(num_ranks)]
    num_nodes, num_edges = parts.numel(), edge_index.shape[1]
    assert torch.equal(torch.cat([s.node_id for s in shares]).sort().values, torch.arange(num_nodes))
    assert torch.equal(torch.cat([s.edge_id for s in shares]).sort().values, torch.arange(num_edges))
    for share in shares:
        assert (parts[share.node_id] == share.rank).all()
        source, target, edge = global_edges(share)
        assert torch.equal(torch.stack([source, target]), edge_index[:, edge])
        assert (parts[target] == share.rank).all()
        assert (parts[share.halo_id] != share.rank).all()
        assert share.halo_id.unique().numel() == share.halo_id.numel(), "a row would be sent twice"
        has_remote_source = torch.zeros(num_nodes, dtype=torch.bool)
        has_remote_source[target[parts[source] != share.rank]] = True
        assert not has_remote_source[share.node_id[: share.num_inner]].any()
        assert has_remote_source[share.node_id[share.num_inner :]].all()
    received = [receiver.halo_id.split(receiver.row_transfer.recv_counts) for receiver in shares]
    for sender in shares:
        sent = sender.node_id[sender.row_transfer.outgoing.col.long()].split(sender.row_transfer.send_counts)
        for receiver, rows in enumerate(sent):
            assert torch.equal(rows, received[receiver][sender.rank])
    return shares


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 150), st.integers(1, 9), st.integers(0, 10**6))
def test_shares_are_the_graph(num_nodes: int, num_edges: int, num_ranks: int, seed: int) -> None:
    edge_index = random_graph(num_nodes, num_edges, seed=seed).edge_index
    parts = torch.randint(0, num_ranks, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    check(edge_index, parts, num_ranks)


def test_one_rank_has_no_halo() -> None:
    (share,) = check(random_graph(20, 60).edge_index, torch.zeros(20, dtype=torch.int32), 1)
    assert torch.equal(share.node_id, torch.arange(20))
    assert share.row_transfer.incoming.num_entries == 0
    assert share.num_inner == 20


@pytest.mark.slow
def test_512_ranks_in_one_process() -> None:
    graph = random_graph(3000, 9000, seed=3)
    parts = torch.randint(0, 512, (3000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    shares = check(graph.edge_index, parts, 512)
    pairs = torch.stack([parts[graph.edge_index[1]].long(), graph.edge_index[0]])
    remote = pairs[:, parts[graph.edge_index[0]] != parts[graph.edge_index[1]]]
    assert sum(sum(s.row_transfer.send_counts) for s in shares) == remote.unique(dim=1).shape[1]


def test_a_graph_without_nodes() -> None:
    check(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), 3)


def test_edges_of_one_target_keep_their_order() -> None:
    edge_index = torch.tensor([[3, 1, 2, 1], [0, 0, 0, 0]])
    share = halo_share(edge_index, torch.zeros(4, dtype=torch.int32), 0, 1)
    assert share.local.col.tolist() == [3, 1, 2, 1]
