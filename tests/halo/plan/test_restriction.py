"""Shares of an induced subgraph: cut from a rank's own share, they are what the whole subgraph would be laid out as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.utils import subgraph

from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.sample import Subset
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.links import RemoteLinks
from pyg_dist.halo.plan.restriction import Restriction, restricted
from pyg_dist.halo.plan.share import HaloShare, halo_share


def links_of(share: HaloShare, edge_index: Tensor, parts: Tensor) -> RemoteLinks:
    """What the ranks tell each other, from the whole graph."""
    sender, receiver = parts[edge_index]
    place = torch.full((edge_index.shape[1],), -1).scatter_(0, share.edge_id, torch.arange(share.edge_id.numel()))
    ends_here = ((receiver == share.rank) & (sender != share.rank)).nonzero().view(-1)
    begins_here = ((sender == share.rank) & (receiver != share.rank)).nonzero().view(-1)
    ends_here = ends_here[torch.argsort(sender[ends_here], stable=True)]
    begins_here = begins_here[torch.argsort(receiver[begins_here], stable=True)]
    incoming = torch.stack([ends_here, *edge_index[:, ends_here], place[ends_here]], dim=1)
    outgoing = torch.stack([begins_here, *edge_index[:, begins_here]], dim=1)
    load = torch.bincount(receiver, minlength=share.num_ranks)
    return RemoteLinks.of(share, incoming, outgoing, sender[ends_here], receiver[begins_here], load)


def all_restricted(
    graph: Any, parts: Tensor, num_ranks: int, sample: Tensor, exchange: ExchangeKind
) -> list[Restriction]:
    shares = [halo_share(graph.edge_index, parts, rank, num_ranks, exchange) for rank in range(num_ranks)]
    return [restricted(share, links_of(share, graph.edge_index, parts), Subset(sample)) for share in shares]


def dense(csr: CSR) -> Tensor:
    out = torch.zeros(csr.num_rows, csr.num_cols, dtype=torch.float64)
    return out.index_put_((csr.row(), csr.col.long()), torch.ones(csr.num_entries, dtype=torch.float64), True)


def product(shares: list[HaloShare], kind: str, x: Tensor) -> Tensor:
    """What the ranks compute together, every message delivered."""
    num_ranks, out = len(shares), torch.zeros_like(x)
    sent = [
        torch.split(dense(getattr(s, kind).outgoing) @ x[s.node_id], list(getattr(s, kind).send_counts)) for s in shares
    ]
    for s in shares:
        lists = getattr(s, kind)
        for peer in range(num_ranks):
            assert lists.recv_counts[peer] == getattr(shares[peer], kind).send_counts[s.rank]
        received = torch.cat([sent[peer][s.rank] for peer in range(num_ranks)])
        own = dense(s.local) @ x[s.node_id]
        own[s.num_inner :] += dense(lists.incoming) @ received
        out[s.node_id] = own
    return out


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "num_edges", "size"), [(1, 20, 60, 7), (4, 60, 400, 25), (64, 300, 3000, 120)]
)
def test_sums_are_those_of_the_subgraph(
    exchange: ExchangeKind, num_ranks: int, num_nodes: int, num_edges: int, size: int
) -> None:
    graph = random_graph(num_nodes, num_edges)
    rng = torch.Generator().manual_seed(num_ranks)
    parts = torch.randint(0, num_ranks, (num_nodes,), generator=rng)
    sample = torch.randperm(num_nodes, generator=rng)[:size].sort().values
    found = all_restricted(graph, parts, num_ranks, sample, exchange)
    edges, _ = subgraph(sample, graph.edge_index, relabel_nodes=True, num_nodes=num_nodes)
    x = torch.randn(size, 3, generator=rng, dtype=torch.float64)
    expected = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
    for kind in ("row_transfer", "sum_transfer"):
        torch.testing.assert_close(product([f.share for f in found], kind, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 8, pytest.param(128, marks=pytest.mark.slow)])
def test_rows_sent_are_the_minimum_cover_of_the_subgraph(num_ranks: int) -> None:
    graph = random_graph(600, 6000)
    rng = torch.Generator().manual_seed(num_ranks)
    parts = torch.randint(0, num_ranks, (600,), generator=rng)
    sample = torch.randperm(600, generator=rng)[:200].sort().values
    found = all_restricted(graph, parts, num_ranks, sample, "hybrid")
    edges, _ = subgraph(sample, graph.edge_index, relabel_nodes=True, num_nodes=600)
    cover = RemoteEdges.of(edges, parts[sample], num_ranks).cover("hybrid")
    assert sum(sum(f.share.sum_transfer.send_counts) for f in found) == int(cover.left.sum() + cover.right.sum())
    assert sum(f.share.edge_id.numel() for f in found) == edges.shape[1]


def test_edges_keep_their_places() -> None:
    graph, num_ranks = random_graph(40, 300), 3
    parts = torch.arange(40) % num_ranks
    sample = torch.arange(1, 40, 2)
    _, _, mask = subgraph(sample, graph.edge_index, relabel_nodes=True, num_nodes=40, return_edge_mask=True)
    found = all_restricted(graph, parts, num_ranks, sample, "hybrid")
    kept = torch.cat([f.share.edge_id for f in found]).sort().values
    assert torch.equal(kept, mask.nonzero().view(-1))
    for rank, f in enumerate(found):
        whole = halo_share(graph.edge_index, parts, rank, num_ranks, "hybrid")
        assert torch.equal(whole.edge_id[f.edge], f.share.edge_id)
        assert torch.equal(whole.node_id[f.rows.row], sample[f.share.node_id])


@pytest.mark.parametrize("sample", [torch.tensor([], dtype=torch.int64), torch.tensor([5]), torch.arange(12)])
def test_none_one_and_all_nodes(sample: Tensor) -> None:
    graph, parts = random_graph(12, 50), torch.arange(12) % 3
    found = all_restricted(graph, parts, 3, sample, "hybrid")
    x = torch.ones(sample.numel(), 1, dtype=torch.float64)
    edges, _ = subgraph(sample, graph.edge_index, relabel_nodes=True, num_nodes=12)
    expected = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
    assert torch.equal(product([f.share for f in found], "sum_transfer", x), expected)
