"""Mt-KaHyPar's multilevel k-way partition of a hypergraph model."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import MissingPackageError
from pyg_dist.partition.models.hypergraph import HypergraphModel

_MAX_WEIGHT = 2**31 - 1  # of all nodes together: Mt-KaHyPar counts in 32 bits


def hypergraph_parts(hypergraph: HypergraphModel, num_parts: int, epsilon: float) -> Tensor:
    """Return the part of every node such that the connectivity is small and the parts' weights are balanced.

    All cores that the process may use take part; the result does not depend on how many: the preset is Mt-KaHyPar's
    deterministic one, which takes no seed. Weights may exceed the mean by ``epsilon`` (more, where a single node does).
    Not collective.

    Shapes:
        - **output:** :math:`(|V|)` int32

    Raises:
        MissingPackageError: If mtkahypar is not installed.
    """
    mtkahypar = _import_mtkahypar()
    initializer = mtkahypar.initialize(len(os.sched_getaffinity(0)), False)
    context = initializer.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(num_parts, min(epsilon, num_parts), mtkahypar.Objective.KM1)
    nets = np.split(hypergraph.pin, hypergraph.start[1:-1])[: hypergraph.num_nets]  # without nets, split gives one
    unit = -(-int(hypergraph.weight.sum()) // _MAX_WEIGHT)
    weight = np.maximum(hypergraph.weight // unit, 1)
    model = initializer.create_hypergraph(
        context, hypergraph.num_nodes, len(nets), nets, weight, np.ones(len(nets), dtype=np.int64)
    )
    return torch.tensor(model.partition(context).get_partition(), dtype=torch.int32)


def _import_mtkahypar() -> Any:
    try:
        import mtkahypar
    except ImportError as error:
        raise MissingPackageError(
            f"Expected mtkahypar for partition='hypergraph' (got: {error}); pip install mtkahypar, or choose "
            "partition='metis'"
        ) from error
    return mtkahypar
