"""``DistributedData``: a PyG ``Data`` of which each rank holds a part."""

from __future__ import annotations

import logging
import weakref
from inspect import Signature, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.ops.memory import release_free_memory
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import raised_on_all_ranks, require_equal
from pyg_dist.backend.session.steps import set_up, step
from pyg_dist.data.base_data import DistributedBaseData, refused
from pyg_dist.data.batch import add_learning, chosen_nodes, induced, ready
from pyg_dist.data.layout_choice import lay_out
from pyg_dist.data.local_graph import LocalGraph
from pyg_dist.data.options import Options, agree
from pyg_dist.data.storage import DistributedStorage
from pyg_dist.errors import DataError, OptionError, UnsupportedError
from pyg_dist.graph import module_hooks
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edge_sets import graph_over
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.graph.sample import Subset
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.store.graph_input import GraphInput, read_graph
from pyg_dist.store.hyperedges import take_hyperedges
from pyg_dist.tensor import EdgeTensor
from pyg_dist.tensor.operands import local_values

logger = logging.getLogger("pyg_dist")

_plans: weakref.WeakValueDictionary[int, DistributionPlan] = weakref.WeakValueDictionary()
"""The plans of all data that live, by ``id``, for messages about memory."""


class DistributedData(OfThisRun, DistributedBaseData, Data):
    """A graph spread over all ranks that a script uses like the ``Data`` it was made from. Collective.

    ``data.x``, ``data.y``, masks and every other attribute with a row per node are
    :class:`~pyg_dist.tensor.NodeTensor`; those with a row per edge are :class:`~pyg_dist.tensor.EdgeTensor`;
    ``data.edge_index`` is the :class:`~pyg_dist.tensor.DistributedEdgeIndex` that Distributed convs take; further edge
    sets (``data.neg_edge_index``) stay plain, and convs take them beside node tensors. Everything is exact, except with
    ``bits`` or ``comm_dtype``: losses, metrics and gradients are those of one process.

    The graph lies on the device of ``data.x`` (or else of the edges), with all attributes of nodes and edges.

    Every rank passes the same graph and options. Rank 0 partitions the graph; each rank keeps its own rows and edges,
    and no reference to the input.

    Args:
        data: homogeneous ``Data``, or a ``Batch`` of several, with ``edge_index`` (tensor or ``EdgeIndex``) or a sparse
            ``adj_t``; directed or not; self loops, duplicate edges and isolated nodes are allowed. It may have
            hyperedges, ``hyperedge_index``, beside these or alone, or be a ``HyperGraphData``. ``HeteroData`` gives a
            :class:`~pyg_dist.data.hetero.DistributedHeteroData`.
        layout: ``"halo"``: rows by part; ``"grid"``: tiles of rows and columns on a mesh, without a partition;
            ``"auto"``: the cheaper one by the constants of ``python -m pyg_dist bench``, printed with the reasons.
        partition: ``"metis"``; ``"metis-cut"``: few cut edges, as papers use METIS; ``"hypergraph"``: fewer rows to
            send, for more time to partition (Demirci et al., 4.3.2); ``"cover"``: the fewest rows of the hybrid
            exchange, but more rows of the post exchange; ``"stochastic"``: few rows in mini-batches (Demirci et al.,
            4.3.3); these three need mtkahypar; ``"metis-cover"``: METIS for the goal of ``"cover"``, in less time;
            ``"stream"``: in memory that does not grow with the edges; ``"random"``; ``"graphs"``: each graph of a
            ``Batch`` whole on one rank, so that nothing is sent, which all but ``"stochastic"``, ``"stream"`` and
            ``"random"`` take by themselves where such parts are balanced, in one printed line; the owner of each node,
            a LongTensor ``[N]``; or a saved :class:`~pyg_dist.plan.Plan`, whose parts are used again. With several
            machines, parts that were computed here are placed such that few rows leave a machine; given parts keep
            their ranks.
        epsilon: how much heavier than the mean a part may be.
        exchange: the messages of sums: ``"post"``: rows of sources; ``"pre"``: partial sums for targets; ``"hybrid"``:
            the fewest of both (SuperGCN, 5.2-5.3). Max, LSTM and attention always use post, and so do learned weights
            if that sends fewer bytes.
        hierarchy: whether what crosses from a machine to another crosses once for all its ranks: ``"on"``, ``"off"``,
            or ``"auto"``: where ranks share machines and a step is predicted to be cheaper. Exact. What crosses is in
            few ``bits`` then; messages inside a machine are exact, or in ``PYG_DIST_LOCAL_BITS``.
        bits: bits of each value that halos send in training, 32, 16, 8, 4 or 2, or (forward, backward). 32: exact; 16:
            bfloat16; fewer: rounded at random to steps of each row's range, approximate and unbiased (SuperGCN, 2.4
            and 6). Always exact: evaluation (``model.eval()``, ``no_grad``); messages that are sent once and cached
            (sums of constant features); rows that packing would not shorten (one column of float32); rows of fewer than
            16 columns that stock convs read edge by edge (logits of attention). With ``checkpoint(...,
            use_reentrant=True)`` the first pass, under ``no_grad``, is exact, and the pass that is recomputed and
            differentiated is rounded; without reentry both are rounded alike. A value that the format cannot hold (NaN,
            an infinity, in bfloat16 3.4e38) raises an error that names the layer, the node and the rank. Not with
            ``layout="grid"``.
        mesh: sizes of the grid's axes, ``{"x": 2, "y": 1, "z": 2}``; a missing axis has size 1; None: the planner
            chooses. On the halo layout ``{"data": 2, "part": 2}``: two groups of ranks, each with the whole graph in
            two parts, to which a :class:`~pyg_dist.loader.UniformVertexLoader` gives separate samples; the grid takes
            ``"data"``, too.
        comm_dtype: dtype of the messages of the grid's two large sums, ``torch.bfloat16``, approximate; None: exact.
        seed: seed of the partitioner, or of the grid's node orders.
        allow_nan: accept NaN features without a warning.
        model: (layers, hidden width) of the GCN that ``mesh=None`` and ``layout="auto"`` are priced with; None:
            (3, 128).
        nodes_of: a distributed graph over the same nodes, such as the first one of several snapshots: this one has its
            node sharding, layout and plan, without a partition of its own, so rows of both meet in one expression and a
            recurrent state goes from one to the next. No other option is given with it, but ``allow_nan``.

    With ``layout="auto"``, ``mesh`` and ``comm_dtype`` are used if the grid is chosen, and ``exchange`` is chosen too.

    Raises:
        DataError: The graph is not valid.
        AgreementError: The ranks were given different graphs, options or package versions; or a plan that was made for
            another graph, exchange, number of bits or of ranks.
        OptionError: An option is not one of the values above.
        UnsupportedError: An option whose feature does not exist yet.

    Example:
        >>> data = DistributedData(KarateClub()[0])
        >>> tuple(data.x.shape), data.num_edges
        ((34, 34), 156)
    """

    is_distributed = True
    graph: DistributedGraph

    def __new__(cls, data: object = None, *args: Any, **kwargs: Any) -> Any:
        """A :class:`~pyg_dist.data.hetero.DistributedHeteroData`, where ``data`` has types."""
        if isinstance(data, HeteroData):
            from pyg_dist.data.hetero import DistributedHeteroData  # imported only for graphs with types

            if cls is not DistributedData:
                raise UnsupportedError(
                    f"{cls.__name__} expected one type of nodes (got HeteroData): derive from "
                    f"pyg_dist.data.hetero.DistributedHeteroData for several"
                )
            return DistributedHeteroData(**cls.__signature__.bind(data, *args, **kwargs).arguments)
        return super().__new__(cls)

    def __init__(
        self,
        data: Data,
        layout: str = "halo",
        partition: str | Tensor | np.typing.NDArray[np.generic] | Plan = "metis",
        epsilon: float = 0.03,
        exchange: ExchangeKind = "hybrid",
        bits: int | tuple[int, int] = 32,
        mesh: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        seed: int = 0,
        allow_nan: bool = False,
        model: tuple[int, int] | None = None,
        nodes_of: DistributedData | None = None,
        hierarchy: Hierarchy = "auto",
    ) -> None:
        session.init()
        module_hooks.install()
        with set_up("DistributedData", num_steps=4):
            with step("read and check"), raised_on_all_ranks():
                options = Options(layout, partition, epsilon, exchange, bits, mesh, comm_dtype, seed, model, hierarchy)
                rest, hyperedges = take_hyperedges(data)
                graph_input = read_graph(rest, allow_nan, warn=session.is_main())
                if hyperedges is not None:
                    graph_input.hyperedges, options = hyperedges, options.with_hyperedges()
                if nodes_of is not None:
                    _check_nodes(nodes_of, graph_input, options)
            with step("compare the ranks' inputs"):
                identity = agree(graph_input, options)
            if nodes_of is None:
                graph, plan = lay_out(graph_input, options, identity)
            else:
                nodes, plan = nodes_of.graph.node_sharding, nodes_of.plan
                graph = graph_over(graph_input.edge_index, nodes, nodes, graph_input.form.loop_rule)
            release_free_memory()
            local = LocalGraph.of(graph_input, graph.to(graph_input.device), plan)
            if hyperedges is not None:
                from pyg_dist.data.typed_layout import with_hyperedges  # imported only for graphs with hyperedges

                local = with_hyperedges(local, hyperedges, options)
            self._fill(local)
            kept = self._store._mapping  # in the input's order, which keys() of Data, a set's, have lost
            kept.update({name: kept.pop(name) for name in data.to_dict() if name in kept})
        logger.debug(
            "rank %d: %s of %s nodes, %s of %s edges", session.rank(), f"{graph.node_sharding.num_local:,}",
            f"{self.num_nodes:,}", f"{graph.edge_sharding.num_local:,}", f"{self.num_edges:,}",
        )  # fmt: skip

    # For help() and editors, which would show the signature of __new__.
    __signature__ = Signature([*signature(__init__).parameters.values()][1:])

    def _fill(self, local: LocalGraph) -> None:
        self._adopt_rows(local.graph, local.plan, {})
        if isinstance(local.plan, DistributionPlan):
            _plans[id(local.plan)] = local.plan
        if local.graph_key is not None:
            self[local.graph_key] = local.handle
        self.update(local.attributes)

    def _adopt_rows(self, graph: DistributedGraph, plan: object, attributes: dict[str, object]) -> None:
        """Fill this object with attributes that have the graph's shardings already."""
        super().__init__()
        self.__dict__.update(graph=graph, plan=plan, _store=DistributedStorage(_parent=self))
        self._store._mapping.update(attributes)

    def subgraph(self, subset: object) -> DistributedData:
        """The subgraph that some nodes induce, as by ``Data.subgraph``, without moving rows (collective).

        Nodes are in ascending order. ``n_id`` and ``e_id`` are the numbers of its nodes and edges in this graph, and
        ``t[sub.n_id]`` selects its rows of any node tensor, differentiably. Convs see only the induced edges.

        Args:
            subset: ids or a bool mask of the nodes, equal on every rank, or a mask of this data.

        Raises:
            AgreementError: The ranks were given different nodes.
            DataError: They are no nodes of this graph.

        Example:
            >>> sub = data.subgraph(torch.arange(10))
            >>> sub.num_nodes, tuple(sub.x.shape), sub.n_id.tolist()[:3]
            (10, (10, 34), [0, 1, 2])
        """
        ready(self)
        found: DistributedData = induced(self, Subset(chosen_nodes(self, subset)))
        add_learning(self, found)
        return found

    def edge_set(self, edge_index: Tensor, edge_attr: Tensor | None = None) -> DistributedEdgeIndex:
        """A script's own edges between the nodes of this data, laid out once (collective).

        Convs take the result as ``edge_index``. They take the plain tensor, too, but then compare
        and look it up in each call, and lay it out anew where there are more sets than the latest few. Exact.

        Args:
            edge_index: integers ``[2, E]``, equal on every rank.
            edge_attr: values of these edges, ``[E, ...]``, equal on every rank.

        Returns:
            The edges, with these values as their ``edge_attr``.

        Raises:
            AgreementError: The ranks have different edges.
            DataError: They are no edges between these nodes, or have other values than one row each.
            UnsupportedError: The nodes are those of several data groups' samples.

        Example:
            >>> drawn = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[2], [0]])
            >>> snapshots = [data.edge_set(edges) for edges in drawn]
            >>> [tuple(edges.shape) for edges in snapshots]
            [(2, 2), (2, 1)]
        """
        edges = DistributedEdgeIndex.over(edge_index, self.graph.node_sharding, self.graph.device, is_kept=False)
        if edge_attr is not None:
            sharding = edges.graph.edge_sharding
            edges = DistributedEdgeIndex(edges.graph)  # its own: other values may come with the same edges
            edges.edge_attr = EdgeTensor.from_local(local_values(edge_attr, sharding), sharding)
        return edges

    @classmethod
    def open(
        cls,
        path: str | Path,
        exchange: ExchangeKind = "hybrid",
        bits: int | tuple[int, int] = 32,
        mesh: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        allow_nan: bool = False,
        hierarchy: Hierarchy = "auto",
    ) -> DistributedData:
        """The graph of a store that ``python -m pyg_dist partition`` wrote; each rank reads its own part (collective).

        That of a graph with types is a :class:`~pyg_dist.data.hetero.DistributedHeteroData`.

        Equal to ``DistributedData(data, partition=parts)`` to the bit with as many ranks as parts, or on the mesh that
        a grid store was written for. With fewer ranks parts are merged, with those that exchange most on one rank. All
        that a rank reads is checked by digests.

        Args:
            path: the store's folder.
            exchange: see the class.
            bits: see the class.
            mesh: of a grid store; None: the one it was written for. Of a halo store: data groups, as above.
            comm_dtype: see the class.
            allow_nan: accept NaN features without a warning.
            hierarchy: see the class.

        Raises:
            StoreError: There is no such store, it is damaged, or has fewer parts than there are ranks.
            AgreementError: The ranks see different stores, or were given different options.
            OptionError: An option is not one of the values allowed.

        Example:
            >>> from pyg_dist import cli
            >>> pyg_dist.save_graph(KarateClub()[0], "karate.safetensors")
            >>> cli.main(["partition", "karate.safetensors", "store", "--parts", "4"])  # doctest: +ELLIPSIS
            halo layout, metis partition, hybrid exchange, plan ...
            0
            >>> tuple(DistributedData.open("store").x.shape)
            (34, 34)
        """
        from pyg_dist.data.stored_graph import open_store  # imported only for stores
        from pyg_dist.store.typed_store import is_typed_store

        session.init()
        given: dict[str, Any] = {"exchange": exchange, "bits": bits, "mesh": mesh, "comm_dtype": comm_dtype}
        given["hierarchy"], is_typed = hierarchy, is_typed_store(path)
        kind: Any = cls
        read: Any = open_store
        require_equal({"several types in the store": str(is_typed)}, "give every rank the same store and options")
        if is_typed:
            from pyg_dist.data.hetero import DistributedHeteroData
            from pyg_dist.data.stored_types import open_types

            kind, read = DistributedHeteroData, open_types
        module_hooks.install()
        with set_up(f"DistributedData.open({str(path)!r})", num_steps=1), step("read this rank's part"):
            local = read(path, allow_nan, **given)
            release_free_memory()
        data: DistributedData = kind.__new__(kind)
        data._fill(local)
        return data

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.graph.node_sharding.size

    @property
    def num_edges(self) -> int:
        """Edges of the whole graph, as PyG counts: of hyperedges alone the incidences, or those in ``edge_index``."""
        hyperedges: tuple[str, DistributedGraph] | None = self._store.hyperedges
        if hyperedges is not None and hyperedges[0] == "edge_index":
            return hyperedges[1].targets.size
        graph = self.graph if hyperedges is None or {"edge_index", "adj_t"} & {*self.keys()} else hyperedges[1]
        return graph.edge_sharding.size

    @property
    def traffic(self) -> Traffic:
        """Bytes, rows and messages of halos that this rank has sent so far."""
        return self.graph.traffic

    # The edges and their order are fixed, and so are the graphs of a batch.
    edge_subgraph, sort, index_select = refused("edge_subgraph"), refused("sort"), refused("index_select")
    to_heterogeneous = refused("to_heterogeneous")

    def is_undirected(self) -> bool:
        """Whether each edge has its reverse, with equal ``edge_attr`` (collective: gathers all edges)."""
        return bool(self._whole_edges().is_undirected())

    def is_coalesced(self) -> bool:
        """Whether the edges are sorted and none stands twice (collective: gathers all edges)."""
        if self.graph.loop_rule == "add":  # a sparse tensor of torch's, coalesced when it was read
            return True
        return bool(self._whole_edges().is_coalesced())

    def _edges(self) -> DistributedEdgeIndex:
        if self._store.hyperedges is not None and not self.graph.edge_sharding.size:
            raise UnsupportedError("Expected edges between nodes (got hyperedges alone): ask before DistributedData")
        return DistributedEdgeIndex(self.graph)

    def _whole_edges(self) -> Data:
        whole = Data(edge_index=self._edges().full_tensor(), num_nodes=self.num_nodes)
        if "edge_attr" in self:
            whole.edge_attr = self.edge_attr.full_tensor()
        return whole

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge other than self loops (collective)."""
        edges = self._edges().edges(by_operator=True)
        row, col = edges.end(0), edges.end(1)
        is_other = (row != col).float()
        return bool((row.add_up(is_other) + col.add_up(is_other) == 0).any())

    def has_self_loops(self) -> bool:
        """Whether some edge is a self loop (collective)."""
        row, col = self._edges()
        return bool((row == col).any())

    @property
    def _device(self) -> torch.device:
        return self.graph.device

    def _set_device(self, device: torch.device) -> None:
        self.__dict__["graph"] = self.graph.to(device)


def _expected_memory() -> str:
    plans = list(_plans.values())  # the latest one is last
    return f"where the plan expects {plans[-1].describe_memory()}" if plans else ""


out_of_memory.set_estimate(_expected_memory)


def _check_nodes(data: DistributedData, graph_input: GraphInput, options: Options) -> None:
    """Check that a graph can have the nodes of ``data``, and that no option contradicts their layout."""
    given, default = options.identity(), Options().identity()
    changed = [name for name in given if given[name] != default[name]]
    if changed:
        raise OptionError(f"Expected no {', '.join(changed)} with nodes_of, whose layout the graph has: leave it out")
    if not isinstance(data, DistributedData):
        raise OptionError(f"Expected nodes_of to be a DistributedData (got {type(data).__name__}): wrap it first")
    if graph_input.num_nodes != data.num_nodes:
        raise DataError(
            f"Expected a graph over the {data.num_nodes} nodes of nodes_of (got {graph_input.num_nodes}): set num_nodes"
        )
