"""One expression on plain tensors and on distributed ones: values, shapes and every gradient must be the same.

An expression is a function of :class:`Operands`, whose attributes are tensors made on demand. A form is an expression
that is also given one function of torch, since the table answers for all of a name's: ``torch.relu``, ``Tensor.relu``
and ``F.relu``. Legend: N nodes, F columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, world_size
from pyg_dist.tensor import RowTensor, row_tensor
from pyg_dist.tensor.registry import NAMESPACES, TABLE, Function, Handler, functions
from pyg_dist.tensor.sharding import RowSharding

Expression = Callable[["Operands"], Any]
Form = Callable[[Function, "Operands"], Any]
Refusal = tuple[Callable[["Operands"], object], type[Exception], str]  # an expression, its error, words of the message

WORLD_SIZES = [1, 3]


def ranks_and_names(names: Collection[str]) -> list[tuple[int, str]]:
    """Each name on several ranks, and every third one on one, where nothing travels: its rows are a special case."""
    return [*((3, name) for name in names), *((1, name) for name in list(names)[::3])]


# Besides float64, in which everything is compared at every world size and layout.
OTHER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """Shape of the operands, and the owner of each node by world size."""

    num_nodes: int
    num_columns: int
    parts: dict[int, list[int]]


LAYOUTS = {
    # A rank without rows, at two and at three ranks.
    "tall": Layout(7, 3, {1: [0] * 7, 2: [1] * 7, 3: [2, 0, 2, 0, 0, 2, 2]}),
    # As many nodes as columns: only the number of dimensions tells rows from columns.
    "square": Layout(4, 4, {1: [0] * 4, 2: [1, 0, 0, 1], 3: [0, 2, 2, 2]}),
}


def every_layout() -> list[str]:
    """Keys of :data:`LAYOUTS`; on one rank, which has all rows, the one where a dimension's size tells nothing."""
    return list(LAYOUTS) if world_size() > 1 else ["square"]


@cache
def graph(layout: str) -> DistributedData:
    """A graph over the nodes of ``layout``, so connected that local order differs from the input's."""
    num_nodes, _, parts = LAYOUTS[layout]
    node = torch.arange(num_nodes)
    edge_index = torch.stack([torch.cat([node[:-1], node[1:2]]), torch.cat([node[1:], node[:1]])])
    data = Data(edge_index=edge_index, num_nodes=num_nodes, node_id=node, edge_id=torch.arange(num_nodes))
    return DistributedData(data, partition=torch.tensor(parts[world_size()]))


def node_rows(layout: str = "tall") -> RowSharding:
    """The distribution of the nodes of ``layout``."""
    rows: RowSharding = graph(layout).graph.node_sharding
    return rows


def distribute(full: Tensor, rows: RowSharding) -> RowTensor:
    """``full`` distributed, made without any function of the table."""
    return RowTensor.from_local(full.detach().index_select(0, rows.position), rows)


class Operands:
    """Tensors by name, equal for both kinds; those of :attr:`ROWS` have a row per node, the others are row-free.

    Args:
        layout: a key of :data:`LAYOUTS`.
        distributed: whether tensors with rows are row tensors.
        dtype: of all floating tensors.
    """

    ROWS = frozenset(
        "x y p v u c d i j m n mask other_mask only label column order ties".split()
        + "holes spread sign position multi soft".split()
    )
    CONSTANT = frozenset(("class_weight", "sorted"))  # torch differentiates by few weights of losses

    def __init__(self, layout: str, distributed: bool, dtype: torch.dtype = torch.float64) -> None:
        self._layout = layout
        self._distributed = distributed
        self._dtype = dtype
        self._made: dict[str, Tensor] = {}

    @property
    def N(self) -> int:
        return LAYOUTS[self._layout].num_nodes

    @property
    def F(self) -> int:
        return LAYOUTS[self._layout].num_columns

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._made:
            value = _value(self._layout, name)
            value = value.to(self._dtype, copy=True) if value.is_floating_point() else value.clone()
            if self._distributed and name in self.ROWS:
                value = self._distribute(value)
            self._made[name] = value.requires_grad_(value.is_floating_point() and name not in self.CONSTANT)
        return self._made[name]

    def _distribute(self, full: Tensor) -> RowTensor:
        return distribute(full, node_rows(self._layout))


@cache
def _value(layout: str, name: str) -> Tensor:
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    N, F, _ = LAYOUTS[layout]
    node = torch.arange(N)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=rng, dtype=torch.float64)

    def integer(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=rng)

    makers: dict[str, Callable[[], Tensor]] = {
        "x": lambda: normal(N, F),
        "y": lambda: normal(N, F),
        "p": lambda: uniform(N, F) * 0.8 + 0.1,  # probabilities
        "v": lambda: normal(N),
        "u": lambda: normal(N),
        "c": lambda: normal(N, 2, F),  # cubes
        "d": lambda: normal(N, 2, F),
        "i": lambda: integer(1, 6, N, F),
        "j": lambda: integer(1, 4, N, F),
        "m": lambda: normal(N, F) > 0,
        "n": lambda: normal(N, F) > 0.5,
        "mask": lambda: node % 3 != 1,
        "other_mask": lambda: node > 1,
        "only": lambda: node == 2,  # one training node
        "label": lambda: integer(0, F, N),
        "column": lambda: normal(N, 1),
        "order": lambda: normal(N, F).argsort(1),  # a permutation of the columns in every row
        "ties": lambda: integer(-1, 2, N, F).double(),
        "holes": lambda: normal(N, F).masked_fill(torch.arange(N * F).view(N, F) % 5 == 1, torch.nan),
        "spread": lambda: uniform(N, 1) + 0.5,
        "sign": lambda: node % 2 * 2 - 1,
        "position": lambda: (node * 5 + 3) % N,  # ids of nodes
        "multi": lambda: torch.cat([integer(0, F, N, 1), torch.full((N, F - 1), -1)], 1),  # a set of labels
        "soft": lambda: (normal(N, F)).softmax(1),
        # Row-free from here on.
        "weight": lambda: normal(4, F),
        "matrix": lambda: normal(F, 4),
        "table": lambda: normal(F, 4),
        "vector": lambda: normal(F),
        "row": lambda: normal(1, F),
        "scalar": lambda: normal(),
        "gates": lambda: normal(4 * F, F),
        "more_gates": lambda: normal(4 * F, F),
        "gate_bias": lambda: normal(4 * F),
        "class_weight": lambda: uniform(F) + 0.5,
        "sorted": lambda: torch.linspace(-1, 1, N, dtype=torch.float64),
        # Plain, but with a row per node.
        "full": lambda: normal(N, F),
        "full_v": lambda: normal(N),
        "full_i": lambda: integer(1, 6, N, F),
        "full_p": lambda: uniform(N, F) * 0.8 + 0.1,
        "full_multi": lambda: torch.cat([integer(0, F, N, 1), torch.full((N, F - 1), -1)], 1),
        "full_label": lambda: integer(0, F, N),
    }
    return makers[name]()


def leaves(result: Any) -> Iterator[Any]:
    """The tensors and values in a result, in order."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        for item in result:
            yield from leaves(item)
    else:
        yield result


def assert_same(got: Any, want: Any, what: str) -> None:
    """Equal up to 1e-10 in float64 and to a few units of rounding below; NaN equals NaN. Compares local rows."""
    if isinstance(got, RowTensor):
        assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
        want, got = want.detach()[got._sharding.position], got.to_local()
    if isinstance(want, Tensor):
        assert type(got) in (Tensor, torch.nn.Parameter), f"{what}: {got!r}"
        dtype = want.dtype
        if got.dtype == want.dtype and torch.equal(got, want):
            return
        tolerance = 1e-10 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        torch.testing.assert_close(
            got.detach(), want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )
    elif isinstance(want, np.ndarray):
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=what)
    else:
        assert type(got) is type(want), f"{what}: {got!r}, expected {want!r}"
        assert got == want or (got != got and want != want), f"{what}: {got!r}, expected {want!r}"


def _back_propagate(results: list[Any]) -> None:
    """Weight all that is differentiable with fixed numbers, and run one backward pass."""
    outputs, weights = [], []
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
            weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result.dtype)
            if isinstance(result, RowTensor):
                weight, result = weight[result._sharding.position], result.to_local()
            outputs.append(result)
            weights.append(weight)
    if outputs:
        torch.autograd.backward(outputs, weights)


# What torch says where it has no such form of a call, or no derivative of it.
_NOT_IN_TORCH = (TypeError, AttributeError, RuntimeError, IndexError)
NO_DERIVATIVE = ("derivative for", "not implemented for")


def check(
    expression: Expression,
    layout: str = "tall",
    what: str = "result",
    dtype: torch.dtype = torch.float64,
    must_distribute: bool = False,
    must_work: bool = True,
) -> bool:
    """Compare values, global shapes and the gradients of all operands that were used; return False if torch refuses.

    Args:
        expression: is run on plain operands and on distributed ones.
        layout: a key of :data:`LAYOUTS`.
        what: for messages.
        dtype: of the operands.
        must_distribute: whether each tensor in the result has to be a row tensor.
        must_work: whether torch has to take the plain operands.
    """
    plain, distributed = Operands(layout, False, dtype), Operands(layout, True, dtype)
    try:
        want = list(leaves(expression(plain)))
    except _NOT_IN_TORCH:
        if must_work:
            raise
        return False
    got = list(leaves(expression(distributed)))
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, f"{what}[{k}] ({layout}, {dtype})")
        assert not must_distribute or isinstance(g, RowTensor) or not isinstance(g, Tensor), f"{what}[{k}] is {g!r}"
    try:
        _back_propagate(want)
    except RuntimeError as error:
        if not any(reason in str(error) for reason in NO_DERIVATIVE):
            raise
        return True
    _back_propagate(got)
    for name, operand in plain._made.items():
        mine = distributed._made[name]
        assert (mine.grad is None) == (operand.grad is None), f"{what}: gradient of {name} is {mine.grad}"
        if operand.grad is not None:
            assert type(mine.grad) is (type(mine) if isinstance(mine, RowTensor) else Tensor), f"{what}: {name}.grad"
            assert_same(mine.grad, operand.grad, f"{what}: gradient of {name} ({layout}, {dtype})")
    return True


def is_in_place(name: str) -> bool:
    """Whether the functions of this name write to their first operand."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
    return name.endswith("_") and not name.endswith("__")


def in_place(function: Function) -> Function:
    """``function`` on a copy of its first operand, which may then be a leaf that requires grad."""

    def on_copy(first: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(first, Tensor):
            raise TypeError("an in-place function writes to a tensor")
        copy = first.clone()
        result = function(copy, *rest, **named)
        assert result is copy or result is None, f"{function} returned another tensor than it wrote to"
        return copy

    return on_copy


@contextmanager
def dispatches() -> Iterator[set[Function]]:
    """The functions that torch hands to the table inside the context."""
    seen: set[Function] = set()

    class Recorder(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

    with mock.patch.object(row_tensor, "TABLE", Recorder(TABLE)):
        yield seen


def functions_in_table(name: str) -> list[Function]:
    """Every function of torch that the table has under ``name``."""
    return [function for function in dict.fromkeys(functions(name)) if function in TABLE]


def names_in_table(*handlers: Handler) -> list[str]:
    """The public names of the functions and properties that ``handlers`` answer for."""
    names = set()
    for namespace in NAMESPACES:
        for name in dir(namespace):
            member = getattr(namespace, name)
            found = {name: member}
            if namespace is Tensor:
                found.update({f"{name}.{a}": getattr(member, a, None) for a in ("__get__", "__set__", "__delete__")})
            elif name.startswith("_"):
                continue
            names |= {n for n, f in found.items() if _is_function(f) and TABLE.get(f) in handlers}
    return sorted(names)


def _is_function(member: Any) -> bool:
    return callable(member) and not isinstance(member, type) and getattr(member, "__hash__", None) is not None


def each(names: str, forms: Sequence[Form]) -> dict[str, Sequence[Form]]:
    """The same forms for several names."""
    return {name: forms for name in names.split()}


def agree(
    name: str,
    forms: Sequence[Form],
    must_distribute: bool = False,
    every_form: bool = True,
    layouts: Sequence[str] = (),
    other_dtypes: Sequence[torch.dtype] = OTHER_DTYPES,
) -> None:
    """Check all forms of all functions of one name, the first of them in float64 in every layout, on several ranks each
    form in one of the other dtypes too; its namesakes, which the same handler answers for, in one layout.

    Args:
        name: as :func:`pyg_dist.tensor.registry.functions` takes it.
        forms: torch itself may refuse some of them for some functions (methods take no first operand by name).
        must_distribute: see :func:`check`.
        every_form: whether each form has to work for one function at least.
        layouts: keys of :data:`LAYOUTS`, or none for :func:`every_layout`.
        other_dtypes: beside float64.
    """
    worked: set[int] = set()
    everywhere = [(layout, torch.float64) for layout in layouts or every_layout()]
    more = [(everywhere[0][0], dtype) for dtype in other_dtypes] if world_size() > 1 else []
    for number, function in enumerate(functions_in_table(name)):
        called = in_place(function) if is_in_place(name) else function
        has_worked = False
        with dispatches() as dispatched:
            for layout, dtype in everywhere[-1:] if number else everywhere + more:
                dtypes = (dtype,) if dtype not in other_dtypes or len(forms) < len(other_dtypes) else other_dtypes
                for k, form in enumerate(forms):
                    if dtypes[(k + k // 3) % len(dtypes)] != dtype:  # forms come in threes: each of them in turn
                        continue
                    expression = partial(form, called)
                    if check(expression, layout, f"{name}, form {k}", dtype, must_distribute, must_work=False):
                        has_worked = True
                        worked.add(k)
        assert has_worked, f"torch takes no form of {function}"
        # Operators come under the name of their function; functions written in Python may leave it to what they call.
        by_another_name = name.startswith("__") or isinstance(function, FunctionType)
        assert function in dispatched or (by_another_name and dispatched), f"the entry of {function} is never used"
    assert not every_form or len(worked) == len(forms), f"{name}: forms {set(range(len(forms))) - worked} never worked"


def refuses(expression: Expression, error: type[Exception], message: str, layout: str = "tall") -> None:
    """Check that the expression raises ``error`` on distributed operands, in one line with ``message`` in it."""
    try:
        result = expression(Operands(layout, True))
    except error as caught:
        text = str(caught)
        assert message in text, f"{text!r} lacks {message!r}"
        assert "\n" not in text, text
        return
    raise AssertionError(f"Expected {error.__name__} with {message!r} (got {result!r})")


def refuse_all(refusals: Sequence[Refusal]) -> None:
    """:func:`refuses` for each."""
    for expression, error, message in refusals:
        refuses(expression, error, message)
