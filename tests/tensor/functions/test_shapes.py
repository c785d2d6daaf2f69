"""Global shapes, what can be asked for free, and changes of shape that keep rows whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from against_torch import (
    WORLD_SIZES,
    Form,
    Operands,
    Refusal,
    agree,
    distribute,
    each,
    functions_in_table,
    names_in_table,
    node_rows,
    ranks_and_names,
    refuse_all,
)
from workers import on_ranks

from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions import shapes

METADATA = names_in_table(shapes.metadata)
FORMS: dict[str, Sequence[Form]] = {
    "shape.__get__": [lambda f, t: f(t.x), lambda f, t: f(t.v), lambda f, t: f(t.c)],
    "size": [lambda f, t: f(t.x), lambda f, t: f(t.x, 0), lambda f, t: f(t.c, -1), lambda f, t: f(t.c, dim=0)],
    **each("numel __len__", [lambda f, t: f(t.x), lambda f, t: f(t.c)]),
    **each("view reshape", [
        lambda f, t: f(t.x, (-1, t.F)), lambda f, t: f(t.x, (t.N, -1)), lambda f, t: f(t.c, (-1, 2 * t.F)),
        lambda f, t: f(t.c, (t.N, t.F, 2)), lambda f, t: f(t.c, (t.N, 1, -1)), lambda f, t: f(t.v, (-1, 1)),
        lambda f, t: f(t.column, (-1,)), lambda f, t: f(t.v, (t.N,)), lambda f, t: f(t.x, (-1,)),
        lambda f, t: f(t.c, (t.N * t.F, 2)), lambda f, t: f(t.c, (-1, 2, 1)), lambda f, t: f(f(t.c, (-1,)), (-1, 2)),
        lambda f, t: f(f(t.c, (-1, 2)), (t.N, t.F, 2)), lambda f, t: f(f(t.x, (-1,)), (-1, t.F)),
        lambda f, t: f(f(t.x * 2, (-1,))[t.x.reshape(-1) > 0], (-1, 1)), lambda f, t: f(t.x, (-1, 1, t.N, t.F))[0, 0],
    ]),
    **each("view_as reshape_as", [lambda f, t: f(t.c, t.d), lambda f, t: f(t.column, t.v)]),
    "expand_as": [lambda f, t: f(t.column, t.x), lambda f, t: f(t.column, t.full)],
    "expand": [lambda f, t: f(t.column, -1, t.F), lambda f, t: f(t.column, (t.N, 2)), lambda f, t: f(t.x, t.N, -1)],
    "broadcast_to": [lambda f, t: f(t.column, (t.N, t.F)), lambda f, t: f(t.column, size=(-1, 2))],
    "repeat": [lambda f, t: f(t.x, 1, 2), lambda f, t: f(t.x, (1, 3)), lambda f, t: f(t.c, 1, 1, 2)],
    "squeeze": [
        lambda f, t: f(t.column), lambda f, t: f(t.column, 1), lambda f, t: f(t.x), lambda f, t: f(t.x, 0),
        lambda f, t: f(t.column.unsqueeze(-1), (1, 2)), lambda f, t: f(t.column, dim=-1),
    ],
    "unsqueeze": [lambda f, t: f(t.x, 1), lambda f, t: f(t.x, -1), lambda f, t: f(t.v, dim=1)],
    "flatten": [
        lambda f, t: f(t.c, 1), lambda f, t: f(t.x, start_dim=1), lambda f, t: f(t.column), lambda f, t: f(t.c, 1, 2),
        lambda f, t: f(t.x), lambda f, t: f(t.c, 0, 1), lambda f, t: f(t.c, end_dim=-2) * 2,
    ],
    "ravel": [lambda f, t: f(t.c), lambda f, t: f(t.column)],
    "unflatten": [
        lambda f, t: f(t.c, 2, (1, -1)), lambda f, t: f(t.c, dim=-1, sizes=(-1, 1)), lambda f, t: f(t.x, 0, (t.N, 1)),
        lambda f, t: f(t.c.flatten(0, 1), 0, (-1, 2)), lambda f, t: f(t.x.flatten(), 0, (t.N, t.F)),
        lambda f, t: f(t.x, sizes=(t.N, 1), dim=0), lambda f, t: f(t.c, sizes=(-1, 1), dim=-1),
    ],
    **each("transpose swapaxes swapdims", [lambda f, t: f(t.c, 1, 2), lambda f, t: f(t.c, -1, -2)]),
    "mT.__get__": [lambda f, t: f(t.c)],
    "permute": [lambda f, t: f(t.c, (0, 2, 1)), lambda f, t: f(t.c, dims=(0, 1, 2))],
    "nbytes.__get__": [lambda f, t: f(t.x), lambda f, t: f(t.label), lambda f, t: f(t.c)],
    **each("movedim moveaxis", [
        lambda f, t: f(t.c, 1, 2), lambda f, t: f(t.c, destination=2, source=1), lambda f, t: f(t.c, (1, 2), (2, 1)),
        lambda f, t: f(t.c.unsqueeze(1), destination=3, source=1),
    ]),
}  # fmt: skip
PLAIN = ("shape.__get__", "size", "numel", "__len__")


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_shapes(name: str) -> None:
    agree(name, FORMS[name], must_distribute=name not in PLAIN)


@on_ranks(*WORLD_SIZES)
def test_metadata() -> None:
    assert len(METADATA) > 30
    differ = {"__hash__", "data_ptr", "grad_fn.__get__", "_version.__get__", "__dir__"}
    for name in METADATA:
        args = (torch.zeros(1),) if name in ("is_set_to", "_has_compatible_shallow_copy_type") else ()
        for make in (lambda t: t.x, lambda t: t.i, lambda t: t.x * 2):
            want, got = make(Operands("tall", False)), make(Operands("tall", True))
            for function in functions_in_table(name):
                if name.endswith("__set__"):
                    continue  # gradients and hooks have tests of their own
                value = function(got, *args)
                assert name in differ or value == function(want, *args), f"{name} is {value}"
    x = Operands("tall", True).x
    assert hash(x) == id(x)
    assert x.data_ptr() == x.to_local().data_ptr()
    assert {"shape", "full_tensor", "to_local"} <= set(dir(x))
    assert str((x * 2).grad_fn).startswith("<MulBackward")
    assert x.nelement() == 21
    assert not hasattr(x, "no_such_attribute")
    assert x.shape[0] == len(x) == x.size()[0] == 7


REFUSED: list[Refusal] = [
    (lambda t: t.x.view(3, -1), MixedRowsError, "view of shape [7, 3] to [3, 7] would not keep rows whole"),
    (lambda t: t.x.view(-1).view(3, 7), MixedRowsError, "would not keep rows whole"),
    (lambda t: t.x.view(-1)[t.x.view(-1) > 0].view(2, -1), MixedRowsError, "would not keep rows whole"),
    (lambda t: t.x.reshape(t.F, t.N), MixedRowsError, "would not keep rows whole"),
    (lambda t: t.x.view(torch.float32), MixedRowsError, "as another dtype"),
    (lambda t: t.column.expand(2, -1, -1), MixedRowsError, "would move rows"),
    (lambda t: t.x.repeat(2, 1), MixedRowsError, "would repeat or move rows"),
    (lambda t: t.x.unsqueeze(3), IndexError, "Dimension out of range"),
    (lambda t: t.x.sum(2), IndexError, "Dimension out of range (expected to be in [-2, 1], but got 2)"),
    (lambda t: NodeTensor.from_local(torch.zeros(99, 3), node_rows()), DataError, "rows, this rank's share of 7 nodes"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)


@on_ranks(*WORLD_SIZES)
def test_local_and_back() -> None:
    rows = node_rows()
    full = torch.arange(21.0).view(7, 3)
    x = distribute(full, rows)
    local = x.to_local()
    assert type(local) is torch.Tensor
    assert torch.equal(local, full[rows.position])
    assert torch.equal(x.full_tensor(), full)
    local.add_(1.0)  # shared memory
    assert torch.equal(x.full_tensor(), full + 1.0)
    leaf = torch.ones(rows.num_local, requires_grad=True)
    assert NodeTensor.from_local(leaf, rows).sum() == 7
    NodeTensor.from_local(leaf, rows).sum().backward()  # shared autograd
    assert torch.equal(leaf.grad, torch.ones(rows.num_local))
    assert sum(rows.counts) == 7
