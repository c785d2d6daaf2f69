"""Hypergraphs with weights: column nets, whose connectivity is what a post aggregation sends, and the medium grain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pyg_dist.partition.inputs import Array, node_work


@dataclass(frozen=True)
class HypergraphModel:
    """Nets in CSR form over nodes with integer weights.

    Net ``e`` joins the nodes ``pin[start[e]:start[e + 1]]``, ascending, two or more. Each part beyond the first
    that it reaches costs ``net_weight[e]``; ``weight[i] >= 1``.
    """

    start: Array
    pin: Array
    weight: Array
    net_weight: Array

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self.weight.size)

    @property
    def num_nets(self) -> int:
        """Number of nets."""
        return int(self.start.size) - 1

    def weight_below(self, bound: int) -> Array:
        """The weights in units of which all together are at most ``bound``, for solvers that count in 32 bits."""
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
    """For each owner the net of the owner and its pins, in the form of :class:`HypergraphModel`: ``start``, ``pin``.

    Nets of one pin send nothing and are left out.

    Shapes:
        - **input:** owner, pin: ``[E]`` integers, duplicates and equal ends allowed
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
    r"""Build the column-net model of a graph with valid ``edge_index``. Not collective.

    The net of source ``j`` joins ``j`` with the targets of its edges,

    .. math:: \mathrm{pins}(n_j) = \{j\} \cup \{i : (j \to i) \in E\},

    those who need row ``j`` (Demirci et al., 4.3.2, eq. 10): owners of its :math:`\lambda_j` parts other than that of
    ``j`` receive the row, each once. The graph model counts a row once an edge, and in both directions. All nets cost
    the same, since all rows are equally wide. The nodes' weights are those of the graph model; the paper takes
    in-degrees alone.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)`, train_mask :math:`(|V|)` or :math:`(|V|, K)` boolean
        - **output:** start (at most :math:`|V| + 1`), pin (at most :math:`|V| + |E|`), weight :math:`(|V|)`
    """
    source, target = edge_index.detach().cpu().numpy()
    start, pin = nets_of(source, target, num_nodes)
    weight = node_work(np.bincount(target, minlength=num_nodes), train_mask)
    return HypergraphModel(start, pin, weight, np.ones(start.size - 1, np.int64))


def build_cover_model(
    edge_index: Tensor, num_nodes: int, is_post: Array, train_mask: Tensor | None = None
) -> HypergraphModel:
    r"""Build the medium-grain model for a choice of post or pre per edge. Not collective.

    An edge ``j -> i`` is a pin of one net: of ``j``'s row net, if it is post, else of ``i``'s sum net,

    .. math::
        \mathrm{pins}(r_j) = \{j\} \cup \{i : (j \to i) \text{ is post}\}, \quad
        \mathrm{pins}(s_i) = \{i\} \cup \{j : (j \to i) \text{ is pre}\}.

    A row net sends row ``j`` to each of its other parts, a sum net receives a sum from each of its other parts: the
    connectivity is exactly the number of rows that an exchange with this choice sends, and never less than the hybrid
    exchange's, which chooses best (Pelt and Bisseling, "A medium-grain method for fast 2D bipartitioning of sparse
    matrices", 2014; the product is the s2D of Kayaaslan, Aykanat and Ucar, 2018). An edge is the work of its target's
    rank if it is post, of its source's rank if it is pre.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)`, is_post :math:`(|E|)` boolean, train_mask :math:`(|V|)` or
          :math:`(|V|, K)` boolean
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
