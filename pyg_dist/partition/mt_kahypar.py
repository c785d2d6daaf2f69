"""Mt-KaHyPar's multilevel k-way partition of a hypergraph model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.partition.hypergraph import HypergraphModel
from pyg_dist.partition.solver import Preset, SolverOptions, explained_failure, package

_MAX_WEIGHT = 2**31 - 1  # of all nodes together: Mt-KaHyPar counts in 32 bits


def hypergraph_parts(
    hypergraph: HypergraphModel, num_parts: int, options: SolverOptions, preset: Preset = "deterministic"
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

    Shapes:
        - **output:** :math:`(|V|)` int32
    """

    def solved() -> Any:
        context, model = _prepared(hypergraph, num_parts, options, preset)
        return model.partition(context)

    return _parts_of(solved)


def improved_parts(
    hypergraph: HypergraphModel, parts: Tensor, num_parts: int, options: SolverOptions, preset: Preset = "default"
) -> Tensor:
    """Return better parts for the model than ``parts``, by one V-cycle. Not collective.

    The multilevel cycle coarsens within the given parts only, so it begins with them and keeps what it cannot improve.

    Shapes:
        - **input:** parts :math:`(|V|)` integers
        - **output:** :math:`(|V|)` int32
    """

    def improved() -> Any:
        context, model = _prepared(hypergraph, num_parts, options, preset)
        partitioned = model.create_partitioned_hypergraph(context, num_parts, parts.tolist())
        partitioned.improve_partition(context, 1)
        return partitioned

    return _parts_of(improved)


def _prepared(hypergraph: HypergraphModel, num_parts: int, options: SolverOptions, preset: Preset) -> tuple[Any, Any]:
    """Mt-KaHyPar's context and hypergraph."""
    mtkahypar, initializer = _mtkahypar(), _initializer()
    mtkahypar.set_seed(options.seed % 2**31)
    name = (options.preset or preset).replace("-", "_").upper()
    context = initializer.context_from_preset(getattr(mtkahypar.PresetType, name))
    context.set_partitioning_parameters(num_parts, min(options.epsilon, num_parts), mtkahypar.Objective.KM1)
    nets = np.split(hypergraph.pin, hypergraph.start[1:-1])[: hypergraph.num_nets]  # without nets, split gives one
    unit = -(-int(hypergraph.weight.sum()) // _MAX_WEIGHT)
    weight = np.maximum(hypergraph.weight // unit, 1)
    return context, initializer.create_hypergraph(
        context, hypergraph.num_nodes, len(nets), nets, weight, hypergraph.net_weight
    )


def _parts_of(solve: Callable[[], Any]) -> Tensor:
    mtkahypar = _mtkahypar()
    kinds = (mtkahypar.InvalidInputError, mtkahypar.InvalidParameterError, mtkahypar.SystemError,
             mtkahypar.UnsupportedOperationError)  # fmt: skip
    with explained_failure("Mt-KaHyPar", *kinds):
        return torch.tensor(solve().get_partition(), dtype=torch.int32)


@functools.cache
def _initializer() -> Any:
    """Of which a process may have one."""
    return _mtkahypar().initialize(len(os.sched_getaffinity(0)), False)


def _mtkahypar() -> Any:
    return package("mtkahypar", "to partition hypergraphs", "mtkahypar, or choose partition='metis'")
