"""Cached aggregations and operators: sums over neighbours of constant inputs, matrices of constant weights.

An :class:`OperatorCache` keeps what was made from edge weights while these live and do not change.

A sum over neighbours of a constant input, as layer 1's of ``data.x``, is computed once. It is an attribute of the input
tensor and is freed with it. An entry holds for one operator, which changes with the edge weights, and for one version
of the tensor, which torch counts up at every change in place. On the grid redistributing a tensor is such an operator,
too: a root's features move to where its neighbours' sum is. A result is kept if its input needs no gradient and is
lasting: an attribute of a ``DistributedData``, or, outside of checkpoints, a tensor that has been aggregated before.
Every rank decides alike, by the object and its version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyg_dist.backend.ops.memory import trim_after
from pyg_dist.backend.session.settings import REMEMBER_MIB
from pyg_dist.tensor.row_index import origin_of
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor, local_tensors, version_of
from pyg_dist.tensor.sharding import RowSharding, lasting
from pyg_dist.tensor.sparse_form import SparseForm

_Make = Callable[[Any, RowTensor | None], object]

T = TypeVar("T")
N = TypeVar("N", bound=NodeTensor)

# Convs of one script over one graph have a few sets of weights among them; drawn ones of the last steps count, too.
_MOST_WEIGHTS = 8


@dataclass(eq=False)
class _Entry:
    weight: weakref.ref[RowTensor] | None
    version: int | None
    operator: object  # None: the weight is gone, and its place is not

    def is_of(self, weight: RowTensor | None) -> bool:
        return (None if self.weight is None else self.weight()) is weight and self.operator is not None


class OperatorCache:
    """Operators that were built from weights, by a key and these weights.

    Building may be collective, so the decision must fall alike on every rank: by the identity of the tensor object and
    its version, never by addresses, which are all zero on a rank without edges.

    ``num_entries``: of the operators, roughly.
    """

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._kept: dict[Hashable, list[_Entry]] = {}

    @lasting
    def get(self, key: Hashable, weight: RowTensor | None, build: Callable[[], T]) -> T:
        """The operator for ``key`` and ``weight``, built where there is none, or where the weights have changed.

        ``weight`` is constant. Where torch does not count its changes, nothing is kept.
        """
        version = None if weight is None else version_of(weight)
        # The latest used ones. Those of weights that are gone keep their places: when Python finds out that they are
        # gone differs by rank, and which places are given up must not.
        places = self._kept.setdefault(key, [])
        for kept in places:
            if kept.weight is not None and kept.weight() is None:
                kept.operator = None
        for kept in places:
            if kept.is_of(weight) and kept.version == version and (weight is None or version is not None):
                places.append(places.pop(places.index(kept)))
                return cast(T, kept.operator)  # a key stands for one kind
        operator = build()
        trim_after(self._num_entries, each_step=True)  # weights may be drawn in each step
        if weight is None or version is not None:
            new = _Entry(None if weight is None else weakref.ref(weight), version, operator)
            self._kept[key] = [*(kept for kept in places if not kept.is_of(weight)), new][-_MOST_WEIGHTS:]
        return operator


class AskedOfBatches:
    """Patterns and operators that batches have needed: the loader's thread makes them for the next, before a step asks.

    On a device making it waits for the device. Nothing here is collective: what a batch is made from is known, or it is
    left out. That thread goes over copies, since a step may note more meanwhile.

    Attributes:
        edges: what was asked of a batch's edges: names of attributes, each of what the one before gives.
    """

    def __init__(self) -> None:
        self.edges: set[tuple[str, ...]] = set()
        self._others: dict[Hashable, tuple[_Make, weakref.ref[RowTensor] | None, int | None]] = {}

    def note(self, key: Hashable, make: _Make, weight: RowTensor | None = None) -> None:
        """``make`` makes it of another batch, and of what that has of these weights of the graph."""
        origin = None if weight is None else weakref.ref(weight)
        self._others[key] = make, origin, None if weight is None else version_of(weight)

    def make_ahead(self, batch: object, weights: Iterable[RowTensor] = ()) -> list[object]:
        """Make it of a ``batch`` with these ``weights``, which is to keep it; not where the graph's have changed."""
        picked, made = {id(known[0]): weight for weight in weights if (known := origin_of(weight)) is not None}, []
        for make, origin, version in [*self._others.values()]:
            of_graph = None if origin is None else origin()
            if origin is None:
                made.append(make(batch, None))
            elif of_graph is not None and id(of_graph) in picked and version == version_of(of_graph):
                made.append(make(batch, picked[id(of_graph)]))
        return made


# Over one graph, a tensor has products with one operator per kind of conv; more at once are edge weights that change.
_MAX_OPERATORS = 2

# Graphs, as relations are, whose results one tensor keeps.
_MAX_GRAPHS = 16


@dataclass(frozen=True, eq=False)
class CachedAggregate:
    """``result`` is ``operator`` times ``owner``, at their versions."""

    owner: weakref.ref[NodeTensor]  # a copy of a tensor may carry its attributes along
    graph: weakref.ref[object]  # over whose edges
    version: int | None
    operator: object
    result: Tensor
    result_version: int
    sparse_form: SparseForm | None

    def or_its_place(self) -> CachedAggregate:
        """Itself without a result where the graph is gone. Its place stays: when Python notices differs by rank."""
        return self if self.graph() is not None else replace(self, operator=None, result=self.result.new_empty(0))

    def rows(self, class_: type[N], sharding: RowSharding) -> N:
        """The result as a tensor of its own."""
        rows = class_.from_local(self.result, sharding)
        rows._sparse_form = self.sparse_form
        return rows


def is_cached(x: NodeTensor, operator: Callable[[], object], rows: RowSharding) -> bool:
    """Whether the result is known, or would be kept for the next time. Not collective, apart from ``operator``.

    ``operator`` is called only where x has some results; ``rows`` are those of the result.
    """
    return is_cacheable(x, rows) or (bool(x._cached_aggregates) and lookup(x, operator()) is not None)


def lookup(x: NodeTensor, operator: object) -> CachedAggregate | None:
    """The cached product of ``operator`` and x, if it is still valid."""
    for known in x._cached_aggregates:
        if known.operator is operator and known.owner() is x:
            is_valid = (
                _may_cache(x) and known.version == version_of(x) and known.result_version == known.result._version
            )
            return known if is_valid else None
    return None


def is_cacheable(x: NodeTensor, rows: RowSharding, num_results: int = 1) -> bool:
    """Whether results of x with these rows are worth keeping: up to a number of bytes a rank, on average."""
    # Autograd refuses tensors made in inference mode, later.
    if not (_may_cache(x) and (x._attribute or x._is_reused)) or torch.is_inference_mode_enabled():
        return False
    return fits(x, rows, num_results)


def fits(x: NodeTensor, rows: RowSharding, num_results: int = 1) -> bool:
    """Whether results of x are small enough to be kept."""
    return num_results * x.numel() * x.element_size() <= REMEMBER_MIB.value() * 2**20 * rows.group.size


def store(x: NodeTensor, operator: object, result: Tensor, graph: object) -> CachedAggregate:
    """Remember the local rows of what ``operator``, over the edges of ``graph``, made of x."""
    form = SparseForm() if x._attribute else None  # from its first time on, so that a run's steps have the same bits
    known = CachedAggregate(weakref.ref(x), weakref.ref(graph), version_of(x), operator, result, result._version, form)
    kept = [r.or_its_place() for r in x._cached_aggregates if r.operator is not operator]
    alike = [r for r in kept if type(r.operator) is type(operator) and r.graph() is graph]
    others = [r for r in kept if r not in alike]
    x._cached_aggregates = (*others[-_MAX_GRAPHS:], *(*alike, known)[-_MAX_OPERATORS:])
    return known


def _may_cache(x: NodeTensor) -> bool:
    """Whether results of x may be remembered, and what is remembered may stand for them, here and now."""
    with local_tensors():
        if x.requires_grad or x.is_inference():
            return False
    # In a checkpoint, what is computed again must take the same way, whatever was remembered meanwhile: an attribute
    # is remembered from its first time on, another tensor would be from its second one.
    return bool(x._attribute) or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
