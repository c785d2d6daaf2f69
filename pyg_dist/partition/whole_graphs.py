"""Parts of a batch of many graphs, each of them whole on one rank: no row is sent."""

from __future__ import annotations

from heapq import heapify, heapreplace

import torch
from torch import Tensor


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
