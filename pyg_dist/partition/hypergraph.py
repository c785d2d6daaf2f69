"""Hypergraphs whose connectivity is the number of rows that an exchange sends: column nets, the medium grain, and nets
of random mini-batches, whose mean connectivity estimates what a mini-batch sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pyg_dist.errors import DataError, OptionError
from pyg_dist.partition.inputs import Array, node_work


@dataclass(frozen=True)
class HypergraphModel:
    """Nets in CSR form over nodes with integer weights.

    Net ``e`` joins the nodes ``pin[start[e]:start[e + 1]]``, ascending, two or more; each part that it reaches beyond
    the first costs ``net_weight[e]``. ``weight[i] >= 1``.
    """

    start: Array
    pin: Array
    weight: Array
    net_weight: Array

    @property
    def num_nodes(self) -> int:
        return int(self.weight.size)

    @property
    def num_nets(self) -> int:
        """Number of nets."""
        return int(self.start.size) - 1

    def weight_below(self, bound: int) -> Array:
        """The weights divided such that their sum is at most ``bound``, for solvers that count in 32 bits."""
        unit = -(-int(self.weight.sum()) // bound)
        weight: Array = np.maximum(self.weight // unit, 1)
        return weight

    def connectivity(self, parts: Array) -> int:
        """Sum of ``net_weight (lambda - 1)``, with lambda the number of parts that a net reaches. Not collective."""
        net = np.repeat(np.arange(self.num_nets), np.diff(self.start))
        num_parts = int(parts.max(initial=0)) + 1
        reached = np.unique(net * num_parts + parts[self.pin]) // num_parts
        return int(self.net_weight @ (np.bincount(reached, minlength=self.num_nets) - 1)) if self.num_nets else 0


def ranges(first: Array, size: Array) -> Array:
    """The integers ``first[k]``, ``first[k] + 1``, ... of ranges of these sizes, one range after another."""
    before = np.cumsum(size) - size
    found: Array = np.arange(int(size.sum())) + np.repeat(first - before, size)
    return found


def nets_of(owner: Array, pin: Array, num_nodes: int) -> tuple[Array, Array]:
    """``start`` and ``pin`` of a net for each owner, which joins it with its pins; nets of one pin are left out.

    Shapes: owner, pin: ``[E]`` integers, duplicates and equal ends allowed
    """
    from scipy import sparse

    nodes = np.arange(num_nodes)
    # Booleans: a duplicate is or-ed away, where small integers could wrap around to zero.
    rows, columns = np.concatenate([owner, nodes]), np.concatenate([pin, nodes])
    shape = (num_nodes, num_nodes)
    nets = sparse.coo_array((np.ones(rows.size, dtype=bool), (rows, columns)), shape=shape).tocsr()
    nets = nets[np.diff(nets.indptr) > 1]
    nets.sort_indices()
    return nets.indptr, nets.indices


def build_hypergraph_model(edge_index: Tensor, num_nodes: int, train_mask: Tensor | None = None) -> HypergraphModel:
    r"""Build the column-net model of a graph with valid ``edge_index``.

    The net of source ``j`` joins ``j`` with the targets of its edges,

    .. math:: \mathrm{pins}(n_j) = \{j\} \cup \{i : (j \to i) \in E\},

    the nodes that need row ``j`` (Demirci et al., 4.3.2, eq. 10): each of its :math:`\lambda_j` parts but that of ``j``
    receives the row once. (The graph model counts a row once an edge, in both directions.) All nets cost the same,
    since all rows are equally wide. The nodes' weights are those of the graph model; the paper takes in-degrees alone.
    """
    source, target = edge_index.detach().cpu().numpy()
    start, pin = nets_of(source, target, num_nodes)
    weight = node_work(np.bincount(target, minlength=num_nodes), train_mask)
    return HypergraphModel(start, pin, weight, np.ones(start.size - 1, np.int64))


def build_cover_model(
    edge_index: Tensor, num_nodes: int, is_post: Array, train_mask: Tensor | None = None
) -> HypergraphModel:
    r"""Build the medium-grain model for a choice of post or pre per edge.

    An edge ``j -> i`` is a pin of one net: of ``j``'s row net, if it is post, else of ``i``'s sum net,

    .. math::
        \mathrm{pins}(r_j) = \{j\} \cup \{i : (j \to i) \text{ is post}\}, \quad
        \mathrm{pins}(s_i) = \{i\} \cup \{j : (j \to i) \text{ is pre}\}.

    A row net sends row ``j`` to each of its other parts, a sum net receives a sum from each of its other parts: the
    connectivity is exactly the number of rows that an exchange with this choice sends, and never less than the hybrid
    exchange's, which chooses best (Pelt and Bisseling, "A medium-grain method for fast 2D bipartitioning of sparse
    matrices", 2014; the product is the s2D of Kayaaslan, Aykanat and Ucar, 2018). An edge is the work of its target's
    rank if it is post, of its source's rank if it is pre.
    """
    source, target = edge_index.detach().cpu().numpy()
    rows = nets_of(source[is_post], target[is_post], num_nodes)
    sums = nets_of(target[~is_post], source[~is_post], num_nodes)
    start = np.concatenate([rows[0], sums[0][1:] + rows[0][-1]])
    weight = node_work(np.bincount(np.where(is_post, target, source), minlength=num_nodes), train_mask)
    return HypergraphModel(start, np.concatenate([rows[1], sums[1]]), weight, np.ones(start.size - 1, np.int64))


def choice_by_degree(edge_index: Tensor, num_nodes: int) -> Array:
    """Post where the source has at least as many out-edges as the target has in-edges: a first choice, bool ``[E]``."""
    source, target = edge_index.detach().cpu().numpy()
    out_degree, in_degree = (np.bincount(ends, minlength=num_nodes) for ends in (source, target))
    by_degree: Array = out_degree[source] >= in_degree[target]
    return by_degree


DrawBatch = Callable[[int, int], object]
"""(seed, step) -> ids of the nodes of a mini-batch."""

_DRAWS = 8  # of each node, on average, at least
_EDGE_DRAWS = 20  # of each edge, on average: with 8, nodes of few edges are put where chance has drawn them
_MOST_DRAWS = 250  # of each node, on average: in small mini-batches, edges are rare
_SHARE = 10  # by default one in so many nodes is in a mini-batch


@dataclass(frozen=True)
class Batches:
    """The mini-batches of the stochastic model, and the accuracy with which their nets are sampled."""

    size: int | None = None  # nodes of a uniform mini-batch; None: a tenth of all
    draw: DrawBatch | None = None  # draws other mini-batches than uniform ones
    theta: float = 0.1  # the error of a net's mean connectivity
    delta: float = 0.5  # the probability that it is larger

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise OptionError(f"Expected batches of one node or more (got {self.size})")
        if not (0 < self.theta < math.inf and 0 < self.delta < 1):
            raise OptionError(f"Expected theta > 0 and 0 < delta < 1 (got {self.theta} and {self.delta})")

    def num_nets(self, num_parts: int) -> int:
        """As many nets that their mean connectivity is within theta of the expected, but for delta (eq. 14)."""
        return math.ceil((num_parts - 1) ** 2 / (2 * self.theta**2) * math.log(2 / self.delta))

    def nodes(self, seed: int, step: int, num_nodes: int) -> Array:
        """Ids of one mini-batch, ascending, each once."""
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
    """``size`` distinct nodes, drawn uniformly: a function of (seed, step)."""
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
    r"""Build the stochastic model of a graph with valid ``edge_index`` (Demirci et al., Alg. 3).

    It has the column nets of the subgraphs that mini-batches :math:`V'_1, V'_2, \dots` induce: for each ``j`` in
    :math:`V'_b` the net :math:`\{j\} \cup \{i \in V'_b : (j \to i) \in E\}`. There are enough batches for
    :meth:`Batches.num_nets` nets and to draw each node eight times and each edge twenty times on average (of a node's
    edges, :math:`|V| / |V'_b|` count at most). Equal nets become one, weighted by their number; a node that was never
    drawn has its net of the whole graph. Nodes weigh as much as in full batches: each is as likely to be drawn.
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
    """``start`` and ``pin`` of the nets with two pins or more in the subgraph of ``ids``."""
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
    """Equal nets as one: ``start``, ``pin`` and the number of each.

    Nets are compared by two sums of random 64-bit keys of their nodes: the probability that any two different ones
    agree is below 2^-100 for as many nets as fit into memory.
    """
    if start.size == 1:
        return start, pin, np.empty(0, np.int64)
    keys = np.random.default_rng(0).integers(0, 2**63, (2, num_nodes), dtype=np.uint64)
    digest = np.stack([np.add.reduceat(key[pin], start[:-1]) for key in keys], axis=1)
    _, first, count = np.unique(digest, axis=0, return_index=True, return_counts=True)
    size = np.diff(start)[first]
    return np.concatenate([[0], np.cumsum(size)]), pin[ranges(start[first], size)], count
