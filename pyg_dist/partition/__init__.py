"""Which rank owns which node: pure functions of (graph, number of parts, options), without communication."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.errors import OptionError
from pyg_dist.partition.hypergraph import Batches, build_hypergraph_model, build_stochastic_model
from pyg_dist.partition.inputs import as_edges, check_ends, check_given, node_work
from pyg_dist.partition.kahypar import hypergraph_parts
from pyg_dist.partition.metis import build_graph_model, metis_parts
from pyg_dist.partition.solver import Preset, Solver, SolverOptions, random_parts, require_memory
from pyg_dist.partition.stream import chunks_of, stream_parts

__all__ = ["Batches", "check_given", "partition"]

METHODS = ("metis", "metis-cut", "hypergraph", "stochastic", "stream", "random")


def partition(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    method: str | Tensor | np.typing.NDArray[np.generic] = "metis",
    train_mask: Tensor | None = None,
    epsilon: float = 0.03,
    seed: int = 0,
    solver: Solver = "mt-kahypar",
    preset: Preset | None = None,
    memory: int | None = None,
    batches: Batches | None = None,
) -> Tensor:
    """Return the part of every node. Deterministic for given arguments; not collective.

    Any number of parts is allowed, also more than there are nodes; parts may then be empty.

    Args:
        edge_index: Source and target of each edge, in any order; self loops and duplicates are allowed.
        num_nodes: Number of nodes N.
        num_parts: Number of parts P.
        method: "metis" (few rows to send, balanced work), "metis-cut" (METIS for few cut edges, as papers use it),
            "hypergraph" (the goal of "metis", with fewer rows for more time), "stochastic" (few rows in mini-batches),
            "stream" (passes over the edges in O(N) memory), "random" (balanced node counts), or the parts themselves,
            one integer a node. ("cover" and "metis-cover" are one step higher: :mod:`pyg_dist.plan.parts`.)
        train_mask: Nodes with a loss, which are spread over the parts, except at random.
        epsilon: How much heavier than the mean a part may be, as a fraction, except at random.
        seed: Of the solver, of mini-batches and of the random partition. (Mt-KaHyPar's deterministic presets find the
            same parts for every seed.)
        solver: Of hypergraphs: "mt-kahypar", on all cores, or "kahypar", on one.
        preset: Mt-KaHyPar's; None: "deterministic".
        memory: Bytes that a method may take, by an estimate; None: as many as it likes.
        batches: The mini-batches of "stochastic"; None: uniform ones of a tenth of the nodes.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)` integer, train_mask :math:`(|V|)` or :math:`(|V|, K)` boolean
        - **output:** parts :math:`(|V|)` int32, each in :math:`[0, P)`

    Raises:
        DataError: If edge_index, train_mask or given parts have the wrong shape, dtype or range.
        OptionError: If another argument is not valid, the method would take too much memory, or the solver fails.
        MissingPackageError: If the package of the method is not installed: pymetis, mtkahypar or kahypar.

    Example:
        >>> graph = KarateClub()[0]
        >>> parts = partition(graph.edge_index, graph.num_nodes, 2, "random")
        >>> parts.shape, parts.bincount().tolist()
        (torch.Size([34]), [17, 17])
    """
    if isinstance(num_parts, bool) or not isinstance(num_parts, Integral | int):
        raise OptionError(f"Expected 'num_parts' to be an integer (got {num_parts!r})")
    if num_parts < 1:
        raise OptionError(f"Expected at least one part (got num_parts={num_parts})")
    edge_index = as_edges(edge_index)
    check_ends(edge_index, num_nodes, "edge_index")
    if not isinstance(method, str):
        return check_given(method, num_nodes, num_parts)
    if method not in METHODS:
        raise OptionError(
            f"Expected 'method' to be one of {', '.join(METHODS)} or a LongTensor of parts (got {method!r})"
        )
    options = SolverOptions(epsilon, seed, solver, preset, memory)
    if batches is not None and method != "stochastic":
        raise OptionError(f"Expected batches with method='stochastic' (got {method!r}): leave them out")
    if num_parts == 1:
        return host.zeros(num_nodes, dtype=torch.int32)
    if num_parts >= num_nodes:  # one node each, which METIS cannot do
        return host.arange(num_nodes, dtype=torch.int32)
    require_memory(method, num_nodes, edge_index.shape[1], num_parts, memory)
    if method == "random":
        return random_parts(num_nodes, num_parts, seed)
    if method == "stream":
        weight = node_work(np.bincount(edge_index[1].numpy(), minlength=num_nodes), train_mask)
        return stream_parts(chunks_of(edge_index), weight, num_parts, epsilon, seed)
    if method in ("metis", "metis-cut"):
        # The model is built in the call, so that only METIS refers to it.
        return metis_parts(
            build_graph_model(edge_index, num_nodes, train_mask), num_parts, epsilon, seed, method == "metis-cut"
        )
    if method == "hypergraph":
        return hypergraph_parts(build_hypergraph_model(edge_index, num_nodes, train_mask), num_parts, options)
    model = build_stochastic_model(edge_index, num_nodes, num_parts, batches or Batches(), seed, train_mask)
    return hypergraph_parts(model, num_parts, options)
