"""The stochastic hypergraph: nets of random mini-batches, whose mean connectivity estimates what any of them sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pyg_dist.errors import DataError, OptionError
from pyg_dist.partition.hypergraph import HypergraphModel, nets_of, ranges
from pyg_dist.partition.inputs import Array, node_work

DrawBatch = Callable[[int, int], object]
"""(seed, step) -> ids of the nodes of a mini-batch."""

_DRAWS = 8  # of each node, on average, at least
_EDGE_DRAWS = 20  # of each edge, on average: with 8, nodes of few edges are put where chance has drawn them
_MOST_DRAWS = 250  # of each node, on average: in small mini-batches, edges are rare
_SHARE = 10  # by default one in so many nodes is in a mini-batch


@dataclass(frozen=True)
class Batches:
    """What mini-batches are like, and how well their nets are sampled."""

    size: int | None = None  # nodes of a uniform mini-batch; None: a tenth of all
    draw: DrawBatch | None = None  # the mini-batches themselves, in the place of uniform ones
    theta: float = 0.1  # the error of a net's mean connectivity
    delta: float = 0.5  # the probability that it is larger

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            OptionError: A value out of range.
        """
        if self.size is not None and self.size < 1:
            raise OptionError(f"Expected batches of one node or more (got {self.size})")
        if not (0 < self.theta < math.inf and 0 < self.delta < 1):
            raise OptionError(f"Expected theta > 0 and 0 < delta < 1 (got {self.theta} and {self.delta})")

    def num_nets(self, num_parts: int) -> int:
        """The fewest nets of which the mean connectivity is within theta of the expected, but for delta (eq. 14)."""
        return math.ceil((num_parts - 1) ** 2 / (2 * self.theta**2) * math.log(2 / self.delta))

    def nodes(self, seed: int, step: int, num_nodes: int) -> Array:
        """Ids of one mini-batch, ascending, each once.

        Raises:
            DataError: ``draw`` returned something else than ids of nodes.
        """
        if self.draw is None:
            return np.sort(uniform_batch(seed, step, num_nodes, min(self.size or -(-num_nodes // _SHARE), num_nodes)))
        drawn = self.draw(seed, step)
        ids = np.asarray(drawn.cpu() if isinstance(drawn, Tensor) else drawn)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() >= num_nodes)):
            raise DataError(
                f"Expected batches to return ids of nodes in [0, {num_nodes}) (got {ids.dtype}, {list(ids.shape)})"
            )
        return np.unique(ids)


def uniform_batch(seed: int, step: int, num_nodes: int, size: int) -> Array:
    """``size`` distinct nodes, each set of them as likely, as a function of (seed, step)."""
    drawn: Array = np.random.default_rng([seed % 2**63, step]).choice(num_nodes, size, replace=False, shuffle=False)
    return drawn


def build_stochastic_model(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    batches: Batches,
    seed: int = 0,
    train_mask: Tensor | None = None,
) -> HypergraphModel:
    r"""Build the stochastic model of a graph with valid ``edge_index`` (Demirci et al., Alg. 3). Not collective.

    Of mini-batches :math:`V'_1, V'_2, \dots` the column nets of the induced subgraphs are put together: for each ``j``
    in :math:`V'_b` the net :math:`\{j\} \cup \{i \in V'_b : (j \to i) \in E\}`. There are as many batches as
    give :meth:`Batches.num_nets` nets and draw each node eight times and each edge twenty times on average (of a node's
    edges, :math:`|V| / |V'_b|` count at most). Equal nets become one, their count its weight; a node that was never
    drawn keeps its net of the whole graph. Nodes weigh what they do in full batches: each is as likely to be drawn.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)`, train_mask :math:`(|V|)` or :math:`(|V|, K)` boolean
    """
    source, target = edge_index.detach().cpu().numpy()
    order = np.argsort(source, kind="stable")
    target_by_source, first = target[order], np.searchsorted(source[order], np.arange(num_nodes + 1))
    starts, pins, sizes = [np.zeros(1, np.int64)], [np.empty(0, np.int64)], 0
    drawn, num_drawn, num_edges, step = np.zeros(num_nodes, dtype=bool), 0, 0, 0
    wanted = max(batches.num_nets(num_parts), _DRAWS * num_nodes)
    out_degree = np.diff(first)
    while num_drawn < wanted or (
        num_drawn < _MOST_DRAWS * num_nodes
        and num_edges < _EDGE_DRAWS * np.minimum(out_degree, num_nodes * step / num_drawn).sum()
    ):
        ids = batches.nodes(seed, step, num_nodes)
        if ids.size == 0:
            raise DataError(f"Expected mini-batches with nodes (got an empty one at step {step})")
        drawn[ids], num_drawn, step = True, num_drawn + ids.size, step + 1
        start, pin = _batch_nets(ids, first, target_by_source, num_nodes)
        starts.append(start[1:] + sizes)
        pins.append(pin)
        sizes += pin.size
        num_edges += pin.size - (start.size - 1)
    start, pin, count = _merged(np.concatenate(starts), np.concatenate(pins), num_nodes)
    is_undrawn = ~drawn[source]
    kept = nets_of(source[is_undrawn], target[is_undrawn], num_nodes)
    weight = node_work(np.bincount(target, minlength=num_nodes), train_mask)
    return HypergraphModel(
        np.concatenate([start, kept[0][1:] + start[-1]]),
        np.concatenate([pin, kept[1]]),
        weight,
        np.concatenate([count, np.ones(kept[0].size - 1, np.int64)]),
    )


def _batch_nets(ids: Array, first: Array, target: Array, num_nodes: int) -> tuple[Array, Array]:
    """The nets of two pins and more of the subgraph of ``ids``."""
    slot = np.full(num_nodes, -1, np.int64)
    slot[ids] = np.arange(ids.size)
    degree = first[ids + 1] - first[ids]
    owner = np.repeat(np.arange(ids.size), degree)
    edge = ranges(first[ids], degree)
    inside = slot[target[edge]] >= 0
    key = np.concatenate([owner[inside] * ids.size + slot[target[edge[inside]]], np.arange(ids.size) * (ids.size + 1)])
    key = np.unique(key)
    owner, pin = key // ids.size, ids[key % ids.size]
    size = np.bincount(owner, minlength=ids.size)
    return np.concatenate([[0], np.cumsum(size[size > 1])]), pin[(size > 1)[owner]]


def _merged(start: Array, pin: Array, num_nodes: int) -> tuple[Array, Array, Array]:
    """Equal nets as one: ``start``, ``pin`` and how many there were.

    Nets are compared by two sums of random 64-bit keys of their nodes: different ones agree with a probability below
    2^-100 for any number of nets that fits into memory.
    """
    if start.size == 1:
        return start, pin, np.empty(0, np.int64)
    keys = np.random.default_rng(0).integers(0, 2**63, (2, num_nodes), dtype=np.uint64)
    digest = np.stack([np.add.reduceat(key[pin], start[:-1]) for key in keys], axis=1)
    _, first, count = np.unique(digest, axis=0, return_index=True, return_counts=True)
    size = np.diff(start)[first]
    return np.concatenate([[0], np.cumsum(size)]), pin[ranges(start[first], size)], count
