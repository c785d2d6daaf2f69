"""KaHyPar's direct k-way partition of a hypergraph model, on one core.

KaHyPar is under the GPL: it is no dependency, and imported only where it is named.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor

from pyg_dist.errors import OptionError
from pyg_dist.partition.hypergraph import HypergraphModel
from pyg_dist.partition.solver import SolverOptions, explained_failure, package

_MAX_WEIGHT = 2**31 - 1  # of all nodes together: KaHyPar counts in 32 bits

_CONFIGURATION = """
    mode=direct objective=km1 cmaxnet=1000 vcycles=0 p-use-sparsifier=true p-detect-communities=true
    p-detect-communities-in-ip=false p-max-louvain-pass-iterations=100 p-min-eps-improvement=0.0001
    p-louvain-edge-weight=hybrid c-type=ml_style c-s=1 c-t=160 c-rating-score=heavy_edge
    c-rating-use-communities=true c-rating-heavy_node_penalty=no_penalty
    c-rating-acceptance-criterion=best_prefer_unmatched c-fixed-vertex-acceptance-criterion=fixed_vertex_allowed
    i-mode=recursive i-technique=multi i-algo=pool i-runs=20 i-c-type=ml_style i-c-s=1 i-c-t=150
    i-c-rating-score=heavy_edge i-c-rating-use-communities=true i-c-rating-heavy_node_penalty=no_penalty
    i-c-rating-acceptance-criterion=best_prefer_unmatched i-c-fixed-vertex-acceptance-criterion=fixed_vertex_allowed
    i-bp-algorithm=worst_fit i-bp-heuristic-prepacking=false i-bp-early-restart=true i-bp-late-restart=true
    i-r-type=twoway_fm i-r-runs=-1 i-r-fm-stop=simple i-r-fm-stop-i=50 r-type=kway_fm_km1 r-runs=-1
    r-fm-stop=adaptive_opt r-fm-stop-alpha=1
"""
"""Multilevel direct k-way with FM on the connectivity: communities first, then heavy edges are contracted until 160
nodes a part are left; the coarsest hypergraph is bisected recursively by a pool of methods; FM stops by an adaptive
rule."""


def kahypar_parts(hypergraph: HypergraphModel, num_parts: int, options: SolverOptions) -> Tensor:
    """Return the part of every node such that the connectivity is small and the parts' weights are balanced.

    Deterministic for a seed. Weights may exceed the mean by ``options.epsilon`` (more, where a single node does). Not
    collective.

    Shapes:
        - **output:** :math:`(|V|)` int32
    """
    kahypar = package("kahypar", "for solver='kahypar'", "'pyg-dist[kahypar]', or take solver='mt-kahypar'")
    if hypergraph.num_nets == 0:
        raise OptionError("Expected a graph with edges between nodes for KaHyPar (got none): take solver='mt-kahypar'")
    if max(hypergraph.pin.size, hypergraph.num_nodes, int(hypergraph.net_weight.sum())) > _MAX_WEIGHT:
        raise OptionError(
            f"Expected at most 2**31 - 1 pins for KaHyPar (got {hypergraph.pin.size:,}): take solver='mt-kahypar'"
        )
    model = kahypar.Hypergraph(
        hypergraph.num_nodes, hypergraph.num_nets, hypergraph.start.tolist(), hypergraph.pin.tolist(), num_parts,
        hypergraph.net_weight.tolist(), hypergraph.weight_below(_MAX_WEIGHT).tolist(),
    )  # fmt: skip
    context = kahypar.Context()
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write("\n".join(_CONFIGURATION.split()))
        file.flush()
        context.loadINIconfiguration(file.name)
    context.setK(num_parts)
    context.setEpsilon(options.epsilon)
    context.setSeed(options.seed % 2**31)
    context.suppressOutput(True)
    with explained_failure("KaHyPar"):
        kahypar.partition(model, context)
    return torch.tensor([model.blockID(node) for node in range(hypergraph.num_nodes)], dtype=torch.int32)
