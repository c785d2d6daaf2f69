"""Parts that meet more than one goal: each kind of nodes spread evenly, or each graph of a batch whole on one rank."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import torch
from torch import Tensor

from pyg_dist.partition.inputs import Array, node_work


def balanced_by_kind(edge_index: Tensor, parts: Tensor, sizes: list[int], num_parts: int, epsilon: float) -> Tensor:
    """Parts in which each kind of nodes is balanced, too, made of parts that are balanced as a whole: int32 ``[N]``.

    A kind's convs run one after another, so what counts for time and memory is the balance of each of them, which METIS
    does not know: pymetis hands it one weight a node. From a part that has too much of a kind, the nodes that have the
    fewest neighbours there move to parts with room, each to the one where it has most. Greedy, deterministic, not
    collective; O(E + N log N) time.

    ``sizes``: how many nodes each kind has; the nodes of a kind follow one another. ``epsilon``: how much heavier than
    the mean a part of a kind may be, of :func:`~.inputs.node_work`.

    Example:
        >>> edge_index, parts = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), torch.tensor([0, 0, 1, 1, 0, 0, 0, 0])
        >>> balanced_by_kind(edge_index, parts, [4, 4], num_parts=2, epsilon=0.03).tolist()
        [0, 0, 1, 1, 0, 0, 1, 1]
    """
    found: Array = parts.numpy().astype(np.int64)
    source, target = (end.numpy() for end in edge_index)
    weight = node_work(np.bincount(target, minlength=found.size))
    first = 0
    for size in sizes:
        _balance(found, source, target, weight, range(first, first + size), num_parts, epsilon)
        first += size
    return torch.from_numpy(found.astype(np.int32))


def _balance(
    parts: Array, source: Array, target: Array, weight: Array, kind: range, num_parts: int, epsilon: float
) -> None:
    """Move nodes of one kind, in place."""
    nodes = slice(kind.start, kind.stop)
    load = np.bincount(parts[nodes], weight[nodes], minlength=num_parts)
    limit = (1 + epsilon) * load.sum() / num_parts
    heavy = load > limit + weight[nodes].max(initial=0)
    if not heavy.any():
        return
    movable = np.zeros(parts.size, bool)
    movable[nodes] = heavy[parts[nodes]]
    number = np.cumsum(movable) - 1
    neighbours = np.zeros((int(movable.sum()), num_parts), np.int32)
    for one, other in ((source, target), (target, source)):
        edges = movable[one] & (one != other)
        np.add.at(neighbours, (number[one[edges]], parts[other[edges]]), 1)
    candidates = np.flatnonzero(movable)
    own = neighbours[np.arange(candidates.size), parts[candidates]]
    for k in np.lexsort((candidates, own)):  # the fewest neighbours to lose first
        node = candidates[k]
        part, cost = parts[node], weight[node]
        if load[part] <= limit:
            continue
        room = load + cost <= limit
        if not room.any():
            room = load == load.min()
        to = int(np.lexsort((load, -neighbours[k], ~room))[0])
        if load[to] + cost >= load[part]:
            continue
        parts[node] = to
        load[part] -= cost
        load[to] += cost


def whole_graphs(edge_index: Tensor, graph: Tensor, num_parts: int) -> tuple[Tensor, float] | None:
    """The part of each node, and how heavy the heaviest part is, as a multiple of the mean. Not collective.

    A graph weighs its nodes and edges. The heaviest comes first, and each goes to the part that is lightest so far
    (Graham, Bounds on multiprocessing timing anomalies, 1969), so the parts are the same on every rank.

    Args:
        edge_index: int64 ``[2, E]``.
        graph: the number of each node's graph, int64 ``[N]``, as ``batch`` of a PyG ``Batch``.
        num_parts: number of parts.

    Returns:
        int32 ``[N]`` and the multiple; ``None``: these are no graphs, since an edge goes from one to another.
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
