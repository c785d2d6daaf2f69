"""``DistributedHeteroData``: a PyG ``HeteroData`` of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_dist.backend.comm.data_groups import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.ops.memory import release_free_memory
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import raise_together
from pyg_dist.backend.session.steps import set_up, step
from pyg_dist.data.options import Options, agree
from pyg_dist.data.storage import TypedEdges, TypedNodes, moved_to, usable_device
from pyg_dist.data.typed_layout import owners_of_all, parts_by_type, types_on_halo
from pyg_dist.errors import DataError, MixedRowsError, PygDistError, UnsupportedError
from pyg_dist.graph import module_hooks
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.plan import Hierarchy, Plan
from pyg_dist.halo.plan.relations import HeteroPlan, Relation
from pyg_dist.store.hetero_input import HeteroInput, read_hetero
from pyg_dist.tensor.row_tensor import RowTensor


class DistributedHeteroData(OfThisRun, HeteroData):  # type: ignore[misc]
    """A graph of several types of nodes and edges, spread over all ranks; what ``DistributedData(HeteroData)`` gives.

    It is used like the ``HeteroData`` it was made from. ``data["paper"].x`` and every other attribute with a row per
    node of a type is a :class:`~pyg_dist.tensor.NodeTensor`, ``data["author", "writes", "paper"].edge_index`` is the
    handle of a relation, and ``x_dict``, ``edge_index_dict`` and ``metadata()`` go into ``HeteroConv``,
    ``to_hetero(model)``, ``HGTConv``, ``HANConv``. Losses, metrics and gradients are those of one process (exact,
    without ``bits``). Collective.

    All types are partitioned together, by the edges of all relations, such that each type is balanced. Edges between
    two types have no self loops: GAT and its kin need ``add_self_loops=False``, as PyG's ``HeteroConv`` asks for.

    Args:
        data: nodes, of each type with features or a number, and relations with an ``edge_index`` or a sparse ``adj_t``.
        layout: ``"halo"``, or ``"auto"``, which is the same here: tiles are of square matrices.
        partition: see :class:`~pyg_dist.DistributedData`; owners are given for each type, ``{type: LongTensor [N]}``.
        epsilon: how much heavier than the mean a part may be, of each type.
        exchange: see :class:`~pyg_dist.DistributedData`.
        bits: see there.
        mesh: None: there are no data groups, as there are no mini-batches of types.
        comm_dtype: None.
        seed: of the partitioner.
        allow_nan: accept NaN features without a warning.
        model: None.
        nodes_of: None.
        hierarchy: ``"auto"`` or ``"off"``: ranks send to one another wherever they are.

    Raises:
        DataError: The graph is not valid.
        AgreementError: The ranks were given different graphs, options or package versions.
        OptionError: An option is not one of the values above.
        UnsupportedError: An option of a graph with one type.

    Example:
        >>> from torch_geometric.data import HeteroData
        >>> graph = HeteroData({"user": {"x": torch.rand(4, 3)}, "item": {"x": torch.rand(5, 2)}})
        >>> graph["user", "buys", "item"].edge_index = torch.tensor([[0, 1, 3], [2, 2, 4]])
        >>> data = DistributedData(graph)
        >>> tuple(data["item"].x.shape), data["user", "buys", "item"].num_edges
        ((5, 2), 3)
    """

    is_distributed = True

    def __init__(
        self,
        data: HeteroData,
        layout: str = "halo",
        partition: str | Tensor | np.ndarray[Any, Any] | Mapping[str, Any] = "metis",
        epsilon: float = 0.03,
        exchange: ExchangeKind = "hybrid",
        bits: int | tuple[int, int] = 32,
        mesh: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        seed: int = 0,
        allow_nan: bool = False,
        model: tuple[int, int] | None = None,
        nodes_of: Any = None,
        hierarchy: Hierarchy = "auto",
    ) -> None:
        session.init()
        module_hooks.install()
        options, hetero, error = None, None, None
        with set_up("DistributedData", num_steps=4):
            with step("read and check"):
                try:
                    hetero = read_hetero(data, allow_nan, warn=session.is_main())
                    one_type = {"mesh": mesh, "comm_dtype": comm_dtype, "model": model, "nodes_of": nodes_of}
                    owners: Any = owners_of_all(hetero, partition) if isinstance(partition, Mapping) else partition
                    options = Options(layout, owners, epsilon, exchange, bits, mesh, comm_dtype, seed, model, hierarchy)
                    _require_known(options, one_type)
                except (PygDistError, ImportError) as caught:
                    error = caught
                raise_together(error)
                assert options is not None
                assert hetero is not None
            with step("compare the ranks' inputs"):
                agree(hetero, options)
            group = DataGroups.of(None).part
            with step(f"partition ({options.partition_name}, {group.size} parts)"):
                parts = parts_by_type(hetero, options)
            with step("lay out (halo)"):
                nodes, graphs, plan = types_on_halo(hetero, options, parts)
            release_free_memory()
        self._adopt(hetero, nodes, graphs, plan)

    def _adopt(
        self,
        hetero: HeteroInput,
        nodes: Mapping[str, NodeSharding],
        graphs: Mapping[Relation, DistributedGraph],
        plan: HeteroPlan,
    ) -> None:
        """Fill this object with the local rows of every attribute."""
        super().__init__()
        self.__dict__.update(node_shardings=nodes, plan=plan, device=hetero.device)
        for name, value in hetero.others.items():
            self[name] = value
        for kind, found in hetero.nodes.items():
            store = self.get_node_store(kind)
            for name, value in found.nodes.items():
                store[name] = _rows(value, nodes[kind], hetero.device)
            for name, value in found.others.items():
                store[name] = value
        for relation, given in hetero.relations.items():
            store, graph, weight = self.get_edge_store(*relation), graphs[relation].to(hetero.device), None
            if given.adj_values is not None:
                weight = _rows(given.adj_values, graph.edge_sharding, hetero.device)
            store[given.graph_key] = DistributedEdgeIndex(graph, given.graph_key == "adj_t", weight)
            for name, value in given.edge_attributes.items():
                store[name] = _rows(value, graph.edge_sharding, hetero.device)
            for name, value in given.other_attributes.items():
                store[name] = value

    def get_node_store(self, key: str) -> TypedNodes:
        """The attributes of a type of nodes."""
        if key not in self._node_store_dict:
            if key not in self.node_shardings:
                raise DataError(f"Expected a type of nodes of this graph (got {key!r}): add it before DistributedData")
            self._node_store_dict[key] = TypedNodes(_parent=self, _key=key)
        return self._node_store_dict[key]  # type: ignore[no-any-return]

    def get_edge_store(self, src: str, rel: str, dst: str) -> TypedEdges:
        """The edges of a relation and their attributes."""
        key = src, rel, dst
        if key not in self._edge_store_dict:
            self._edge_store_dict[key] = TypedEdges(_parent=self, _key=key)
        return self._edge_store_dict[key]  # type: ignore[no-any-return]

    @property
    def traffic(self) -> Traffic:
        """Bytes, rows and messages of halos that this rank has sent so far, for all relations."""
        return next(iter(self.node_shardings.values())).traffic  # type: ignore[no-any-return]

    def validate(self, raise_on_error: bool = True) -> bool:
        """True: the graph was checked when it was distributed, and every assignment since."""
        return True

    def subgraph(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the nodes and edges are fixed."""
        raise MixedRowsError("This would change a distributed graph with types: apply it before DistributedData")

    edge_subgraph = to_homogeneous = subgraph

    def to(self, device: Any, *args: str, non_blocking: bool = False) -> DistributedHeteroData:
        """Move this rank's part to ``device``, in place as ``HeteroData.to`` does (not collective).

        Raises:
            UnsupportedError: A device that is not usable here; or names of attributes: all of them move.
        """
        there = usable_device(device, self.device, args)
        if there != self.device:
            self.__dict__["device"] = there
            for store in self.stores:
                for name, value in list(store.items()):
                    moved = moved_to(value, there, non_blocking)
                    if moved is not value:
                        store[name] = moved
        return self

    def cpu(self, *args: str) -> DistributedHeteroData:
        """Move this rank's part to main memory."""
        return self.to("cpu", *args)

    def cuda(self, device: int | str | None = None, *args: str, non_blocking: bool = False) -> DistributedHeteroData:
        """Move this rank's part to a GPU."""
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)


def _rows(value: Tensor, rows: Any, device: torch.device) -> Any:
    """This rank's rows of an attribute of the input."""
    local = rows.slice(value.detach()).to(device)
    return RowTensor.from_local(local, rows).requires_grad_(value.requires_grad)


def _require_known(options: Options, of_one_type: dict[str, Any]) -> None:
    """Refuse what only a graph with one type has."""
    if options.layout == "grid":
        raise UnsupportedError(
            "Expected layout='halo' with a HeteroData (got 'grid', whose tiles are of square matrices): leave it out"
        )
    if options.hierarchy == "on":
        raise UnsupportedError(
            "Expected hierarchy='auto' or 'off' with a HeteroData (got 'on', for one relation): leave it out"
        )
    given = [name for name, value in of_one_type.items() if value is not None]
    if given or isinstance(options.partition, Plan):
        raise UnsupportedError(
            f"Expected no {given[0] if given else 'saved plan'} with a HeteroData (got one), which is for graphs with "
            f"one type of nodes: leave it out"
        )
