"""The one interface of a graph over ranks: all that convs, data, reports and loaders use of a layout.

Two layouts implement it: :class:`~pyg_dist.halo.graph.HaloGraph` (rows of nodes by part) and
:class:`~pyg_dist.grid.graph.GridGraph` (tiles on a mesh). Only the factories name them
(:mod:`~pyg_dist.graph.edge_index` and ``pyg_dist/data``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Pending, Traffic
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import CSR, Place, Run
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.sample import Subset
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedEdges, PickedNodes
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor
from pyg_dist.tensor.selection import Selection
from pyg_dist.tensor.sharding import RowSharding, lasting


@dataclass(frozen=True)
class Norm:
    """How an aggregation scales the rows that it adds up.

    Attributes:
        kind: ``"sum"``: ``y_i = sum_j w_ji x_j``; ``"mean"``: that over the in-degree (at least one); ``"gcn"``:
            ``D^-1/2 (A + loops) D^-1/2 x`` (:mod:`~pyg_dist.graph.gcn_norm`).
        add_self_loops: whether GCN's norm adds loops.
        loop_value: their weight.
        identity: what multiple of x a sum has beside that of the edges, ``y = A x + identity x``: loops of this weight,
            beside those that exist. For constant weights.
    """

    kind: Literal["sum", "mean", "gcn"]
    add_self_loops: bool = False
    loop_value: float = 1.0
    identity: float = 0.0

    SUM: ClassVar[Norm]
    MEAN: ClassVar[Norm]

    @staticmethod
    def gcn(add_self_loops: bool, loop_value: float = 1.0) -> Norm:
        """GCN's norm."""
        return Norm("gcn", add_self_loops, loop_value)


Norm.SUM = Norm("sum")
Norm.MEAN = Norm("mean")


class Operator(Protocol):
    """A distributed sparse matrix over a graph's edges. Its products are :meth:`DistributedGraph.aggregate`'s."""

    @property
    def learns(self) -> bool:
        """Whether its values require a gradient. Such an operator holds for one forward pass."""


NO_HYPEREDGES = "Expected layout='halo' with hyperedges (got 'grid', whose tiles are of square matrices): leave it out"


class NodeSharding(RowSharding):
    """All nodes of a ``DistributedData``: every graph over them has this one object.

    Attributes:
        edge_sets: a script's own edges that end at them, see :meth:`DistributedEdgeIndex.over`.
    """

    @property
    def is_union(self) -> bool:
        """Whether data groups have nodes of their own, between which no rows are exchanged."""
        return False

    @property
    def sample(self) -> Subset | None:
        """Which nodes of a graph these are, for a batch."""
        return None

    @property
    def first(self) -> int:
        """The number of the first node of this data group, where the groups have nodes of their own."""
        return 0

    @lasting
    def parts(self) -> Tensor:
        """The owner of every node, int64 ``[N]`` (collective)."""
        owner = torch.repeat_interleave(host.arange(self.group.size), host.tensor(self.counts))
        return torch.empty_like(owner).scatter_(0, self.group.gather_rows(self.global_id, self.counts), owner)

    def joined(self, others: Sequence[NodeSharding]) -> NodeSharding:
        """These nodes, then those of other sets, each of which may be named several times; made once."""
        raise NotImplementedError(type(self))  # of a layout without types

    def hyperedges(self, incidence: Tensor, size: int) -> NodeSharding:
        """Hyperedges of these nodes, as nodes of another set: each lies where most of its nodes are (collective).

        ``incidence``: nodes and hyperedges, int64 ``[2, K]``.
        """
        raise UnsupportedError(NO_HYPEREDGES)

    def __init__(self, group: Group, size: int, global_id: Tensor) -> None:
        super().__init__(group, "node", size, global_id)
        self.edge_sets: OrderedDict[str, Any] = OrderedDict()  # handles, whose graphs know these nodes


End = int
"""Of edges. 0: sources, 1: targets."""


def nodes_at(graph: DistributedGraph | EdgeView, end: End) -> NodeSharding:
    """The nodes at an end of a graph's edges."""
    return graph.targets if end else graph.sources


def the_one(sources: NodeSharding, targets: NodeSharding) -> NodeSharding:
    """The nodes at both ends of a graph's edges, which have to be one set."""
    if sources is not targets:
        raise UnsupportedError(
            f"Expected edges within one set of nodes, as self loops (without add_self_loops=False), GCN's norm and "
            f"subgraphs need them (got edges from {sources.size} nodes to {targets.size} others): use a conv that "
            f"takes a pair (x_src, x_dst)"
        )
    return targets


class GraphProducts(Protocol):
    """The common part of a graph and its edge view: shardings and products.

    Edges go from :attr:`sources` to :attr:`targets`. In a square graph these are one object. Products take rows of the
    sources and give rows of the targets.

    Attributes:
        edge_sharding: which edges are here.
        loop_rule: what GCN's norm does about existing self loops; it follows from the form of the input.
        group: the ranks that share the graph.
        device: where this rank's edges lie.
    """

    edge_sharding: RowSharding
    loop_rule: LoopRule
    group: Group
    device: torch.device

    @property
    def sources(self) -> NodeSharding:
        """Which whole rows of the nodes where edges begin are here."""

    @property
    def targets(self) -> NodeSharding:
        """The same of the nodes where they end."""

    @property
    def node_sharding(self) -> NodeSharding:
        """Both, of a square graph; see :func:`the_one`."""

    def owns(self, x: RowTensor, end: End = 1) -> bool:
        """Whether x has a row for every node at an end of this graph's edges."""

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> NodeTensor:
        """Features as :meth:`aggregate` takes them (may be collective). With a ``layer``, x is its input."""

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Operator:
        """The matrix of an aggregation; cached while constant weights do not change (collective when built).

        ``weight``, ``[E]``, or ``None`` for ones, learns if it requires a gradient; ``dtype`` is that of the values.
        """

    def aggregate(self, x: NodeTensor, operator: Any, layer: nn.Module | None = None) -> NodeTensor:
        """``operator`` times x; differentiable by x, and by weights that learn (collective, unless it is cached).

        Exact, but for a training ``layer`` of a ``DistributedData`` with ``bits``, unless the result is cached.

        Shapes: output rows of the targets, ``[N, F]``.
        """

    def attend(
        self,
        edges: Any,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        layer: nn.Module | None = None,
        has_weights: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention over in-edges, :func:`pyg_dist.backend.ops.attention_csr`, differentiable (collective).

        Exact, but for the rows of 16 columns or more that a training ``layer`` of a ``DistributedData`` with ``bits``
        sends.

        ``inputs`` are whole rows: value and key of the m :attr:`sources`, query of the n :attr:`targets`, and for
        ``dot`` edge_weight; edge_attr of the edges. For ``additive`` edge_weight is one row for all targets. With
        ``has_weights`` those of the softmax, before dropout, come as well.

        Shapes: output ``[n, H C]``; ``[n, H D]``, or empty; ``[e, H]``, or without rows.
        """


class EdgeView(GraphProducts, Protocol):
    """A graph for messages per edge: all in-edges of a node are on the rank that has the node.

    Rows of *neighbours* are the m local rows of sources, then the h rows that arrive from other ranks.
    """

    @property
    def num_local(self) -> int:
        """Targets of this rank, n."""

    @property
    def num_sources(self) -> int:
        """Sources of this rank, m; n in a square graph."""

    @property
    def num_boundary(self) -> int:
        """The last local targets, from the first one that has a source on another rank."""

    @property
    def num_neighbours(self) -> int:
        """Rows of neighbours, m + h."""

    @property
    def neighbour_id(self) -> Tensor:
        """Global ids of the neighbours, int64 ``[m + h]``."""

    @property
    def neighbour_rank(self) -> Tensor:
        """The rank of each neighbour, on the host, int64 ``[n + h]``."""

    @property
    def csr(self) -> CSR:
        """This rank's edges: targets by neighbours; one target's edges in input order."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """Neighbour (source) and local row (target) of each edge in edge storage order, int64 ``[e]``."""

    def neighbour_rows(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        """The neighbours' rows, differentiable (collective). Exact, but for a training ``layer`` with ``bits``.

        Shapes: x ``[m, ...]``; output ``[m + h, ...]``.
        """

    def reduce_by_blocks(
        self, edges: Any, inputs: Sequence[tuple[Place, Tensor]], run: Run, max_edges: int, layer: nn.Module
    ) -> Tensor:
        """The outputs that ``run`` makes of messages, by blocks of target nodes, differentiable (collective).

        Exact, but for the rows of 16 columns or more that a training ``layer`` of a ``DistributedData`` with ``bits``
        sends. The backward makes the messages again.

        ``inputs``: of which each block has its piece; ``max_edges``: of a block, if it has more than one target.

        Shapes: output ``[n, ...]``.
        """

    def sum_to_owners(self, rows: Tensor) -> Tensor:
        """The transpose of :meth:`neighbour_rows`: every rank's rows are summed where their nodes live (collective).

        Shapes: rows ``[m + h, ...]``; output ``[m, ...]``.
        """

    def operator_over(self, edges: Any, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Operator | None:
        """:meth:`operator` over edges that differ from the graph's by self loops (collective when built).

        ``None`` for other edges, and in a batch that rescales.
        """


class DistributedGraph(GraphProducts, Protocol):
    """A graph laid out over ranks.

    Attributes:
        digest: of the edges, where a script has made them.
    """

    digest: str | None

    @property
    def traffic(self) -> Traffic:
        """Counts of this rank's messages so far."""

    @property
    def one_rank_columns(self) -> float:
        """Columns of rows up to which PyG's own code runs (:mod:`pyg_dist.conv.one_rank`), where there is one rank."""

    @property
    def one_rank_edges(self) -> Tensor:
        """The edges then, int64 ``[2, E]``, by local rows and in the order of :attr:`edge_sharding`."""

    # ---- Placement ---------------------------------------------------------------------------------------------------

    def feature_sharding(self, width: int) -> RowSharding:
        """The sharding of features of ``width`` columns."""

    def attribute_sharding(self, name: str, value: Tensor) -> RowSharding:
        """The sharding of a new node attribute."""

    # ---- Linear algebra --------------------------------------------------------------------------------------------

    def start(self, x: NodeTensor, operator: Any, layer: nn.Module | None = None) -> Pending[NodeTensor]:
        """:meth:`aggregate` as far as nothing is waited for: what follows may hide its last messages."""

    def align(self, x: NodeTensor, like: NodeTensor) -> NodeTensor:
        """X in the sharding of a product of ``like`` (may be collective)."""

    def linear_sum(
        self, pairs: Sequence[tuple[NodeTensor | Pending[NodeTensor], Tensor]], bias: Tensor | None = None
    ) -> NodeTensor:
        """``sum_k X_k W_k^T + bias`` over rows that lie alike (may be collective).

        Shapes: X_k ``[N, F_k]``, W_k ``[G, F_k]``, bias ``[G]``; output ``[N, G]``.
        """

    def is_cached(self, x: NodeTensor, operator: Any) -> bool:
        """Whether the product is known, or would be kept."""

    # ---- Graphs from graphs, and questions -------------------------------------------------------------------------

    def select(self, chosen: Selection) -> DistributedGraph:
        """The graph of some of :attr:`edge_sharding`, over the same nodes."""

    def to(self, device: torch.device | str) -> DistributedGraph:
        """The same edges over the same nodes on another device."""

    def full_edge_index(self) -> Tensor:
        """All edges by global ids in the input's order, int64 ``[2, E]``, on every rank (collective)."""

    @property
    def data_group(self) -> tuple[int, int]:
        """The number of this rank's data group, and how many there are: ranks of several hold the same rows."""

    @property
    def needs_whole_subsets(self) -> bool:
        """Whether a rank has to know all nodes and edges of a subset that names its edges, and not only its own."""

    @property
    def ranks_per_machine(self) -> int | None:
        """So many consecutive ranks share what crosses to another machine; ``None``: messages have one level."""

    def prepare_subgraphs(self) -> None:
        """Make what subgraphs are cut from without messages (collective at the first use)."""

    def induced(self, sample: Subset) -> SampledGraph:
        """The subgraph that a sample of the nodes induces, once subgraphs are prepared (not collective)."""

    def among(self, nodes: NodeSharding) -> SampledGraph:
        """The subgraph that nodes induce which :func:`~.edge_sets.pick` gave, in their order (collective)."""

    # ---- Single edges ----------------------------------------------------------------------------------------------

    def edges(self, weight: RowTensor | None = None) -> Any:
        """Its :class:`~pyg_dist.graph.edges.Edges`, where they are stored; ``weight``: the values of an ``adj_t``.

        Operators, and rows at the ends of edges, are to be had of them without moving them to their targets' ranks.
        """

    @property
    def edge_view(self) -> EdgeView:
        """The graph with all in-edges of a node on the rank that has its row (may be collective at the first use)."""


class SampledGraph(DistributedGraph, Protocol):
    """The subgraph that some nodes of a graph induce, over nodes of its own.

    Attributes:
        parent: the graph.
    """

    parent: Any

    def pick_nodes(self) -> PickedNodes:
        """``n_id``: the nodes' global ids; ``t[n_id]`` is a node tensor of the graph at the sample."""

    def pick_edges(self) -> PickedEdges:
        """``e_id``: the edges' places in the input; ``t[e_id]`` is an edge tensor of the graph at the sample."""

    def make_ahead(self, weights: Iterable[RowTensor]) -> None:
        """Make what earlier batches had, operators of these weights or none, before a step asks; not collective."""


def have_same_edges(one: DistributedGraph | EdgeView, other: DistributedGraph | EdgeView) -> bool:
    """Whether these are the same edges over the same nodes.

    Also where a script's have been laid out anew, or selected once more.
    """
    digests = [getattr(graph, "digest", None) for graph in (one, other)]
    is_alike = one.edge_sharding is other.edge_sharding or (digests[0] is not None and digests[0] == digests[1])
    return one is other or (is_alike and one.sources is other.sources and one.targets is other.targets)
