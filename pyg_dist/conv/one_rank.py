"""Small graphs on one rank: PyG's own forward on plain tensors, since Python code takes longer than kernels there.

The result is the stock conv's, bit for bit; our kernels only move rows to edges and back, if there are many edges.
Whether a call goes this way depends on its arguments and the conv's state, never on earlier calls: activation
checkpointing, which calls twice, gets the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pyg_dist.backend import timing
from pyg_dist.backend.dense.indexed_rows import select, sum_rows
from pyg_dist.conv.fast_paths import CODE, is_hooked, step_hooks
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sharding import RowSharding

_OTHERS_DRAW = frozenset({"SuperGATConv"})
"""PyG's convs that draw random numbers for more than dropout."""

_SELECT_ROWS = frozenset({"MFConv"})
"""PyG's convs that spend their time on selecting rows by degree: kernels for their sums save little."""


class _OtherCallError(Exception):
    """An argument that this path does not take."""


# Not every exception: torch ends the recomputation of an activation checkpoint by one of its own.
_ERRORS = (_OtherCallError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


_MANY = 8
"""For convs with kernels the limit of elements is lower by this factor."""


def stock_result(
    conv: MessagePassing, stock: Any, args: Sequence[object], kwargs: dict[str, object], has_kernels: Callable[[], bool]
) -> Tensor | None:
    """``stock.forward`` on plain tensors if the graph is small and on one rank; ``None`` for all other calls.

    ``has_kernels`` tells whether our kernels could run the conv's steps.
    """
    for edge_index in (*args, *kwargs.values()):
        if type(edge_index) is DistributedEdgeIndex:
            break
    else:
        return None
    graph = edge_index.graph
    columns = graph.one_rank_columns
    if columns < 1 or not args:
        return None
    if graph.sources is not graph.targets and getattr(conv, "add_self_loops", False):  # which several ranks refuse
        return None
    rows = graph.targets
    if rows.size == graph.edge_sharding.size:  # a tensor of N = E rows may belong to edges, which are in another order
        return None
    try:
        with local_tensors():
            if not (_is_small(columns, args[0], stock, has_kernels) and _runs_plainly(conv, stock)):
                return None
            ends = graph.one_rank_edges
            args = [ends if arg is edge_index else _local(arg, graph) for arg in args]
            kwargs = {name: ends if arg is edge_index else _local(arg, graph) for name, arg in kwargs.items()}
            twin = stock_twin(conv, stock)
            twin.__class__ = _with_our_sums(stock)
            out = twin.forward(*args, **kwargs)
            if type(out) is Tensor and out.shape[0] == rows.num_local:
                return as_row_tensor_(out, rows)
    except _ERRORS:  # the usual path raises again, with a better message
        pass
    return None


def _is_small(max_columns: float, x: object, stock: type, has_kernels: Callable[[], bool]) -> bool:
    """Whether messages of rows like ``x`` would have few elements."""
    x = x[0] if type(x) is tuple else x
    if not isinstance(x, Tensor):
        return False
    columns = x.shape[1:].numel()
    if _MANY * columns <= max_columns:
        return True
    return columns <= max_columns and (stock.__name__ in _SELECT_ROWS or not has_kernels())


def _local(arg: object, graph: DistributedGraph) -> object:
    if isinstance(arg, RowTensor):
        nodes = graph.targets if graph.sources is graph.targets else None  # one of two sets comes in a pair
        if arg._sharding is nodes or arg._sharding is graph.edge_sharding:
            return arg.as_subclass(Tensor)  # nested convs look at the type
    elif arg is None or type(arg) is float:
        return arg
    elif type(arg) is tuple and (graph.sources is graph.targets or len(arg) != 2):
        return tuple(_local(item, graph) for item in arg)
    elif type(arg) is tuple:
        return tuple(_local_end(item, nodes) for item, nodes in zip(arg, (graph.sources, graph.targets), strict=True))
    raise _OtherCallError


def _local_end(rows: object, nodes: RowSharding) -> Tensor | None:
    if rows is None or (isinstance(rows, RowTensor) and rows._sharding is nodes):
        return None if rows is None else rows.as_subclass(Tensor)
    raise _OtherCallError


def _runs_plainly(conv: MessagePassing, stock: object) -> bool:
    """Whether the stock forward gives the same result, and no hook, profile or transform could see the difference."""
    state = conv.__dict__
    return (
        _is_pygs(stock)
        and not (conv.explain or state.get("cached") or any(step_hooks(state)))
        and state.keys().isdisjoint(CODE)
        and _is_unobserved(conv)
        and not (timing.is_recording() or torch._C._get_tracing_state() is not None)
        and not torch._C._are_functorch_transforms_active()
    )


def _is_unobserved(module: nn.Module | None) -> bool:
    """Whether ``module`` and its submodules have no hooks and draw no random numbers."""
    if module is None:
        return True
    state = module.__dict__
    cls: object = type(module)
    known, draws = _known(cls)
    if not known or is_hooked(module):
        return False
    # a submodule's own mode: a script may keep dropout in training mode in a conv that it evaluates
    if state["training"] and ((draws and state.get("p", 1)) or _drops(state.get("dropout"))):
        return False
    if any(map(callable, state.values())) and not all(map(_is_pygs_or_data, state.values())):
        return False
    return all(map(_is_unobserved, state["_modules"].values()))


def _is_pygs_or_data(value: object) -> bool:
    """Whether an attribute is no function, or PyG's: other functions may draw random numbers (``act=F.dropout``)."""
    return not callable(value) or str(value.__module__).startswith("torch_geometric.nn.")


def _drops(rate: object) -> bool:
    return any(rate) if isinstance(rate, (list, tuple)) else bool(rate)


@cache
def _known(cls: type) -> tuple[bool, bool]:
    """Whether a module's code is torch's or PyG's; and whether it draws random numbers."""
    stock = getattr(cls, "stock", cls)
    is_known = stock.__module__.startswith(("torch.nn.", "torch_geometric.nn.", "pyg_dist."))
    return is_known, issubclass(cls, (_DropoutNd, nn.RReLU))


@cache
def _is_pygs(stock: type) -> bool:
    return stock.__module__.startswith("torch_geometric.nn.conv.") and stock.__name__ not in _OTHERS_DRAW


_MEANS: dict[type, bool] = {SumAggregation: False, MeanAggregation: True}


@cache
def _with_our_sums(stock: Any) -> object:
    """``stock`` with our kernels that copy rows to edges and sum them: they add in the same order, but faster."""

    def rows_at_edges(conv: MessagePassing, x: Tensor, index: Tensor) -> Tensor:
        return select(x, index) if x.dim() + conv.node_dim in (0, x.dim()) else x.index_select(conv.node_dim, index)

    def aggregate(
        conv: MessagePassing, inputs: Tensor, index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        mean, is_first = _MEANS.get(type(conv.aggr_module)), inputs.dim() + conv.node_dim in (0, inputs.dim())
        if mean is None or dim_size is None or not is_first:
            out: Tensor = MessagePassing.aggregate(conv, inputs, index, ptr, dim_size)
            return out
        return sum_rows(inputs, index, dim_size, mean)

    steps: dict[str, object] = {"_index_select": rows_at_edges, "__module__": stock.__module__}
    if stock.aggregate is MessagePassing.aggregate:
        steps["aggregate"] = aggregate
    return type(stock.__name__, (stock,), steps)


C = TypeVar("C", bound=MessagePassing)


def stock_twin(conv: MessagePassing, stock: type[C]) -> C:
    """A ``stock`` conv with the same attributes as ``conv`` (the same dict, no copies)."""
    twin = object.__new__(stock)
    object.__setattr__(twin, "__dict__", conv.__dict__)
    if "_orig_propagate" not in vars(stock):  # PyG completes a class at its first instance
        twin._set_jittable_templates()
    return twin
