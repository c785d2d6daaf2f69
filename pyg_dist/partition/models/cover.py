"""The medium-grain hypergraph: each edge is in the net of its source, whose row is sent, or of its target's sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from pyg_dist.partition.models.hypergraph import HypergraphModel, nets_of
from pyg_dist.partition.node_work import node_work

Array = np.ndarray[Any, Any]


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

    Raises:
        DataError: If train_mask has the wrong length or dtype.
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
