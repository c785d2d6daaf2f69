"""A partition by passes over the edges, a chunk at a time, in memory that does not grow with their number.

Nodes first form clusters: each joins the one that most of its neighbours are in (label propagation with a limit on
size: Meyerhenke, Sanders and Schulz, 2014), clusters then join into larger ones likewise. They are packed into parts,
and nodes move to the part of most of their neighbours while it has room (restreaming: Nishimura and Ugander, 2013;
Fennel's limit on load: Tsourakakis et al., 2014). Memory is O(N + P) and a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from pyg_dist.partition.inputs import Array

Chunks = Callable[[], Iterable[Array]]
"""Passes over the edges: integers ``[2, c]``, the same edges in each pass."""

CHUNK = 1 << 20
"""Edges at a time."""

_PASSES = 4  # of each level of clusters
_LEVELS = 4
_PARTS_PASSES = 8
_CHANCES = 1 << 24
_CLUSTERS_BY_PART = 16  # at least so many are left to pack


def chunks_of(edge_index: Tensor, size: int = CHUNK) -> Chunks:
    """Passes over edges in memory, or mapped from a file."""
    edges = edge_index.numpy()
    return lambda: (edges[:, low : low + size] for low in range(0, edges.shape[1], size))


def stream_parts(chunks: Chunks, weight: Array, num_parts: int, epsilon: float, seed: int) -> Tensor:
    """A part for every node, int32 ``[N]``, such that many edges stay inside and the parts' weights are balanced.

    Deterministic for a seed and an order of the edges; about 40 passes. ``weight`` is that of each node, int64
    ``[N]``. Weights of parts may exceed the mean by ``epsilon``, or by a single node.
    """
    rng = np.random.default_rng(seed % 2**63)
    mean = float(weight.sum()) / num_parts
    label = np.arange(weight.size)
    for _ in range(_LEVELS):
        cluster, size = np.arange(int(label.max()) + 1), np.bincount(label, weight)
        for _ in range(_PASSES):
            _move(chunks, label, cluster, size, size.copy(), mean / _CLUSTERS_BY_PART, rng)
        joined = np.unique(cluster[label], return_inverse=True)[1]
        if joined.max() == label.max() or joined.max() < _CLUSTERS_BY_PART * num_parts:
            label = joined
            break
        label = joined
    size = np.bincount(label, weight)
    part, load = _packed(size, num_parts), np.zeros(num_parts)
    parts = part[label]
    load += np.bincount(parts, weight, num_parts)
    limit = max((1 + epsilon) * mean, float(load.max()))
    nodes = np.arange(weight.size)
    for number in range(_PARTS_PASSES):
        # Parts that packing left too heavy come down to the limit step by step.
        bound = max((1 + epsilon) * mean, limit - (limit - (1 + epsilon) * mean) * (number + 1) / _PARTS_PASSES)
        _move(chunks, nodes, parts, weight.astype(float), load, bound, rng)
    _settle(parts, weight, load, (1 + epsilon) * mean)
    return torch.from_numpy(parts.astype(np.int32))


def _move(
    chunks: Chunks, item: Array, group: Array, size: Array, load: Array, limit: float, rng: np.random.Generator
) -> None:
    """One pass: items (nodes or clusters) move to the group (a cluster or a part) of most neighbours, within the limit.

    ``item`` is that of each node, ``group`` that of each item, changed in place with ``load``. Half of the moves are
    left out, so that neighbours do not swap groups for ever.
    """
    load[:] = np.bincount(group, size, load.size)
    for edges in chunks():
        ends = item[edges]
        ends = ends[:, ends[0] != ends[1]].astype(np.int64)
        if ends.shape[1] == 0:
            continue
        mover, other = np.concatenate([ends[0], ends[1]]), np.concatenate([ends[1], ends[0]])
        pair, votes = np.unique(mover * load.size + group[other], return_counts=True)
        mover, goal = pair // load.size, pair % load.size
        stays = group[mover] == goal
        fits = (load[goal] + size[mover] <= limit) | stays
        mover, goal, votes, stays = mover[fits], goal[fits], votes[fits], stays[fits]
        if mover.size == 0:
            continue
        # Of one item's wishes the largest in this order: most votes, where it is already, then by chance.
        wish = (votes * 2 + stays) * _CHANCES + rng.integers(0, _CHANCES, mover.size)
        begin = np.flatnonzero(np.append(True, mover[1:] != mover[:-1]))
        is_best = wish == np.repeat(np.maximum.reduceat(wish, begin), np.diff(np.append(begin, mover.size)))
        goes = np.flatnonzero(is_best & ~stays)
        mover, goal = mover[goes], goal[goes]
        is_first = np.append(True, mover[1:] != mover[:-1])[: mover.size]  # of equal wishes
        goes = np.flatnonzero(is_first & (rng.random(mover.size) < 0.5))
        # Of those that go to one group, in an order by chance, the first whose weights fit.
        goes = goes[np.argsort(goal[goes] * goes.size + rng.permutation(goes.size))]
        mover, goal = mover[goes], goal[goes]
        taken = np.cumsum(size[mover])
        begin = np.flatnonzero(np.append(True, goal[1:] != goal[:-1])) if mover.size else np.empty(0, np.int64)
        before = np.repeat((taken - size[mover])[begin], np.diff(np.append(begin, mover.size)))
        fits = load[goal] + taken - before <= limit
        mover, goal = mover[fits], goal[fits]
        np.subtract.at(load, group[mover], size[mover])
        np.add.at(load, goal, size[mover])
        group[mover] = goal


def _packed(size: Array, num_parts: int) -> Array:
    """The part of each cluster: neighbours in number side by side, cut where a part is full."""
    middle = np.cumsum(size) - size / 2
    part: Array = np.minimum((middle * num_parts / max(float(size.sum()), 1.0)).astype(np.int64), num_parts - 1)
    return part


def _settle(parts: Array, weight: Array, load: Array, limit: float) -> None:
    """Move the lightest nodes of parts above the limit to the part with the least load."""
    for part in np.flatnonzero(load > limit):
        mine = np.flatnonzero(parts == part)
        for node in mine[np.argsort(weight[mine], kind="stable")]:
            target = int(load.argmin())
            if load[part] <= limit or load[target] + weight[node] >= load[part]:
                break
            parts[node] = target
            load[part] -= weight[node]
            load[target] += weight[node]
