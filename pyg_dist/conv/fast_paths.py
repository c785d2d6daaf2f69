"""The table of functions that replace steps of stock convs, and the guard before them.

A fast path computes what ``forward``, ``propagate`` or ``edge_updater`` of some classes of PyG would, by fewer or
cheaper kernels, exactly. It is registered once::

    @fast_path(GINConv, sums=(SumAggregation,), when=lambda conv: not conv.eps.requires_grad)
    def isomorphism_forward(conv, edges, given): ...

and runs if the conv's code is that of the class, nothing of the conv is hooked, replaced or explained, and its
aggregation is one of ``sums``. It may still return ``None`` for some arguments: then PyG's code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from pyg_dist.graph.protocol import Norm
from pyg_dist.tensor.functions.moved_rows import MovedRows

Step = Literal["forward", "propagate", "edge_updater"]
Given = dict[str, Any]
"""The arguments of a step by name, of whatever types the conv's author chose."""

Run = Callable[[MessagePassing, Any, Given], object]
"""Called with the conv, its edges and the step's other arguments by name."""

R = TypeVar("R", bound=Run)

NORMS: dict[type, Norm] = {SumAggregation: Norm.SUM, MeanAggregation: Norm.MEAN}
"""The aggregations that are products with a matrix."""

STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
"""The steps that PyG's hooks observe, but for ``edge_updater``."""

step_hooks = itemgetter(*(f"_{step}_forward{kind}_hooks" for step in STEPS for kind in ("_pre", "")))
"""The hooks on steps, among a conv's attributes."""

_module_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

CODE = ("forward", "message", "message_basic", "edge_update", "aggregate", "update", "message_and_aggregate")
"""The methods that define a conv's computation."""

_NATIVE = (SumAggregation, MeanAggregation, MaxAggregation, MinAggregation)
"""Aggregations that kernels compute, so that their modules are not called."""


class FastPath(NamedTuple):
    """An entry of the table, for a class of PyG and its subclasses with the same code."""

    conv: type  # the class
    run: Run
    code: tuple[str, ...] = CODE  # the methods that must be the class's own
    sums: tuple[type, ...] = tuple(NORMS)  # the aggregations that it supports
    of_class: Callable[[type[MessagePassing]], object] | None = None  # a condition on the class
    when: Callable[[MessagePassing], bool] | None = None  # a condition on the conv, asked in each call
    # whether edges have to be on the ranks of their targets; else operators, and rows at the ends of edges on whatever
    # ranks, are enough
    needs_edges: bool = False
    takes_batches: bool = False  # whether features may have dimensions before the nodes, ``[B, N, F]``

    def fits(self, conv: MessagePassing, is_batch: bool = False) -> bool:
        """Whether it may run for ``conv`` as it is now."""
        if is_batch and not self.takes_batches:
            return False
        return type(conv.aggr_module) in self.sums and (self.when is None or self.when(conv))


_TABLE: dict[Step, list[FastPath]] = {"forward": [], "propagate": [], "edge_updater": []}


def fast_path(*convs: type, step: Step = "forward", **rules: Any) -> Callable[[R], R]:
    """Register the decorated function in place of a step of ``convs``; ``rules`` are those of :class:`FastPath`."""

    def register(run: R) -> R:
        _TABLE[step] += [FastPath(conv, run, **rules) for conv in convs]
        return run

    return register


@cache
def _paths(stock: type[MessagePassing], step: Step) -> tuple[FastPath, ...]:
    """The fast paths of a class: its own first, then those of any conv."""
    return tuple(
        path
        for path in sorted(_TABLE[step], key=lambda path: path.conv is MessagePassing)
        if issubclass(stock, path.conv)
        and all(getattr(stock, name, None) is getattr(path.conv, name, None) for name in path.code)
        and (path.of_class is None or path.of_class(stock))
    )


def by_fast_path(conv: MessagePassing, step: Step, edges: object, given: Given) -> Any:
    """The result of a fast path in place of a step of ``conv``; ``None``: none fits the conv or these arguments."""
    paths = _paths(conv.stock, step)
    if not paths or conv.decomposed_layers > 1 or has_changed_step(conv):
        return None
    is_batch = any(map(_is_batch, given.values()))
    return next((path.run(conv, edges, given) for path in paths if path.fits(conv, is_batch)), None)


def _is_batch(value: Any) -> bool:
    return any(map(_is_batch, value)) if type(value) in (tuple, list) else type(value) is MovedRows


def needs_no_edges(conv: MessagePassing) -> bool:
    """Whether the steps of ``conv`` need only operators, and rows at the ends of edges on whatever ranks."""
    paths = [path for step in _TABLE for path in _paths(conv.stock, step) if not path.needs_edges]
    if not paths or conv.decomposed_layers > 1 or has_changed_step(conv):
        return False
    return any(path.fits(conv) for path in paths)


def has_changed_step(conv: MessagePassing) -> bool:
    """Whether a step of this conv is explained, hooked, or replaced by an attribute."""
    state, module = vars(conv), conv.aggr_module
    if conv.explain or any(step_hooks(state)):
        return True
    for name in ("update", *STEPS):
        if name in state and (module is None or not _is_pygs(conv, state[name])):
            return True
    return type(module) in _NATIVE and ("forward" in vars(module) or is_hooked(module))


def _is_pygs(conv: MessagePassing, step: object) -> bool:
    """Whether ``step`` is one of the class's two ``propagate``, which PyG sets for explainers and decomposed layers."""
    pygs = [getattr(type(conv), f"_{kind}_propagate", None) for kind in ("orig", "jinja")]
    return getattr(step, "__func__", step) in pygs


def is_hooked(module: object) -> bool:
    """Whether a module has hooks."""
    return any(_module_hooks(vars(module)))
