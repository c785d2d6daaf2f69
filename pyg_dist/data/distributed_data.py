"""``DistributedData``: a PyG ``Data`` of which each rank holds a part."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.halo.exchange import Traffic
from pyg_dist.backend.ops.memory import release_free_memory
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import digest, on_main, raise_together, require_equal
from pyg_dist.data.graph_input import GraphInput, read_graph
from pyg_dist.data.grid_data import on_grid
from pyg_dist.data.layout_choice import choose_layout, common_machine, model_of, ranks_per_node
from pyg_dist.data.options import Options
from pyg_dist.data.storage import DistributedStorage
from pyg_dist.errors import MixedRowsError, PygDistError, UnsupportedError
from pyg_dist.layout import module_hooks
from pyg_dist.layout.edge_index import DistributedEdgeIndex
from pyg_dist.layout.edge_sets import Graph
from pyg_dist.layout.halo.graph import HaloGraph
from pyg_dist.layout.halo.sharding import HaloNodes
from pyg_dist.partition import partition as partition_nodes
from pyg_dist.plan import Plan, ShareSizes, halo_share
from pyg_dist.plan.grid.plan import GridPlan
from pyg_dist.plan.halo.placement import place
from pyg_dist.plan.halo.plan import pairs_of, plan_hash
from pyg_dist.plan.halo.remote_edges import Exchange
from pyg_dist.plan.halo.share import HaloShare
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor


class DistributedData(Data):  # type: ignore[misc]
    """A graph spread over all ranks that a script uses like the ``Data`` it was made from. Collective.

    ``data.x``, ``data.y``, masks and every other attribute with a row per node are
    :class:`~pyg_dist.tensor.NodeTensor`; those with a row per edge are :class:`~pyg_dist.tensor.EdgeTensor`;
    ``data.edge_index`` is the :class:`~pyg_dist.tensor.DistributedEdgeIndex` that Distributed convs take; further edge
    sets (``data.neg_edge_index``) stay plain, and convs take them beside node tensors. Everything is exact, unless
    ``bits`` or ``comm_dtype`` ask otherwise: losses, metrics and gradients are those of one process.

    Every rank passes the same graph and options. One rank partitions it; each keeps its own rows and edges, and no
    reference to the input.

    Args:
        data: homogeneous ``Data`` with ``edge_index`` (tensor or ``EdgeIndex``) or a sparse ``adj_t``; directed or
            not, with self loops, duplicate edges and isolated nodes as it likes.
        layout: ``"halo"``: rows by part; ``"grid"``: tiles of rows and columns on a mesh, without a partition;
            ``"auto"``: what the constants of ``python -m pyg_dist bench`` say is cheaper, printed with the reasons.
        partition: ``"metis"``; ``"hypergraph"``: fewer rows to send, for more time to partition (needs mtkahypar;
            Demirci et al., 4.3.2); ``"random"``; the owner of each node, a LongTensor ``[N]``; or a
            :class:`~pyg_dist.plan.Plan` that was saved, whose parts are used again. Parts that are found here are put
            on ranks such that few rows leave a machine, where there are several; given ones stay as they are.
        epsilon: how much heavier than the mean a part may be.
        exchange: what sums send: ``"post"``, rows of sources; ``"pre"``, sums for targets; ``"hybrid"``, as few of both
            as can be (SuperGCN, 5.2-5.3). What cannot be summed on the way (max, LSTM, learning weights) is post.
        bits: of each value that halos send in training, 32, 16, 8, 4 or 2, or (forward, backward). 32: rows as they
            are, exact; 16: bfloat16; fewer: rounded at random to steps of each row's range, approximate and unbiased
            (SuperGCN, 2.4 and 6). Exact all the same: evaluation (``model.eval()``, ``no_grad``); what is sent once
            and remembered (sums of constant features); rows that packing would not shorten (one column of float32);
            rows of fewer than 16 columns that stock convs read edge by edge (logits of attention). With
            ``checkpoint(..., use_reentrant=True)`` the first pass, under ``no_grad``, is exact, and the one that is
            computed again and differentiated is rounded; without it both are rounded alike. A value that the format
            does not hold (NaN, an infinity, in bfloat16 3.4e38) is an error that names the layer, the node and the
            rank. Not with ``layout="grid"``.
        mesh: the grid's axes, ``{"x": 2, "y": 1, "z": 2}``; one left out is 1; None: the planner's choice.
        comm_dtype: ``torch.bfloat16``: the messages of the grid's two big sums, approximate; None: exact.
        seed: of the partitioner, or of the grid's node orders.
        allow_nan: accept NaN features without a warning.
        model: (layers, hidden width) of the GCN that ``mesh=None`` and ``layout="auto"`` choose for; None: (3, 128).

    With ``layout="auto"``, ``mesh`` and ``comm_dtype`` hold if the choice is the grid, ``exchange`` is chosen too.

    Raises:
        DataError: The graph is not valid.
        AgreementError: The ranks were given different graphs, options or package versions; or a plan that was made for
            another graph, exchange, number of bits or of ranks.
        OptionError: An option is not one of the values above.
        UnsupportedError: A heterogeneous graph, a batch, or an option whose feature does not exist yet.
    """

    def __init__(
        self,
        data: Data,
        layout: str = "halo",
        partition: str | Tensor | np.ndarray[Any, Any] | Plan = "metis",
        epsilon: float = 0.03,
        exchange: Exchange = "hybrid",
        bits: int | tuple[int, int] = 32,
        mesh: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        seed: int = 0,
        allow_nan: bool = False,
        model: tuple[int, int] | None = None,
    ) -> None:
        session.init()
        module_hooks.install()
        axis = world_group()
        options, graph_input, error = None, None, None
        try:
            options = Options(layout, partition, epsilon, exchange, bits, mesh, comm_dtype, seed, model)
            graph_input = read_graph(data, allow_nan, warn=axis.rank == 0)
        except (PygDistError, ImportError) as caught:
            error = caught
        raise_together(error)
        assert options is not None
        assert graph_input is not None
        identity = _agree(graph_input, options)
        graph: Graph
        plan: Plan | GridPlan
        parts = None if options.layout == "grid" else _parts(graph_input, options, axis)
        if options.layout != "halo":
            priced, machine = model_of(graph_input, options), common_machine()
            if parts is not None:
                options = choose_layout(graph_input, options, parts, priced, machine)
        if options.layout == "grid":
            graph, plan = on_grid(graph_input, options, priced, machine, identity)
        else:
            assert parts is not None
            graph, plan = _in_parts(graph_input, options, parts)
        release_free_memory()
        self._adopt(graph_input, graph, plan)

    def _adopt(self, graph_input: GraphInput, graph: Graph, plan: Plan | GridPlan) -> None:
        """Fill this object with the local rows of every attribute."""
        super().__init__()
        self.__dict__.update(graph=graph, plan=plan, _store=DistributedStorage(_parent=self))
        values, weight = graph_input.adj_values, None
        if values is not None:
            weight = EdgeTensor.from_local(values.detach()[graph.edge_sharding.key], graph.edge_sharding)
            weight.requires_grad_(values.requires_grad)
        self[graph_input.graph_key] = DistributedEdgeIndex(graph, graph_input.graph_key == "adj_t", weight)
        for attributes in (graph_input.node_attributes, graph_input.edge_attributes):
            for name, value in attributes.items():
                of_edges = attributes is graph_input.edge_attributes
                rows = graph.edge_sharding if of_edges else graph.input_rows(name, value)
                local = rows.slice(value.detach())
                self[name] = RowTensor.from_local(local, rows).requires_grad_(value.requires_grad)
        for name, value in graph_input.other_attributes.items():
            self[name] = value

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.graph.node_sharding.size  # type: ignore[no-any-return]

    @property
    def num_edges(self) -> int:
        """Edges of the whole graph."""
        return self.graph.edge_sharding.size  # type: ignore[no-any-return]

    @property
    def traffic(self) -> Traffic:
        """Halo bytes, rows and messages that this rank has sent so far."""
        return self.graph.traffic  # type: ignore[no-any-return]

    def is_node_attr(self, key: str) -> bool:
        """Whether ``data[key]`` has a row per node."""
        return isinstance(self[key], NodeTensor)

    def is_edge_attr(self, key: str) -> bool:
        """Whether ``data[key]`` has a row per edge."""
        return isinstance(self[key], EdgeTensor)

    def validate(self, raise_on_error: bool = True) -> bool:
        """True: the graph was checked when it was distributed, and every assignment since."""
        return True

    def edge_subgraph(self, subset: Tensor) -> NoReturn:
        """Refused: the edges are fixed."""
        raise MixedRowsError("edge_subgraph would change a distributed graph: apply it before DistributedData")

    def sort(self, sort_by_row: bool = True) -> NoReturn:
        """Refused: the order of the edges is fixed."""
        raise MixedRowsError("sort would change the order of distributed edges: apply it before DistributedData")

    def is_undirected(self) -> bool:
        """Whether each edge has its reverse, with equal ``edge_attr`` (collective: gathers all edges)."""
        return bool(self._whole_edges().is_undirected())

    def is_coalesced(self) -> bool:
        """Whether the edges are sorted and none stands twice (collective: gathers all edges)."""
        if self.graph.loop_rule == "add":  # a sparse tensor of torch's, coalesced when it was read
            return True
        return bool(self._whole_edges().is_coalesced())

    def _whole_edges(self) -> Data:
        whole = Data(edge_index=self.graph.full_edge_index(), num_nodes=self.num_nodes)
        if "edge_attr" in self:
            whole.edge_attr = self.edge_attr.full_tensor()
        return whole

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge other than self loops (collective)."""
        return self.graph.has_isolated_nodes()  # type: ignore[no-any-return]

    def has_self_loops(self) -> bool:
        """Whether some edge is a self loop (collective)."""
        return self.graph.has_self_loops()  # type: ignore[no-any-return]

    def to(self, device: Any, *args: str, non_blocking: bool = False) -> DistributedData:
        """Move this rank's part to ``device``, in place as ``Data.to`` does (not collective).

        Raises:
            UnsupportedError: Names of attributes: all of them move with the edges.
        """
        if args:
            raise UnsupportedError(
                f"Expected no names of attributes, since all of them move (got {args}): leave them out"
            )
        given, here = torch.device(device), self.graph.device
        if given.type == here.type and (given.index or 0) == (here.index or 0):
            return self
        old, new = self.graph, self.graph.to(device)
        self.__dict__["graph"] = new
        for name, value in list(self._store.items()):
            if isinstance(value, RowTensor):
                known = {old.node_sharding: new.node_sharding, old.edge_sharding: new.edge_sharding}
                rows = known.get(value._sharding, value._sharding)
                self[name] = RowTensor.from_local(value.to_local().to(device, non_blocking=non_blocking), rows)
            elif isinstance(value, DistributedEdgeIndex):
                further = value.graph
                if isinstance(further, HaloGraph) and isinstance(new, HaloGraph) and further is not old:
                    self[name] = value.on(further.over(new.node_sharding))
                else:
                    self[name] = value.on(new)
            elif isinstance(value, Tensor):
                self[name] = value.to(device)
        return self

    def cpu(self, *args: str) -> DistributedData:
        """Move this rank's part to main memory."""
        return self.to("cpu", *args)

    def cuda(self, device: int | str | None = None, *args: str, non_blocking: bool = False) -> DistributedData:
        """Move this rank's part to a GPU."""
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)


def _agree(graph_input: GraphInput, options: Options) -> str:
    """Check that every rank was given the same (collective)."""
    given = {f"data.{name}": digest(value) for name, value in graph_input.tensors()}
    given["the number of nodes"] = str(graph_input.num_nodes)
    given.update(options.identity())
    require_equal(given, "give every rank the same graph and options, and seed what is drawn")
    return digest(repr(sorted(given.items())))


def _in_parts(graph_input: GraphInput, options: Options, parts: Tensor) -> tuple[HaloGraph, Plan]:
    """The halo layout: share and plan (collective)."""
    axis = world_group()
    share = halo_share(graph_input.edge_index, parts, axis.rank, axis.size, options.exchange)
    plan = _plan(share, axis, options, parts, plan_hash(graph_input.edge_index, parts, axis.size, options.exchange))
    nodes = HaloNodes(axis, share.node_id, share.num_nodes, options.exchange, options.bits_by_direction)
    graph = HaloGraph(share, nodes, graph_input.loop_rule, plan.is_dense)
    return graph, plan


def _parts(graph_input: GraphInput, options: Options, axis: Group) -> Tensor:
    """The owner of each node: computed on one rank, since solvers differ from run to run, and sent to all."""
    method = options.partition
    if isinstance(method, Plan):  # a data.plan has its parts on rank 0 alone
        return on_main(
            lambda: method.parts_for(
                graph_input.edge_index, graph_input.num_nodes, axis.size, options.exchange, options.bits_by_direction
            )
        )
    train_mask = graph_input.node_attributes.get("train_mask")
    if train_mask is not None and (train_mask.dtype != torch.bool or train_mask.dim() != 1):
        train_mask = None
    on_each = ranks_per_node()

    def parts() -> Tensor:
        edge_index = graph_input.edge_index
        found = partition_nodes(
            edge_index,
            graph_input.num_nodes,
            axis.size,
            method,
            train_mask=train_mask,
            epsilon=options.epsilon,
            seed=options.seed,
        )
        if not isinstance(method, str) or on_each is None:
            return found
        return place(edge_index, found, axis.size, on_each, options.exchange)

    return on_main(parts)


def _plan(share: HaloShare, axis: Group, options: Options, parts: Tensor, identity: str) -> Plan:
    """The plan, from every rank's numbers (collective)."""
    mine = [*vars(ShareSizes.of(share)).values(), *share.sums.send_counts]
    table = axis.gather_rows(torch.tensor([mine]), [1] * axis.size)
    sizes, rows = table[:, : -axis.size].tolist(), table[:, -axis.size :]
    shares = tuple(ShareSizes(*size) for size in sizes)
    kept, bits = parts.to(torch.int32) if axis.rank == 0 else None, options.bits_by_direction
    return Plan(
        options.layout, options.partition_name, options.exchange, shares, pairs_of(rows), identity, kept, bits,
        ranks_per_node(),
    )  # fmt: skip
