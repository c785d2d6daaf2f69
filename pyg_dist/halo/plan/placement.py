"""Placement of parts on ranks if several ranks share a machine: parts that exchange much are put on one machine."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.halo.plan.remote_edges import ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.sizes import rows_between

_PASSES = 8
"""Over all parts, at most: with many parts the last ones gain next to nothing, and each takes O(P^2) time."""


def place(edge_index: Tensor, parts: Tensor, num_ranks: int, ranks_per_node: int, exchange: ExchangeKind) -> Tensor:
    """The same parts, renumbered by :func:`rank_of_part` of the rows that ``exchange`` sends. O(E log E) time.

    Deterministic, not collective. How many rows go from one part to another does not depend on their numbers.

    Shapes:
        - edge_index: int64 ``[2, E]``
        - parts: ``[N]`` integers
        - output: ``[N]``, the type of ``parts``
    """
    if num_ranks <= ranks_per_node or ranks_per_node == 1:
        return parts
    remote = RemoteEdges.of(edge_index, parts, num_ranks)
    rank = rank_of_part(rows_between(remote, remote.cover(exchange)), ranks_per_node)
    return rank.to(parts.dtype)[parts.long()]


def node_of_rank(num_ranks: int, ranks_per_node: int) -> Tensor:
    """Ranks lie on nodes in their order, ``ranks_per_node`` on each and the rest on the last: int64 ``[P]``."""
    return torch.arange(num_ranks) // ranks_per_node


def rows_between_nodes(rows: Tensor, ranks_per_node: int) -> int:
    """How many of the rows ``[P, P]``, sender by receiver, leave their node."""
    return _cut(rows, node_of_rank(rows.shape[0], ranks_per_node))


def rank_of_part(rows: Tensor, ranks_per_node: int) -> Tensor:
    """A rank for every part such that few rows go between nodes: never more than with the parts' own order.

    Approximate: nodes are grown greedily, then parts change places while that helps (Kernighan and Lin's exchange, one
    pair at a time); the parts' own order is improved likewise, and the better of the two is taken. METIS would not give
    every node exactly its number of parts. Deterministic, O(P^2) time a pass.

    Shapes:
        - rows: int64 ``[P, P]``, sender by receiver
        - output: int64 ``[P]``, a permutation
    """
    node = _nodes_of_parts(rows, node_of_rank(rows.shape[0], ranks_per_node))
    return torch.argsort(torch.argsort(node, stable=True))


def merged_parts(rows: Tensor, num_ranks: int) -> Tensor:
    """A rank for every part where there are fewer ranks than parts: parts with much traffic on one rank.

    Approximate and deterministic, as :func:`rank_of_part`. Numbers of parts by rank differ by one at most.

    Shapes:
        - rows: int64 ``[P, P]``, sender by receiver
        - output: int64 ``[P]``, in ``[0, num_ranks)``
    """
    num_parts = rows.shape[0]
    return _nodes_of_parts(rows, torch.arange(num_parts) * num_ranks // num_parts)


def _nodes_of_parts(rows: Tensor, given: Tensor) -> Tensor:
    """Nodes as large as ``given``'s, between which few rows go."""
    traffic = (rows + rows.T).fill_diagonal_(0)
    starts = (given, _grown(traffic, given))
    return min((_improved(traffic, start) for start in starts), key=lambda n: _cut(traffic, n))


def _cut(rows: Tensor, node: Tensor) -> int:
    return int(rows[node[:, None] != node].sum())


def _grown(traffic: Tensor, node: Tensor) -> Tensor:
    """Nodes as large as ``node``'s: each begins with the busiest part left and takes in what exchanges most with it."""
    found, free, with_free = torch.empty_like(node), torch.ones_like(node, dtype=torch.bool), traffic.sum(1)
    for number, size in enumerate(torch.bincount(node).tolist()):
        attraction = with_free.clone()
        for count in range(size):
            part = int(torch.where(free, attraction, -1).argmax())
            found[part], free[part] = number, False
            with_free -= traffic[part]
            attraction = traffic[part] + (attraction if count else 0)
    return found


def _improved(traffic: Tensor, node: Tensor) -> Tensor:
    """``node`` after exchanges of two parts, the best one for each part in turn, until none helps or time is up."""
    node = node.clone()
    parts = traffic.any(1).nonzero().view(-1).tolist()  # an exchange helps one that has traffic
    towards = traffic.new_zeros(node.numel(), int(node.max()) + 1).index_add_(1, node, traffic)  # rows, part by node
    last = 0
    for turn, a in enumerate(parts * _PASSES):
        if turn - last >= len(parts):
            break
        at_home = towards.gather(1, node[:, None]).view(-1)
        gain = towards[a, node] - at_home[a] + towards[:, node[a]] - at_home - 2 * traffic[a]
        b = int(gain.argmax())
        if gain[b] <= 0:
            continue
        last = turn
        moved = traffic[:, b] - traffic[:, a]
        towards[:, node[a]] += moved
        towards[:, node[b]] -= moved
        node[[a, b]] = node[[b, a]]
    return node
