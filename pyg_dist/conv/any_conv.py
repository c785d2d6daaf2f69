"""``DistributedConv``: any message-passing conv of PyG, or of a script, on distributed data.

The conv's own code runs on the global view: its forward sees node tensors, its messages are edge tensors, and
parameters are copied to ranks where they meet rows. Three of its steps are replaced: rows of nodes are sent to edges
(:meth:`~pyg_dist.graph.edges.NodeIds.fetch`, the only exchange), messages are aggregated at their targets, and PyG's
graph functions (``softmax``, ``add_self_loops`` ...) take distributed edges. Nothing is assumed about a conv: each of
its operations is distributed, or raises.
"""

from __future__ import annotations

from functools import cache
from traceback import walk_tb
from typing import Any, TypeVar

from torch import Tensor, nn
from torch_geometric.nn import LabelPropagation, MessagePassing

from pyg_dist.backend.session.state import world_size
from pyg_dist.conv import attention, joined_types, polynomials  # noqa: F401  # register
from pyg_dist.conv.arguments import Arguments, arguments_of, edges_within, features_of, hyperedges_in, row_values
from pyg_dist.conv.fast_paths import by_fast_path, needs_no_edges
from pyg_dist.conv.function_patching import copy_of_classes
from pyg_dist.conv.graph_functions import SUBSTITUTES
from pyg_dist.conv.inputs import (
    edge_handle,
    moved_values,
    node_rows,
    refuse_overridden,
    require_all_at,
    require_all_nodes,
    rows_along,
)
from pyg_dist.conv.lazy_norm import NormWeight, made
from pyg_dist.conv.local_aggregation import aggregate_messages
from pyg_dist.conv.message_blocks import reduce_messages
from pyg_dist.conv.one_rank import stock_result, stock_twin
from pyg_dist.conv.special_sums import own_methods
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, PygDistError, UnsupportedError
from pyg_dist.graph.edge_blocks import BlockEdges
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges, NodeIds
from pyg_dist.graph.layer_call import no_layer_within, running
from pyg_dist.graph.protocol import EdgeView, have_same_edges
from pyg_dist.store.hyperedges import KEY
from pyg_dist.tensor import NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows

C = TypeVar("C", bound=MessagePassing)

_HOW = "give it data.edge_index as one argument; where it makes a graph of its own, compute that before DistributedData"

_FLOW = "source_to_target"

_OWN: dict[type, type] = {}
"""Classes of PyG that have a distributed form of their own."""

O = TypeVar("O", bound=type)  # noqa: E741


def own_form(ours: O) -> O:
    """Register the decorated class as the distributed form of the stock conv that it derives from."""
    _OWN[ours.__mro__[1]] = ours
    return ours


def run_on_edges(conv: MessagePassing, *args: object) -> Tensor:
    """Run a conv with an own form like any other conv, by its stock code on the global view.

    For features with a batch dimension and hooks on steps, which own forms do not support.
    """
    own = conv.__class__
    refuse_overridden(own)
    conv.__class__ = _class_on_edges(next(stock for stock, ours in _OWN.items() if issubclass(own, ours)))
    try:
        out: Tensor = conv.forward(*args)
        return out
    finally:
        conv.__class__ = own


def DistributedConv(conv: C) -> C:
    """Convert a stock conv to take the ``edge_index`` of a :class:`~pyg_dist.DistributedData`, same numbers (exact).

    The conv is changed in place and returned: its class becomes a subclass of the stock one, and so do those of convs
    that it owns, which it may call on the same edges or on others that it has made of them. Parameters, buffers,
    hooks, options and ``state_dict`` stay. ``SAGEConv`` and ``GCNConv`` become
    :class:`~pyg_dist.conv.DistributedSAGEConv` and :class:`~pyg_dist.conv.DistributedGCNConv`. Every other conv runs
    its own code, with its messages, attention, self loops, norms, multi-layer perceptrons and batch norm. Rows of
    sources are sent (post exchange), once for each tensor that a call needs at its edges. Sums and means of weighted
    rows (``GINConv``, ``TAGConv``, ``APPNP`` ...) use the chosen exchange and the native product; ``GATConv``,
    ``GATv2Conv``, ``TransformerConv``, ``AGNNConv`` and additive ``GeneralConv`` use one op that makes no edge tensors.
    On the grid layout these work on tiles; all others get whole rows there. Dropout is keyed by edge or node: its masks
    do not depend on the world size. On plain tensors the conv is the stock conv. With ``bits``, rows of 16 columns or
    more and their gradients are sent in few bits while training, unbiased; narrower ones (logits of attention, degrees,
    positions) unchanged.

    Args:
        conv: any :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - inputs and outputs as of the stock conv: ``[N, ...]`` node tensors, ``[E, ...]`` edge tensors for attributes
          and weights of edges; attention weights come back as ``(edges, alpha)``, with ``full_tensor()`` in PyG's order
        - a script's conv may also take the whole ``data``, or a tuple, list or dictionary with edges in it; what it
          assigns to ``data`` stays there

    Raises:
        UnsupportedError: ``conv`` is no message-passing conv, or one of PyG's that takes no ``edge_index``. When
            called: without distributed edges, with an ``adj_t`` whose values it does not use as edge weights, if the
            conv's own code reads edges in a way that needs all of them, or calls a conv within ``message``.

    Example:
        >>> from torch_geometric.nn import GATConv
        >>> conv = DistributedConv(GATConv(16, 8, heads=2))

    Calls of the conv are collective, forward and backward; this function is not.
    """
    stock = type(conv)
    if not isinstance(conv, MessagePassing):
        raise UnsupportedError(
            f"DistributedConv expected a MessagePassing conv (got {stock.__name__}): pyg_dist.distribute(model) swaps "
            f"the convs inside of a model"
        )
    for module, class_ in [(module, distributed_class_of(module, is_inner)) for _, module, is_inner in convs_of(conv)]:
        module.__class__ = class_
    return conv


def convs_of(model: nn.Module) -> list[tuple[str, MessagePassing, bool]]:
    """Path and conv of each conv of ``model``, and whether it is inside of another conv, which may change its edges."""
    convs = [(path, module) for path, module in model.named_modules() if isinstance(module, MessagePassing)]
    inner = {id(part) for _, conv in convs for part in conv.modules() if part is not conv}
    return [(path, conv, id(conv) in inner) for path, conv in convs]


def distributed_class_of(conv: MessagePassing, is_inner: bool) -> type[MessagePassing]:
    """The class that ``conv`` gets; its own where it is distributed already. See :func:`distributed_class`."""
    stock = type(conv)
    if is_inner and stock in _OWN.values():
        stock = stock.__mro__[1]
    return stock if getattr(stock, "is_distributed", False) else distributed_class(stock, is_inner)


def distributed_class(stock: object, is_inner: bool = False) -> Any:
    """The distributed subclass of ``stock``; ``is_inner``: for a conv that another conv calls, on edges of its own."""
    return _OWN[stock] if stock in _OWN and not is_inner else _class_on_edges(stock)


@cache
def _class_on_edges(stock: type[MessagePassing]) -> type[MessagePassing]:
    if stock.__module__.startswith("torch_geometric.") and not Arguments(stock).edges:
        raise UnsupportedError(
            f"{stock.__name__} takes no 'edge_index', and only convs that do can be distributed: {_HOW}"
        )
    own = stock.__mro__[: stock.__mro__.index(MessagePassing)]
    for step in ("propagate", "edge_updater"):
        if any(_is_custom(base, step) for base in own):
            raise UnsupportedError(
                f"{stock.__name__} has a {step!r} of its own, which no rank takes: write message, aggregate and update"
            )
    code = copy_of_classes(stock.__mro__, MessagePassing, _Defaults, SUBSTITUTES)
    body = {"stock": stock, "code": code, "__module__": __name__, "__doc__": stock.__doc__, **own_methods(stock)}
    return type(f"Distributed{stock.__name__}", (_OnEdges, code, stock), body)


def _is_custom(base: type, step: str) -> bool:
    """Whether a class defines ``step`` itself; PyG generates one for every class, and keeps the original beside it."""
    written = vars(base).get(step)
    original = vars(base).get(f"_orig_{step}", written)
    return written is original and written not in (None, getattr(MessagePassing, step))


class _Defaults(MessagePassing):
    """The methods that a conv inherits from PyG, where its own classes do not override them."""

    def aggregate(self, inputs: object, index: object, ptr: object = None, dim_size: int | None = None) -> Any:
        if not isinstance(index, NodeIds):
            return MessagePassing.aggregate(self, inputs, index, ptr, dim_size)
        messages, place = rows_along(_name(self), "messages", inputs, self.node_dim)
        require_all_at(_name(self), index.edges.graph, 1, dim_size)  # a hook may have changed it
        return MovedRows.make(aggregate_messages(self.aggr_module, messages, index.edges), place)


def _name(conv: MessagePassing) -> str:
    return str(getattr(conv, "stock", type(conv)).__name__)


class _OnEdges(MessagePassing):
    """The methods that distribute a stock conv, in front of its own."""

    is_distributed = True
    flow: str
    gives_terms = False  # set by a HeteroConv that sums the results of several relations itself
    stock: Any
    code: Any

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The stock forward; on distributed edges, its copy that calls our graph functions (collective)."""
        small = stock_result(self, self.stock, args, kwargs, lambda: needs_no_edges(self))
        if small is not None:
            return small
        arguments = arguments_of(self.stock)
        given = arguments.by_name(self, args, kwargs)
        first, *others = arguments.edges_in(given) or (None,)
        if first is None:
            with edges_within(given, self._of_handle) as laid_out, running(self):
                if laid_out is not None:
                    return self._run_distributed(arguments, laid_out)
            if world_size() > 1 or isinstance(features_of(given), RowTensor):
                raise UnsupportedError(f"{_name(self)} expected edges of a DistributedData (got none): {_HOW}")
            return self.stock.forward(self, *args, **kwargs)
        if isinstance(given.get(first), Edges):  # another conv calls this one
            given = made(given)
        if isinstance(given.get(first), dict):
            return self._over_relations(arguments, given, first)
        features = features_of(given)
        for name in (first, *others):
            if not isinstance(given.get(name), Edges):
                plain = name == KEY and type(given[name]) is Tensor and isinstance(features, RowTensor)
                hyperedges = hyperedges_in(given) if plain else None
                handle = edge_handle(self, given.get(name), features, calls_message=True, hyperedges=hyperedges)
                if handle is None:
                    return self.stock.forward(self, *args, **kwargs)
                given[name] = self._edges(handle, given)
        graph = given[first].graph
        if first == KEY:
            if graph.sources is graph.targets:
                raise DataError(
                    f"{_name(self)} expected hyperedges (got edges between nodes): name them data.hyperedge_index "
                    f"before DistributedData, or make the data a HyperGraphData"
                )
            if "num_edges" in arguments.names:  # PyG counts those that have nodes; or more
                if (given.get("num_edges") or graph.targets.size) < graph.targets.size:
                    raise DataError(
                        f"{_name(self)} expected num_edges={graph.targets.size}, the hyperedges of the graph, or more "
                        f"(got {given['num_edges']}): leave it out"
                    )
                given["num_edges"] = graph.targets.size
        if issubclass(self.stock, LabelPropagation) and graph.loop_rule == "replace":
            given["edge_weight"] = given[first].weight  # it takes those of a SparseTensor as they are
        self._require_cached(graph)
        if given.get("size") is not None and self.stock.forward.__module__.startswith("torch_geometric."):
            require_all_nodes(_name(self), graph, given["size"])
            given["size"] = None
        with running(self, given), edges_within(given, self._of_handle) as laid_out:
            values = (laid_out or given).items()
            given = {name: row_values(self, name, value, given[first]) for name, value in values}
            return self._run_distributed(arguments, given, first)

    def _run_distributed(self, arguments: Arguments, given: dict[str, Any], first: str | None = None) -> object:
        """:meth:`_run` on distributed edges; afterwards its caches are frozen."""
        put = vars(self).get("propagate")  # set by PyG for explainers: a class's generated code, or the generic one
        code = getattr(put, "__func__", None)
        is_pygs = code is MessagePassing.propagate or str(getattr(code, "__module__", "")).endswith("_propagate")
        if is_pygs:
            del self.propagate
        try:
            out = self._run(arguments, given, first)
        finally:
            if is_pygs:
                self.__dict__["propagate"] = put
        for kept in self._kept().values():
            if isinstance(kept, tuple) and isinstance(kept[1], NormWeight):
                kept[1].lazy.freeze()
        return out

    def _over_relations(self, arguments: Arguments, given: dict[str, Any], first: str) -> object:
        """The forward of a conv that takes the edges of each relation (collective)."""
        edges = given[first]
        plain = [relation for relation, one in edges.items() if not isinstance(one, DistributedEdgeIndex)]
        rows = [x for value in given.values() if isinstance(value, dict) for x in value.values()]
        if world_size() == 1 and not any(isinstance(x, (RowTensor, DistributedEdgeIndex)) for x in rows):
            return arguments.call(self.stock.forward, self, given)
        if plain:
            raise DataError(
                f"{_name(self)} expected features and edges of a DistributedData (got plain edges of {plain[0]}): wrap "
                f"the graph, data = DistributedData(data), and pass data.{first}"
            )
        laid_out = {relation: self._edges(one, given) for relation, one in edges.items()}
        with running(self):
            return self._run(arguments, {**given, first: laid_out}, first)

    def _run(self, arguments: Arguments, given: dict[str, Any], first: str | None = None) -> object:
        """A fast path, or the conv's own code; errors name the conv (collective)."""
        try:
            if first is not None and self.flow == _FLOW:
                others = {name: value for name, value in given.items() if name != first}
                out = by_fast_path(self, "forward", given[first], others)
                if out is not None:
                    return out
            return arguments.call(self.code.forward, self, given)
        except (MixedRowsError, LayoutMismatchError, UnsupportedError) as error:
            if isinstance(error.__cause__, PygDistError):  # of a conv that this one calls, which it names
                raise
            reason, _, advice = error.message.partition(": ")
            plain = "use a stock conv on the plain Data"
            if self.stock.__module__.startswith("torch_geometric."):
                advice = plain
            elif isinstance(error, MixedRowsError):
                names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
                if any(name.startswith("torch_geometric.utils.") for name in names):  # a function without substitute
                    advice = f"import PyG's functions at the top of the module, and call them by name, or {plain}"
            raise UnsupportedError(
                f"{_name(self)} cannot be distributed as it is called here ({reason}): {advice or plain}"
            ) from error

    def _edges(self, edge_index: DistributedEdgeIndex, given: dict[str, object]) -> Edges:
        parameters = arguments_of(self.stock).names
        reads_attributes = "edge_attr" in parameters and getattr(self, "edge_dim", ...) is not None
        is_weighted = edge_index.weight is not None and "edge_weight" not in parameters
        if edge_index.is_sparse and (given.get("edge_attr") is not None or reads_attributes or is_weighted):
            raise UnsupportedError(
                f"{_name(self)} expected data.edge_index (got adj_t, whose values it reads otherwise than as weights): "
                f"give the input an edge_index, and pass its values as edge weights or attributes"
            )
        return edge_index.edges(needs_no_edges(self))

    def _of_handle(self, edge_index: DistributedEdgeIndex) -> Edges:
        handle = edge_handle(self, edge_index, None, calls_message=True)
        assert handle is not None
        edges = self._edges(handle, {})
        self._require_cached(edges.graph)
        return edges

    def _require_cached(self, graph: EdgeView) -> None:
        """Check that caches of ``cached=True`` are this graph's; drop those of plain edges."""
        for name, value in self._kept(Tensor).items():
            first = value[0] if isinstance(value, tuple) else value
            if not isinstance(first, (Edges, NodeTensor)):
                setattr(self, name, None)
                continue
            is_its = have_same_edges(first.graph, graph) if isinstance(first, Edges) else graph.owns(first, 1)
            if not is_its:
                raise DataError(f"A {_name(self)} with cached=True got a second graph: use cached=False")

    def _kept(self, *kinds: type[Tensor]) -> dict[str, Any]:
        """The caches of ``cached=True`` by PyG's names (edges and norm, or rows), by default distributed ones only."""
        named = {name: value for name, value in vars(self).items() if name.startswith("_cached_")}
        return {
            name: value
            for name, value in named.items()
            if isinstance(value[0] if isinstance(value, tuple) and value else value, kinds or (Edges, NodeTensor))
        }

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        """PyG's generic code, hooks included; on plain edges, the code that PyG generates for the stock class."""
        edge_index, kwargs = self._laid_out(edge_index, kwargs)
        if isinstance(edge_index, Edges) and self.flow != _FLOW:
            return self._by_source("propagate", edge_index, size, kwargs)
        if isinstance(edge_index, Edges):
            graph = edge_index.graph
            require_all_nodes(_name(self), graph, size)
            if size is None and graph.sources is not graph.targets:  # PyG would take as many targets as sources
                size = graph.sources.size, graph.targets.size
            if edge_index.weight is not None and kwargs.get("edge_weight") is None:
                kwargs["edge_weight"] = edge_index.weight
            sums = by_fast_path(self, "propagate", edge_index, kwargs)
            if sums is not None:
                return sums
            edges = made(edge_index)
            edge_index = edges.by_target_rank
            kwargs = moved_values(made(kwargs), edges, edge_index)
            reduced = reduce_messages(self, edge_index, size, kwargs)
            if reduced is not None:
                return reduced
        code = MessagePassing if isinstance(edge_index, Edges) or self.decomposed_layers > 1 else self.stock
        return code.propagate(self, edge_index, size=size, **kwargs)

    def _by_source(self, step: str, edges: Edges, size: Any, given: dict[str, Any]) -> Any:
        """A step of ``flow="target_to_source"``: the usual one, over the reversed edges (collective).

        In generated code of PyG ``x_j`` is of the first of a pair in either flow; in its generic code it is not.
        """
        is_generic = getattr(self.stock, step) is getattr(MessagePassing, step)
        has_pairs = any(isinstance(value, (tuple, list)) for value in given.values())
        steps = ["message", "aggregate", "update", "edge_update"]
        reads_edges = "edge_index" in self.inspector.get_flat_param_names(steps)
        if self.explain or (is_generic and has_pairs) or reads_edges:
            raise UnsupportedError(
                f"{_name(self)} expected flow={_FLOW!r} where its steps read edge_index, take pairs by PyG's generic "
                f"code, or are explained (got {self.flow!r}): make it so, and pass edge_index.flip(0)"
            )
        edges = made(edges)
        given = moved_values(made(given), edges, edges.reversed)
        flow, self.flow = self.flow, _FLOW
        try:
            return getattr(self, step)(edges.reversed, size[::-1] if isinstance(size, (tuple, list)) else size, **given)
        finally:
            self.flow = flow

    def _laid_out(self, edge_index: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Lay out edges that the conv has made itself, over the nodes of the features beside them (collective)."""
        features = None if isinstance(edge_index, Edges) else features_of(given)
        first = features[0] if isinstance(features, (tuple, list)) and features else features
        if not isinstance(first.of if type(first) is MovedRows else first, NodeTensor):
            return edge_index, given
        handle = edge_handle(self, edge_index, features, calls_message=True)
        assert handle is not None
        edges = handle.edges()
        return edges, {name: row_values(self, name, value, edges) for name, value in given.items()}

    def edge_updater(self, edge_index: Any, size: object = None, **kwargs: Any) -> Any:
        edge_index, kwargs = self._laid_out(edge_index, kwargs)
        if isinstance(edge_index, Edges) and self.flow != _FLOW:
            out = self._by_source("edge_updater", edge_index, size, kwargs)
            return moved_values(out, made(edge_index).reversed, made(edge_index))
        if isinstance(edge_index, Edges):
            require_all_nodes(_name(self), edge_index.graph, size)
            edge_index, kwargs = made(edge_index), made(kwargs)
            weights = by_fast_path(self, "edge_updater", edge_index, kwargs)
            if weights is not None:
                return weights
            edges, edge_index = edge_index, edge_index.by_target_rank
            if edges is not edge_index:
                kwargs = moved_values(kwargs, edges, edge_index)
                out = MessagePassing.edge_updater(self, edge_index, size=size, **kwargs)
                return moved_values(out, edge_index, edges)
        code = MessagePassing if isinstance(edge_index, Edges) else self.stock
        return code.edge_updater(self, edge_index, size=size, **kwargs)

    def message(self, *args: object, **kwargs: object) -> Any:
        """The conv's own; it may not call a conv, since it runs once for each block of messages."""
        with no_layer_within(self):
            return super().message(*args, **kwargs)

    def _lift(self, src: Tensor, edge_index: object, dim: int) -> Tensor:
        if not isinstance(edge_index, Edges):
            return super()._lift(src, edge_index, dim)  # type: ignore[no-any-return]
        if isinstance(edge_index, BlockEdges):
            return edge_index.lift(src, dim)
        if not isinstance(src, NodeTensor):
            src = node_rows(self, edge_index.graph, src, dim)
        rows, place = rows_along(_name(self), "features", src, self.node_dim)
        return MovedRows.make(edge_index.end(dim).fetch(rows), place)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        pass  # the stock class has its templates

    def __prepare_scriptable__(self) -> MessagePassing:
        return stock_twin(self, self.stock)

    def __reduce_ex__(self, protocol: object) -> Any:  # the class has no name that pickle could find
        # Caches belong to this run: a saved or copied conv makes them anew.
        is_inner = type(self) is not distributed_class(self.stock)
        return _restore, (self.stock, is_inner), self.__dict__ | dict.fromkeys(self._kept())

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")  # a script prints the model that it names


def _restore(stock: type[MessagePassing], is_inner: bool = False) -> object:
    cls = distributed_class(stock, is_inner)
    return cls.__new__(cls)
