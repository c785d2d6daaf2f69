"""METIS' multilevel k-way partition of a graph model, through pymetis."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import MissingPackageError
from pyg_dist.partition.models.graph import GraphModel
from pyg_dist.partition.solvers.failure import explained_failure
from pyg_dist.partition.solvers.random import random_parts

Array = np.ndarray[Any, Any]

_CUT, _VOLUME = 0, 1  # METIS_OBJTYPE_CUT, METIS_OBJTYPE_VOL

# METIS' time for volume grows with the number of parts: on soc-Slashdot0902, 120 s for 512 parts where cut takes 3 s
# and sends 5% more rows.
_MAX_VOLUME_PARTS = 64

# METIS counts imbalance in thousandths.
_MAX_UFACTOR = 2**31 - 1

# The best of four seeds is kept where they take seconds: 1-9% fewer rows on the test graphs. METIS' own ncuts is not
# used: with this objective it has ended in a segmentation fault.
_TRIES, _MAX_TRIED = 4, 4_000_000  # neighbours


def metis_parts(graph: GraphModel, num_parts: int, epsilon: float, seed: int, cuts_edges: bool = False) -> Tensor:
    """Return the part of every node such that few rows are sent and the parts' weights are balanced. Not collective.

    The objective is METIS' communication volume: the pairs (node, other part with a neighbour of it), which are the
    rows that one aggregation sends. Only k-way partitioning knows it. Against edge cut it saves 5-30% of the rows on
    the test graphs, for up to ten times METIS' time. For more than 64 parts it would be far more time, and edge cut is
    taken. Weights may exceed the mean by ``epsilon`` (a goal that METIS may miss).

    Args:
        graph: the model.
        num_parts: P.
        epsilon: see above.
        seed: of METIS.
        cuts_edges: for edge cut in any case, in one try, which is what papers mean by METIS.

    Shapes:
        - **output:** :math:`(|V|)` int32

    Raises:
        MissingPackageError: If pymetis is not installed.
        OptionError: If METIS fails.
    """
    pymetis = _import_pymetis()
    if num_parts == 1:  # METIS mishandles both of these
        return torch.zeros(graph.num_nodes, dtype=torch.int32)
    if graph.neighbor.size == 0:
        return random_parts(graph.num_nodes, num_parts, seed)
    is_cut = cuts_edges or num_parts > _MAX_VOLUME_PARTS
    tries = 1 if is_cut or graph.neighbor.size > _MAX_TRIED else _TRIES
    # METIS computes in 64 bits; handing them over as int64 avoids a second copy.
    start, neighbor, weight = (array.astype(np.int64) for array in (graph.start, graph.neighbor, graph.weight))
    del graph  # METIS takes most of what a set-up holds
    adjacency = pymetis.CSRAdjacency(start, neighbor)

    def attempt(number: int) -> Array:
        options = pymetis.Options(
            objtype=_CUT if is_cut else _VOLUME,
            seed=(seed * tries + number) % (2**31 - 1) + 1,  # METIS hands it to srand, for which 0 and 1 are one seed
            ufactor=min(max(1, round(1000 * epsilon)), _MAX_UFACTOR),
        )
        with explained_failure("METIS"):
            _, parts = pymetis.part_graph(num_parts, adjacency, vweights=weight, recursive=False, options=options)
        return np.asarray(parts, dtype=np.int32)

    found = [attempt(number) for number in range(tries)]
    return torch.from_numpy(min(found, key=lambda parts: _volume(start, neighbor, parts)) if tries > 1 else found[0])


def _volume(start: Array, neighbor: Array, parts: Array) -> int:
    """METIS' communication volume: pairs of a node and another part with a neighbour of it."""
    num_parts = int(parts.max(initial=0)) + 1
    node = np.repeat(np.arange(parts.size), np.diff(start))
    other = parts[neighbor]
    is_remote = parts[node] != other
    return int(np.unique(node[is_remote] * num_parts + other[is_remote]).size)


def _import_pymetis() -> Any:
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError(
            f"Expected pymetis for partition='metis' (got: {error}); pip install pymetis, or choose partition='random'"
        ) from error
    return pymetis
