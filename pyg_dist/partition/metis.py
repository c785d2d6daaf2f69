"""METIS' multilevel k-way partition, through pymetis, and the model of a graph for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.partition.hypergraph import choice_by_degree
from pyg_dist.partition.inputs import Array, node_work
from pyg_dist.partition.solver import explained_failure, package, random_parts

_CUT, _VOLUME = 0, 1  # METIS_OBJTYPE_CUT, METIS_OBJTYPE_VOL

# METIS' time for volume grows with the number of parts: on soc-Slashdot0902, 120 s for 512 parts where cut takes 3 s
# and sends 5% more rows.
_MAX_VOLUME_PARTS = 64

# METIS counts imbalance in thousandths.
_MAX_UFACTOR = 2**31 - 1

# The best of four seeds is kept where they take seconds: 1-9% fewer rows on the test graphs. METIS' own ncuts is not
# used: with this objective it has ended in a segmentation fault.
_TRIES, MAX_TRIED = 4, 4_000_000  # neighbours

_HEAVIEST_LINK = 1 << 20  # METIS' weights are integers of at least 1


def metis_parts(graph: GraphModel, num_parts: int, epsilon: float, seed: int, cuts_edges: bool = False) -> Tensor:
    """The part of every node, int32 ``[N]``, such that few rows are sent and the parts' weights are balanced.

    The objective is METIS' communication volume: the pairs (node, other part with a neighbour of it), which are the
    rows that one aggregation sends. On the test graphs that saves 5-30% of the rows of edge cut, for up to ten times
    METIS' time. For more than 64 parts it would take far longer: then, with ``cuts_edges`` and with weights of links,
    the objective is edge cut. Weights may exceed the mean by ``epsilon``, a goal that METIS may miss.
    """
    pymetis = package("pymetis", "for partition='metis'", "pymetis, or choose partition='random'")
    if num_parts == 1:  # METIS mishandles both of these
        return host.zeros(graph.num_nodes, dtype=torch.int32)
    if graph.neighbor.size == 0:
        return random_parts(graph.num_nodes, num_parts, seed)
    link_weight = graph.link_weight
    is_cut = cuts_edges or num_parts > _MAX_VOLUME_PARTS or link_weight is not None
    tries = 1 if is_cut or graph.neighbor.size > MAX_TRIED else _TRIES
    # METIS computes in 64 bits; handing them over as int64 avoids a second copy.
    start, neighbor, weight = (array.astype(np.int64) for array in (graph.start, graph.neighbor, graph.weight))
    del graph  # the peak of a set-up's memory is in METIS
    adjacency = pymetis.CSRAdjacency(start, neighbor)

    def attempt(number: int) -> Array:
        options = pymetis.Options(
            objtype=_CUT if is_cut else _VOLUME,
            seed=(seed * tries + number) % (2**31 - 1) + 1,  # METIS hands it to srand, for which 0 and 1 are one seed
            ufactor=min(max(1, round(1000 * epsilon)), _MAX_UFACTOR),
        )
        with explained_failure("METIS", also="it gives up at SIGTERM, too"):
            _, parts = pymetis.part_graph(
                num_parts, adjacency, vweights=weight, eweights=link_weight, recursive=False, options=options
            )
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


@dataclass(frozen=True)
class GraphModel:
    """An undirected graph in CSR form with integer node weights.

    Node ``i`` has the neighbours ``neighbor[start[i]:start[i + 1]]``, ascending; ``weight[i] >= 1``, and so are the
    weights of its links, where they have any.
    """

    start: Array
    neighbor: Array
    weight: Array
    link_weight: Array | None = None  # of each neighbour, int64

    @property
    def num_nodes(self) -> int:
        return int(self.weight.size)


def build_graph_model(edge_index: Tensor, num_nodes: int, train_mask: Tensor | None = None) -> GraphModel:
    """Build the model of a graph with valid ``edge_index``."""
    source, target = edge_index.detach().cpu().numpy()
    start, neighbor = _symmetric_csr(source, target, num_nodes)
    return GraphModel(start, neighbor, node_work(np.bincount(target, minlength=num_nodes), train_mask))


def weighted_by_hubs(model: GraphModel, edge_index: Tensor, exponent: float, train_mask: Tensor | None) -> GraphModel:
    """The model of the same graph for the hybrid exchange, where cut links of hubs cost little.

    A row that is sent for one edge of a hub serves all its edges in that part: in the medium-grain hypergraph
    (:func:`~pyg_dist.partition.hypergraph.build_cover_model`) all cut pins of a net in one part cost as much as one. So
    a link weighs d^-exponent, with d neighbours of its busier end. An edge is the work of its other end
    (:func:`~pyg_dist.partition.hypergraph.choice_by_degree`).
    """
    source, target = edge_index.detach().cpu().numpy()
    multiplies = np.where(choice_by_degree(edge_index, model.num_nodes), target, source)
    degree = np.diff(model.start)
    busier = np.maximum(np.repeat(degree, degree), degree[model.neighbor])
    share = (busier / busier.min(initial=busier.max(initial=1))) ** -exponent
    link_weight = np.maximum(np.rint(_HEAVIEST_LINK * share), 1).astype(np.int64)
    weight = node_work(np.bincount(multiplies, minlength=model.num_nodes), train_mask)
    return replace(model, weight=weight, link_weight=link_weight)


def _symmetric_csr(source: Array, target: Array, num_nodes: int) -> tuple[Array, Array]:
    from scipy import sparse

    index_dtype = np.int32 if max(num_nodes, 2 * source.size) <= np.iinfo(np.int32).max else np.int64
    is_link = source != target
    # Each array is freed as soon as possible: rank 0's memory has its peak here.
    source, target = source[is_link].astype(index_dtype), target[is_link].astype(index_dtype)
    del is_link
    # Booleans: a duplicate is or-ed away, where small integers could wrap around to zero.
    shape = (num_nodes, num_nodes)
    one_way = sparse.coo_array((np.ones(source.size, dtype=bool), (source, target)), shape=shape).tocsr()
    del source, target
    adjacency = one_way + one_way.T.tocsr()
    del one_way
    adjacency.sort_indices()
    return adjacency.indptr, adjacency.indices
