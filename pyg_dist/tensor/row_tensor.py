"""``NodeTensor`` and ``EdgeTensor``: tensors that behave like the global ones while each rank holds some rows.

The object *is* this rank's local tensor, in memory and in autograd: the engine, hooks, checkpointing, custom
functions and optimizers work on it as on any tensor. What the Python side sees, though, is answered by the table
of :mod:`pyg_dist.tensor.registry`, and that speaks of the global tensor: shapes, reductions, selections, losses.

A function under :data:`local_tensors` sees the local rows. Results get their class by assignment to ``__class__`` (as
torch does for lazy parameters): a view through ``as_subclass`` would put a node into the graph at every call and
make every result a view, which in-place operations then have to rebase.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, UnsupportedError
from pyg_dist.tensor.calling_code import EdgeHandle, is_constructor_call
from pyg_dist.tensor.registry import (
    ARITHMETIC,
    KEEPS_ROWS,
    TABLE,
    TAKES_OUT,
    Args,
    Function,
    Handler,
    Kwargs,
    as_torch_names,
    changes_values,
    public_name,
    writes,
)
from pyg_dist.tensor.selection import Selection
from pyg_dist.tensor.sharding import Kind, RowSharding
from pyg_dist.tensor.sparse_form import SparseForm

local_tensors = torch._C.DisableTorchFunctionSubclass
"""Context in which row tensors are plain local tensors."""

T = TypeVar("T")
R = TypeVar("R", bound="RowTensor")


_FIRST = ("condition", "input", "x1", "elements")
"""torch's names for a first operand; that of ``where`` is the condition."""


class DerivedOperand(Tensor):
    """A tensor made of row tensors that is none itself: its ``__torch_function__`` answers for functions of both."""


class RowTensor(Tensor):
    """A global tensor of which this rank holds some rows (dimension 0 is distributed, the others are whole).

    Example:
        >>> isinstance(data.x, RowTensor), isinstance(data.edge_index[0], RowTensor)
        (True, True)
    """

    kind: Kind
    _sharding: RowSharding
    _attribute: str = ""  # its name in a DistributedData; for pyg_dist.graph.caches, as the next one
    _is_reused: bool = False
    # Caches (KEPT) are valid for this object at one version. They never reference a leaf's autograd graph, which would
    # be a cycle.
    _selection: tuple[int, RowSharding, Selection] | None = None  # what a mask selected: version, rows, selection
    _cached_aggregates: tuple[Any, ...] = ()
    _sparse_form: SparseForm | None = None  # of constant rows
    _places: tuple[int | None, Tensor] | None = None  # of a mask: where it holds, on the host; version, local rows
    _as_rows: tuple[object, NodeTensor] | None = None  # a tile's whole rows
    _counters: tuple[Tensor, ...] = ()  # this memory under torch's two counters of changes: its own and that of `.data`
    _uncounted: int = 0  # changes that neither counter has seen
    # What a batch's rows were picked from: this tensor's version, then that tensor and the picked rows' ids.
    _origin: tuple[int | None, RowTensor, Any] | None = None
    _copy_of: str = ""  # where torch would have a view: of "a slice of rows" or, on the grid, "columns"

    @property
    def __class__(self) -> type:  # what isinstance reads where the type says no
        if not self._sharding.is_on_one_rank and is_constructor_call(sys._getframe(1)):
            raise MixedRowsError(
                f"torch.Tensor(x), torch.LongTensor(x), y.new(x) and the like would read this rank's rows of a "
                f"{type(self).__name__}: write torch.tensor(x) for a plain tensor of all rows (collective), or "
                f"x.float(), x.long() for the same rows"
            )
        return type(self)

    @__class__.setter
    def __class__(self, class_: type) -> None:
        object.__dict__["__class__"].__set__(self, class_)

    @classmethod
    def from_local(cls: type[R], local: Tensor, rows: RowSharding) -> R:
        """The global tensor of which ``local`` is this rank's piece; shares memory and autograd with it.

        Shapes: local ``[rows.num_local, ...]``.

        Raises:
            DataError: ``local`` has another number of rows, or the rows are of another kind than this class.

        Example:
            >>> rows = data.graph.node_sharding  # which nodes are on which rank
            >>> ones = NodeTensor.from_local(torch.ones(rows.num_local, 2), rows)
            >>> tuple(ones.shape), ones.sum().item()
            ((34, 2), 68.0)
        """
        if not issubclass(_CLASSES[rows.kind], cls):
            raise DataError(f"Expected {cls.kind} rows for {cls.__name__}.from_local (got {rows}): take RowTensor's")
        with local_tensors():
            if local.shape[:1] != (rows.num_local,):
                raise DataError(
                    f"Expected a local tensor with {rows.num_local} rows, this rank's share of "
                    f"{rows.size} {rows.kind}s (got shape {list(local.shape)})"
                )
            return as_row_tensor_(local.as_subclass(Tensor), rows)  # type: ignore[return-value]

    def to_local(self) -> Tensor:
        """This rank's rows as a plain tensor: shares memory and autograd; no communication.

        Example:
            >>> local = data.x.to_local()
            >>> type(local).__name__, local.shape[0] <= data.x.shape[0]
            ('Tensor', True)
        """
        with local_tensors():
            return self.as_subclass(Tensor)

    def to_rows(self: R) -> R:
        """The same values with whole rows on each rank: itself, but for tiles of the grid layout."""
        return self

    def redistribute(self, sharding: RowSharding) -> RowTensor:
        """The same values, distributed in another way (DTensor's name); differentiable (collective where they differ).

        Raises:
            LayoutMismatchError: Not the same rows.
        """
        if self._sharding is sharding:
            return self
        with local_tensors():
            local = sharding.from_sharding(self.as_subclass(Tensor), self._sharding)
            if local is None:
                raise LayoutMismatchError(
                    f"Expected {sharding} (got {self._sharding} of another graph or selection): take both from one data"
                )
            return as_row_tensor_(local, sharding)

    def start_redistribution(self, sharding: RowSharding) -> Pending[Tensor]:
        """:meth:`redistribute` whose messages may be under way: gives the local piece (collective where they differ).

        Raises:
            LayoutMismatchError: Not the same rows.
        """
        local = self.redistribute(sharding).to_local()
        return Pending(lambda: local)

    def full_tensor(self) -> Tensor:
        """All rows in the original order, on every rank; differentiable (collective).

        Example:
            >>> torch.equal(data.x.full_tensor(), KarateClub()[0].x)
            True
        """
        return self._sharding.gather(self.to_local())

    def __iter__(self) -> Iterator[Tensor]:  # torch does not dispatch it
        """The rows in the original order, plain: ``max(y)``, ``for row in x`` (collective: gathers all, once)."""
        return iter(self.full_tensor())

    def __reduce_ex__(self, protocol: object) -> Any:
        if not torch._C._is_torch_function_enabled():  # hooks of autograd that save tensors: of this rank, for it
            return self.as_subclass(Tensor).__reduce_ex__(protocol)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def set_(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: torch asks nobody before it gives a tensor another memory."""
        raise MixedRowsError(
            f"set_ has no distributed form for a {type(self).__name__}, whose rows lie on several ranks: write x[:] = "
            f"values, or make a tensor by {type(self).__name__}.from_local"
        )

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if len(types) > 1 and any(issubclass(type_, (DerivedOperand, EdgeHandle)) for type_ in types):
            return NotImplemented
        handler = TABLE.get(func)
        if handler is None:
            if is_below_autograd(func):
                with local_tensors():
                    return func(*args, **(kwargs or {}))
            name = public_name(func)
            way_out = "call it on .full_tensor() (all rows, collective) or .to_local() (this rank's rows)"
            if name.startswith(("_foreach_", "_fused_")):  # an optimizer calls it, or a function that clips gradients
                way_out = "pass foreach=False, and fused=False, to what called it"
            raise MixedRowsError(
                f"{name} has no distributed form for a {cls.__name__}, whose rows lie on several ranks: {way_out}"
            )
        if kwargs:
            kwargs = as_torch_names(kwargs)
            if "out" in kwargs and not takes_out(handler, kwargs["out"]):
                raise MixedRowsError(f"{public_name(func)} of row tensors does not take 'out': assign the result")
            first = None if args else next((name for name in _FIRST if name in kwargs), None)
            if first is not None:  # handlers find the tensor in one place
                args = (kwargs[first],)
                kwargs = {name: value for name, value in kwargs.items() if name != first}
        if args and (writes(func) or (kwargs and kwargs.get("inplace"))):
            _refuse_copy(func, args[0])
        elif kwargs:
            _refuse_copy(func, kwargs.get("out"))
        if noted().is_on:
            note_numbers(func, args, kwargs)
        try:
            return handler(func, *args, **(kwargs or {}))
        except (RuntimeError, MemoryError) as error:
            out_of_memory.explain(error)
            raise


def is_below_autograd(function: Function) -> bool:
    """Whether it is an operator of torch or of this package, which backward formulas call: there all is local."""
    return isinstance(function, OpOverload) and function.namespace in ("aten", "prim", "prims", "pyg_dist")


def global_shape(x: RowTensor) -> torch.Size:
    """The shape of the whole tensor, also under :data:`local_tensors`."""
    with local_tensors():
        return x._sharding.global_shape(x.shape)


def note_numbers(function: Function, args: Args, kwargs: Kwargs | None) -> None:
    """Note the numbers that a function computes rows with, which every rank must give alike."""
    if len(args) > 1 or kwargs:
        kinds = _NUMBERS if function in ARITHMETIC else _FLOATS
        given = [a for a in ((*args, *kwargs.values()) if kwargs else args) if type(a) in kinds]
        if given:
            noted().numbers(tuple(given))


# Other functions' integers are dimensions and sizes.
_FLOATS = frozenset((float, np.float64, np.float32))
_NUMBERS = _FLOATS | {int, bool, np.int64, np.int32}


def _refuse_copy(function: Function, written: object) -> None:
    """Raise where ``written`` is a copy, and torch would change what it was copied from."""
    source = copy_of(written) if isinstance(written, RowTensor) else ""
    if not source or not changes_values(function):
        return
    remedy = "x[low:high] = ..." if source == SLICE else "x[:, low:high] = ..."
    raise MixedRowsError(
        f"{public_name(function)} of {source} would change a copy, where torch has a view: assign, {remedy}, or "
        f"change a clone"
    )


def takes_out(handler: Handler, out: object) -> bool:
    """Whether a function can write to ``out``: a row tensor, where values stay in their rows (optimizers do that)."""
    return (isinstance(out, RowTensor) and handler in KEEPS_ROWS) or handler in TAKES_OUT


KEPT = frozenset(
    "_sharding _selection _places _cached_aggregates _sparse_form _as_rows "
    "_entry _origin _counters _uncounted _copy_of".split()
)
"""Attributes of a row tensor that a copy of it does not get."""


def version_of(x: Tensor) -> int | None:
    """How often ``x`` has changed in place, through ``x.data``, too; ``None``: torch does not count."""
    with local_tensors():
        if x.is_inference():
            return None
        if not isinstance(x, RowTensor):
            return x._version
        if not x._counters:
            return x._uncounted + x._version
        return x._uncounted + sum(counter._version for counter in x._counters)


class NodeTensor(RowTensor):
    """One row per node (or per selected node).

    Example:
        >>> mean = data.x[data.train_mask].mean(dim=0)  # of all ranks: a plain tensor, equal on each
        >>> type(data.x).__name__, tuple(data.x.shape), tuple(mean.shape)
        ('NodeTensor', (34, 34), (34,))
    """

    kind = "node"


class EdgeTensor(RowTensor):
    """One row per edge; each is on the one rank that executes that edge.

    Example:
        >>> row, col = data.edge_index
        >>> isinstance(row, EdgeTensor), (row < col).sum().item()
        (True, 78)
    """

    kind = "edge"


_CLASSES: dict[Kind, type[RowTensor]] = {"node": NodeTensor, "edge": EdgeTensor}


def register_class(kind: Kind, class_: type[RowTensor]) -> None:
    """Let tensors with rows of ``kind`` be of ``class_``."""
    _CLASSES[kind] = class_


@overload
def as_row_tensor_(out: Tensor, rows: RowSharding) -> RowTensor: ...
@overload
def as_row_tensor_(out: T, rows: RowSharding) -> T: ...
def as_row_tensor_(out: object, rows: RowSharding) -> object:
    """Turn the fresh plain tensors in ``out`` (a tensor or a sequence of them) into row tensors, in place."""
    if type(out) is Tensor:
        fresh: Any = out
        if fresh.is_complex():
            raise UnsupportedError(
                f"Expected real rows (got {fresh.dtype}): keep the real and the imaginary part as two tensors"
            )
        fresh.__class__ = _CLASSES[rows.kind]
        fresh._sharding = rows
    elif isinstance(out, (tuple, list)):
        for item in out:
            as_row_tensor_(item, rows)
    return out


SLICE, COLUMNS = "a slice of rows", "columns of rows in tiles"
"""Results of :func:`copy_of`."""


def copied_slice(x: T) -> T:
    """Mark a slice of rows, which is a copy: in-place writes to it raise, since torch would return a view."""
    if isinstance(x, RowTensor):
        x._copy_of = SLICE
    return x


def copy_of(x: RowTensor) -> str:
    """The original of ``x``, or of its base, where torch would have a view of it, in words; ``""`` if it is no copy."""
    with local_tensors():
        return x._copy_of or getattr(x._base, "_copy_of", "")
