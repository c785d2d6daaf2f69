"""Partitions of a hypergraph model by Mt-KaHyPar, on all cores, and by KaHyPar, on one: multilevel and k-way.

KaHyPar is under the GPL: it is no dependency, and imported only where it is named.
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.errors import OptionError
from pyg_dist.partition.hypergraph import HypergraphModel
from pyg_dist.partition.solver import Preset, SolverOptions, explained_failure, package

_MAX_WEIGHT = 2**31 - 1  # of all nodes together: both count in 32 bits


def hypergraph_parts(
    hypergraph: HypergraphModel,
    num_parts: int,
    options: SolverOptions,
    preset: Preset = "deterministic",
    start: Tensor | None = None,
) -> Tensor:
    """The part of every node, int32 ``[N]``, such that the connectivity is small and the parts' weights are balanced.

    Mt-KaHyPar uses all cores of the process. Weights may exceed the mean by ``options.epsilon``, or by a single node.
    Mt-KaHyPar's preset is ``options.preset``, or else ``preset``: "deterministic" gives the same parts on any number of
    cores; "default" takes a third to a half of its time for 0.91 to 1.04 of its connectivity, and on several cores
    finds other parts in each run. ``start``: parts that one V-cycle improves, which coarsens only within them.
    """
    if options.solver == "kahypar":
        return _by_kahypar(hypergraph, num_parts, options)
    mtkahypar = _mtkahypar()
    kinds = (mtkahypar.InvalidInputError, mtkahypar.InvalidParameterError, mtkahypar.SystemError,
             mtkahypar.UnsupportedOperationError)  # fmt: skip
    with explained_failure("Mt-KaHyPar", *kinds):
        initializer = _initializer()
        mtkahypar.set_seed(options.seed % 2**31)
        name = (options.preset or preset).replace("-", "_").upper()
        context = initializer.context_from_preset(getattr(mtkahypar.PresetType, name))
        context.set_partitioning_parameters(num_parts, min(options.epsilon, num_parts), mtkahypar.Objective.KM1)
        nets = np.split(hypergraph.pin, hypergraph.start[1:-1])[: hypergraph.num_nets]  # without nets, split gives one
        weight = hypergraph.weight_below(_MAX_WEIGHT)
        model = initializer.create_hypergraph(
            context, hypergraph.num_nodes, len(nets), nets, weight, hypergraph.net_weight
        )
        if start is None:
            partitioned = model.partition(context)
        else:
            partitioned = model.create_partitioned_hypergraph(context, num_parts, start.tolist())
            partitioned.improve_partition(context, 1)
        return host.tensor(partitioned.get_partition(), dtype=torch.int32)


@functools.cache
def _initializer() -> Any:
    """Mt-KaHyPar's initializer, of which a process may have one."""
    return _mtkahypar().initialize(len(os.sched_getaffinity(0)), False)


def _mtkahypar() -> Any:
    return package("mtkahypar", "to partition hypergraphs", "mtkahypar, or choose partition='metis'")


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


def _by_kahypar(hypergraph: HypergraphModel, num_parts: int, options: SolverOptions) -> Tensor:
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
    return host.tensor([model.blockID(node) for node in range(hypergraph.num_nodes)], dtype=torch.int32)
