"""``DistributedHeteroData``: a PyG ``HeteroData`` of which each rank holds a part; its mini-batches, and plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.data import HeteroData

from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.ops.memory import release_free_memory
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import raised_on_all_ranks
from pyg_dist.backend.session.steps import set_up, step
from pyg_dist.data.base_data import DistributedBaseData, refused
from pyg_dist.data.batch import cut, drawn_rows, moved, plain_attributes
from pyg_dist.data.options import Options, agree
from pyg_dist.data.storage import require_name
from pyg_dist.data.typed_layout import LocalTypes, NodesByType, owners_of_all, parts_by_type, types_on_halo
from pyg_dist.data.typed_storage import TypedEdges, TypedNodes
from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.graph import module_hooks
from pyg_dist.graph.sample import TypedSubset
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan, Relation
from pyg_dist.store.graph_input import read_hetero


class DistributedHeteroData(OfThisRun, DistributedBaseData, HeteroData):
    """A graph of several types of nodes and edges, spread over all ranks: ``DistributedData(HeteroData)`` makes one.

    It is used like the ``HeteroData`` it was made from. ``data["paper"].x`` and every other attribute with a row per
    node of a type is a :class:`~pyg_dist.tensor.NodeTensor`, ``data["author", "writes", "paper"].edge_index`` is the
    handle of a relation, and ``x_dict``, ``edge_index_dict`` and ``metadata()`` go into ``HeteroConv``,
    ``to_hetero(model)``, ``HGTConv``, ``HANConv``. Losses, metrics and gradients are those of one process (exact,
    without ``bits``). Collective.

    All types are partitioned together, by the edges of all relations, such that each type is balanced. Edges between
    two types have no self loops: GAT and its kin need ``add_self_loops=False``, as PyG's ``HeteroConv`` asks for.

    Options are those of :class:`~pyg_dist.DistributedData`, but that ``layout="auto"`` is ``"halo"``, as tiles are of
    square matrices; owners are given for each type, ``partition={type: LongTensor [N]}``; ``epsilon`` holds for each
    type; ``hierarchy`` is chosen for each relation; and ``mesh``, ``comm_dtype``, ``model`` and ``nodes_of`` stay
    out.

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
    node_shardings: NodesByType
    plan: HeteroPlan
    place: torch.device
    _node_store_dict: dict[str, TypedNodes]
    _edge_store_dict: dict[Relation, TypedEdges]

    def __init__(self, data: HeteroData, *, allow_nan: bool = False, **given: Any) -> None:
        session.init()
        module_hooks.install()
        with set_up("DistributedData", num_steps=4):
            with step("read and check"), raised_on_all_ranks():
                hetero = read_hetero(data, allow_nan, warn=session.is_main())
                if isinstance(given.get("partition"), Mapping):
                    given["partition"] = owners_of_all(hetero, given["partition"])
                options = known_options(given)
            with step("compare the ranks' inputs"):
                agree(hetero, options)
            group = DataGroups.of(None).part
            with step(f"partition ({options.partition_name}, {group.size} parts)"):
                parts = parts_by_type(hetero, options)
            with step("lay out (halo)"):
                graph = types_on_halo(hetero, options, parts)
            release_free_memory()
        self._fill(LocalTypes.of(hetero, graph))

    def __getitem__(self, *key: Any) -> Any:
        require_name(key[0] if len(key) == 1 else key)
        return super().__getitem__(*key)

    def _begin(self, nodes: NodesByType, plan: HeteroPlan, device: torch.device) -> None:
        super().__init__()
        self.__dict__.update(node_shardings=nodes, plan=plan, place=device)

    def _fill(self, local: LocalTypes) -> None:
        self._begin(local.graph.nodes, local.graph.plan, local.device)
        for name, value in local.others.items():
            self[name] = value
        for kind, attributes in local.nodes.items():
            self.get_node_store(kind).update(attributes)
        for relation, edges in local.edges.items():
            store = self.get_edge_store(*relation)
            assert edges.graph_key is not None
            store[edges.graph_key] = edges.handle
            store.update(edges.attributes)

    def get_node_store(self, key: str) -> TypedNodes:
        """The attributes of a type of nodes."""
        if key not in self._node_store_dict:
            if key not in self.node_shardings:
                raise DataError(f"Expected a type of nodes of this graph (got {key!r}): add it before DistributedData")
            self._node_store_dict[key] = TypedNodes(_parent=self, _key=key)
        return self._node_store_dict[key]

    def get_edge_store(self, src: str, rel: str, dst: str) -> TypedEdges:
        """The edges of a relation and their attributes."""
        key = src, rel, dst
        if key not in self._edge_store_dict:
            self._edge_store_dict[key] = TypedEdges(_parent=self, _key=key)
        return self._edge_store_dict[key]

    @property
    def traffic(self) -> Traffic:
        """Bytes, rows and messages of halos that this rank has sent so far, for all relations."""
        return next(iter(self.node_shardings.values())).traffic

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge of any relation (collective: gathers all edges)."""
        return bool(self._whole_edges().has_isolated_nodes())

    def is_undirected(self) -> bool:
        """Whether each edge has its reverse, whatever its relation, as in PyG (collective: gathers all edges)."""
        return bool(self._whole_edges().is_undirected())

    def _whole_edges(self) -> HeteroData:
        whole = HeteroData({kind: {"num_nodes": rows.size} for kind, rows in self.node_shardings.items()})
        for relation, store in self.edge_items():
            whole[relation].edge_index = store.handle.graph.full_edge_index()
        return whole

    # The nodes and edges are fixed, and types have their names.
    subgraph, edge_subgraph, to_homogeneous = map(refused, ("subgraph", "edge_subgraph", "to_homogeneous"))
    rename, coalesce, sort = map(refused, ("rename", "coalesce", "sort"))

    @property
    def _device(self) -> torch.device:
        return self.place

    def _set_device(self, device: torch.device) -> None:
        self.__dict__["place"] = device


_OF_ONE_TYPE = ("mesh", "comm_dtype", "model", "nodes_of")


def known_options(options: dict[str, Any]) -> Options:
    """The options of a graph with types; refuses options for graphs with one type."""
    given = [name for name in _OF_ONE_TYPE if options.get(name) is not None]
    known = Options(**{name: value for name, value in options.items() if name != "nodes_of"})
    if known.layout == "grid":
        raise UnsupportedError(
            "Expected layout='halo' with a HeteroData (got 'grid', whose tiles are of square matrices): leave it out"
        )
    if given or isinstance(known.partition, Plan):
        raise UnsupportedError(
            f"Expected no {given[0] if given else 'saved plan'} with a HeteroData (got one), which is for graphs with "
            f"one type of nodes: leave it out"
        )
    return known


def ready(data: DistributedHeteroData) -> None:
    """Prepare batches of ``data`` (collective at the first use)."""
    for rows in data.node_shardings.values():
        rows.rows_by_id  # noqa: B018
    for store in data.edge_stores:
        store.handle.graph.edge_sharding.counts  # noqa: B018


def induced(data: DistributedHeteroData, sample: TypedSubset) -> DistributedHeteroData:
    """The batch, without attributes that learn (:func:`add_learning`). Not collective, once ready."""
    with torch.inference_mode(False):
        nodes = {kind: whole.sampled(sample.nodes[kind]) for kind, whole in data.node_shardings.items()}
        batch: DistributedHeteroData = type(data).__new__(type(data))
        batch._begin(nodes, data.plan, data._device)
        batch._global_store._mapping.update(data._global_store._mapping)
        for kind, store in data.node_items():
            picked, drawn = nodes[kind].picked(data._device), sample.nodes[kind]
            known = {"n_id": picked, **moved(drawn.attributes, data._device), **drawn_rows(drawn, picked)}
            batch.get_node_store(kind)._mapping.update(cut(store, None, picked, None, learns=False) | known)
        for relation, store in data.edge_items():
            ends = nodes[relation[0]], nodes[relation[-1]]
            graph = store.handle.graph.between(*ends, sample.edges[relation])
            edges = graph.pick_edges()
            known = {"e_id": edges, **moved(sample.edge_attributes[relation], data._device)}
            batch.get_edge_store(*relation)._mapping.update(cut(store, graph, None, edges, learns=False) | known)
        for relation in sample.edge_attributes.keys() - sample.edges.keys():
            its = batch.get_edge_store(*relation)
            its._mapping.update(moved(sample.edge_attributes[relation], data._device))
    return batch


def add_learning(data: DistributedHeteroData, batch: DistributedHeteroData) -> None:
    """Add the attributes that learn, at their present values; the gradient reaches those of ``data``."""
    for kind, store in data.node_items():
        its = batch.get_node_store(kind)
        its._mapping.update(cut(store, None, its.n_id, None, learns=True))
    for relation, store in data.edge_items():
        its = batch.get_edge_store(*relation)
        graph: Any = its.handle.graph  # a batch's
        its._mapping.update(cut(store, graph, None, its.e_id, learns=True))


def plain_batch(data: HeteroData, sample: TypedSubset) -> HeteroData:
    """The batch of a graph that one process has, as PyG makes it."""
    batch = data.__class__()
    batch._global_store._mapping.update(data._global_store._mapping)
    for kind, store in data.node_items():
        nodes = sample.nodes[kind]
        found = plain_attributes(data, store, nodes, None)
        batch[kind].update({**found, **nodes.attributes, **nodes.node_attributes})
    for relation, store in data.edge_items():
        batch[relation].update(plain_attributes(data, store, None, sample.edges[relation]))
    for relation, attributes in sample.edge_attributes.items():
        batch[relation].update(attributes)
    return batch
