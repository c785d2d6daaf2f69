"""Parts that meet more than one goal: each kind of nodes spread evenly, or each graph of a batch whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.stream import Chunks


def owners_of_hyperedges(incidence: Tensor, parts: Tensor, num_hyperedges: int, num_parts: int) -> Tensor:
    """The owner of each hyperedge: the part with most of its nodes, of several such parts each in turn.

    Shapes: incidence int64 ``[2, K]``, nodes and hyperedges; parts ``[N]`` integers; output int64 ``[M]``

    Example:
        >>> incidence = torch.tensor([[0, 1, 2, 3, 0, 3], [0, 0, 0, 1, 2, 2]])
        >>> owners_of_hyperedges(incidence, torch.tensor([0, 0, 1, 1]), 5, num_parts=2).tolist()
        [0, 1, 1, 1, 0]
    """
    node, hyperedge = incidence
    pair, count = torch.unique(hyperedge * num_parts + parts[node].long(), return_counts=True)
    hyperedge, part = pair // num_parts, pair % num_parts
    best = 2 * host.arange(num_hyperedges) % num_parts  # of those without nodes
    best.scatter_reduce_(0, hyperedge, count * num_parts + (part + hyperedge) % num_parts, "amax")
    return (best - host.arange(num_hyperedges)) % num_parts


def balanced_by_kind(chunks: Chunks, parts: Tensor, sizes: Sequence[int], num_parts: int, epsilon: float) -> Tensor:
    """Parts in which each kind's in-edges and nodes are balanced, made from parts that are balanced as a whole.

    The convs of kinds run one after another, so each kind has to be balanced, but pymetis gives METIS one weight a
    node. From a part with too many in-edges or nodes of a kind, nodes with few neighbours there for their weight move,
    each to the part with room where it has most. Greedy, deterministic; O(E + N log N) time. With edges on disk, O(N)
    memory, and a number for each part of each node that may move.

    ``chunks``: passes over all edges, integers ``[2, c]`` each. ``sizes``: nodes of each kind, which follow one
    another. ``epsilon``: how much heavier than the mean a part of a kind may be.

    Shapes: ``[N]`` integers -> int32 ``[N]``

    Example:
        >>> edge_index, parts = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), torch.tensor([0, 0, 1, 1, 0, 0, 0, 0])
        >>> balanced_by_kind(lambda: [edge_index.numpy()], parts, [4, 4], num_parts=2, epsilon=0.03).tolist()
        [0, 0, 1, 1, 0, 0, 1, 1]
    """
    found: Array = parts.numpy().astype(np.int64)
    weights = np.ones((2, found.size), np.int64)  # in-edges, nodes
    weights[0] = 0
    for ends in chunks():
        np.add.at(weights[0], ends[1], 1)
    first = 0
    for size in sizes:
        nodes = slice(first, first + size)
        load = np.stack([np.bincount(found[nodes], weight[nodes], minlength=num_parts) for weight in weights])
        mean = load.sum(1) / num_parts
        limit = np.maximum((1 + epsilon) * mean, np.ceil(mean))  # at least one part has that many
        for which in (0, 1, 0, 1, 0):  # balancing one weight may unbalance the other
            _balance(found, chunks, weights, load, limit, nodes, which)
        first += size
    return torch.from_numpy(found.astype(np.int32))


def _balance(parts: Array, chunks: Chunks, weights: Array, load: Array, limit: Array, nodes: slice, which: int) -> None:
    """Move nodes of one kind, in place, until each part has at most its limit of the weight ``which``."""
    heavy = load[which] > limit[which]
    if not heavy.any():
        return
    num_parts = heavy.size
    movable = np.zeros(parts.size, bool)
    movable[nodes] = heavy[parts[nodes]] & (weights[which, nodes] > 0)
    number = np.cumsum(movable) - 1
    neighbours = np.zeros((int(movable.sum()), num_parts), np.int32)
    for ends in chunks():
        for one, other in (ends, ends[::-1]):
            edges = movable[one] & (one != other)
            np.add.at(neighbours, (number[one[edges]], parts[other[edges]]), 1)
    candidates = np.flatnonzero(movable)
    lost = neighbours[np.arange(candidates.size), parts[candidates]] / weights[which, candidates]
    order = np.lexsort((candidates, lost))
    lightest = weights[:, candidates].min(1)
    some_have_room = bool((load + lightest[:, None] <= limit[:, None]).all(0).any())
    for keeps_limits in (True, False) if some_have_room else (False,):  # nodes that a part has room for come first
        for k in order:
            node = candidates[k]
            part, cost = parts[node], weights[:, node]
            if load[which, part] <= limit[which]:
                continue
            after = load + cost[:, None]
            room = (after <= limit[:, None]).all(0)
            if not room.any():
                if keeps_limits:
                    continue
                fits = after[which] <= max(limit[which], after[which].min())
                excess = (after / np.maximum(limit, 1)[:, None]).max(0)
                room = fits & (excess <= excess[fits].min())
            to = int(np.lexsort((load[which], -neighbours[k], ~room))[0])
            if after[which, to] >= load[which, part]:
                continue
            parts[node] = to
            load[:, part] -= cost
            load[:, to] += cost


def whole_graphs(edge_index: Tensor, graph: Tensor, num_parts: int) -> tuple[Tensor, float] | None:
    """Each graph of a batch whole in one part: the parts, int32 ``[N]``, and heaviest part over mean.

    A graph weighs its nodes and edges. The heaviest comes first, and each goes to the part that is lightest so far
    (Graham, Bounds on multiprocessing timing anomalies, 1969), so the parts are the same on every rank. ``graph`` is
    the ``batch`` of a PyG ``Batch``, int64 ``[N]``; ``None``: an edge joins two of its graphs.
    """
    source, target = graph[edge_index]
    if graph.numel() == 0 or int(graph.min()) < 0 or not torch.equal(source, target):
        return None
    weight = torch.bincount(graph) + torch.bincount(target, minlength=int(graph.max()) + 1)
    part_of, lightest = torch.zeros_like(weight, dtype=torch.int32), [(0, part) for part in range(num_parts)]
    heapify(lightest)
    for number in weight.argsort(descending=True, stable=True).tolist():
        total, part = lightest[0]
        part_of[number] = part
        heapreplace(lightest, (total + int(weight[number]), part))
    return part_of[graph], max(lightest)[0] * num_parts / int(weight.sum())
