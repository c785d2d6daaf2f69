"""Mt-KaHyPar's multilevel k-way partition of a hypergraph model."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.partition.hypergraph import HypergraphModel
from pyg_dist.partition.solver import Preset, SolverOptions, explained_failure, package

_MAX_WEIGHT = 2**31 - 1  # of all nodes together: Mt-KaHyPar counts in 32 bits


def hypergraph_parts(
    hypergraph: HypergraphModel,
    num_parts: int,
    options: SolverOptions,
    preset: Preset = "deterministic",
    start: Tensor | None = None,
) -> Tensor:
    """Return the part of every node such that the connectivity is small and the parts' weights are balanced.

    All cores that the process may use take part. Weights may exceed the mean by ``options.epsilon`` (more, where a
    single node does). Not collective.

    Args:
        hypergraph: the model.
        num_parts: P.
        options: among others a preset, if not ``preset``.
        preset: "deterministic" gives the same parts whatever the number of cores; "default" takes a third to a half of
            its time for 0.91 to 1.04 of its connectivity, and with several cores other parts in each run.
        start: parts to improve by one V-cycle, which coarsens within them only, so that it begins with them and keeps
            what it cannot improve. None: parts are found.

    Shapes:
        - **input:** start :math:`(|V|)` integers
        - **output:** :math:`(|V|)` int32
    """
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
        return torch.tensor(partitioned.get_partition(), dtype=torch.int32)


@functools.cache
def _initializer() -> Any:
    """Of which a process may have one."""
    return _mtkahypar().initialize(len(os.sched_getaffinity(0)), False)


def _mtkahypar() -> Any:
    return package("mtkahypar", "to partition hypergraphs", "mtkahypar, or choose partition='metis'")
