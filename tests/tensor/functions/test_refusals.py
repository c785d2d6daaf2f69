"""What row tensors refuse, and what torch does not let them see."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Operands, Refusal, distribute, node_rows, refuse_all
from workers import on_ranks

from pyg_dist import EdgeTensor, NodeTensor
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, UnsupportedError

sdpa = F.scaled_dot_product_attention

NO_FORM = "has no distributed form for a NodeTensor, whose rows lie on several ranks: call it on .full_tensor()"
TRACED = "torch.compile cannot trace it"


def scaled(z: Any) -> Any:
    return z * 2 + 1


@torch.library.custom_op("tests_of_refusals::mean", mutates_args=())
def mean_of_a_library(z: torch.Tensor) -> torch.Tensor:
    return z.mean()


def of_weights(transform: Callable[..., Any], weights: str) -> Callable[[Operands], object]:
    """``transform`` of a function of plain weights that meet rows."""

    def expression(t: Operands) -> object:
        x, w = t.x.detach(), getattr(t, weights).detach()
        return transform(lambda w: (x * w).sum())(w)

    return expression


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def scripted_linear() -> torch.nn.Module:
    return torch.jit.script(torch.nn.Linear(3, 2).double())  # type: ignore[no-any-return]


def of_a_layer(transform: Callable[..., Any]) -> Callable[[Operands], object]:
    """``transform`` of a function of a layer's parameters."""

    def expression(t: Operands) -> object:
        x, layer = t.x.detach(), torch.nn.Linear(t.F, 1).double()

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(layer, parameters, (x,)).sum()

        return transform(loss)(dict(layer.named_parameters()))

    return expression


REFUSED: list[Refusal] = [
    # Not in the table.
    (lambda t: torch.cov(t.x), MixedRowsError, f"torch.cov {NO_FORM} (all rows, collective) or .to_local()"),
    (lambda t: torch.cdist(t.x, t.full.unsqueeze(1)), MixedRowsError, "others would move rows"),
    (lambda t: F.bilinear(t.v, t.v, t.gates), MixedRowsError, "expected rows [N, F] (got"),
    (lambda t: sdpa(t.c, t.c.unsqueeze(1), t.c.unsqueeze(1)), MixedRowsError, "is row-wise only for query, key and"),
    (lambda t: torch.cdist(t.full, t.y), MixedRowsError, "cdist is row-wise only for distributed rows and plain"),
    (lambda t: t.x.as_strided((2, 2), (1, 1)), MixedRowsError, f"as_strided {NO_FORM}"),
    (lambda t: t.x.untyped_storage(), MixedRowsError, f"untyped_storage {NO_FORM}"),
    (lambda t: torch.eye(t.N + 1).double().to_sparse() @ t.x, DataError, "Expected a matrix of all nodes by all nodes"),
    (lambda t: t.x.index_add(1, t.label, t.x), MixedRowsError, "of columns by a distributed index would mix rows"),
    (lambda t: torch.ops.aten.sum(t.x), MixedRowsError, "has no distributed form"),
    (lambda t: mean_of_a_library(t.x.detach()), MixedRowsError, "has no distributed form"),
    (lambda t: scripted_linear()(t.x), MixedRowsError, "torch.jit compiles for plain tensors (got"),
    (
        lambda t: torch.jit.trace(scaled, (t.x.detach(),), check_trace=False)(t.x), MixedRowsError,
        "torch.jit compiles for plain tensors (got",
    ),
    # Written elsewhere.
    (lambda t: torch.add(t.x, 1, out=torch.empty(7, 3)), MixedRowsError, "of row tensors does not take 'out': assign"),
    (lambda t: torch.cumsum(t.x, 1, out=t.y), MixedRowsError, "of row tensors does not take 'out': assign"),
    # Rows out of dimension 0.
    (lambda t: t.x.T + t.x, MixedRowsError, "add has no distributed form for rows in dimension 1 (of shape [3, 7])"),
    (lambda t: t.x - t.x.T, MixedRowsError, "sub has no distributed form for rows in dimension 1"),
    (lambda t: t.x.T[:, 0], MixedRowsError, "__getitem__ has no distributed form for rows in dimension 1"),
    (lambda t: t.x.T @ t.y.T, LayoutMismatchError, "matmul got shapes that do not fit ([3, 7] and [3, 7]): reshape"),
    (lambda t: t.x.T @ t.c, LayoutMismatchError, "matmul got shapes that do not fit"),
    (lambda t: torch.addmm(t.matrix[:1, :1], t.x.T, t.y), MixedRowsError, "addmm has no distributed form for"),
    # Complex rows.
    (lambda t: torch.complex(t.x, t.y), MixedRowsError, f"torch.complex {NO_FORM}"),
    (lambda t: t.x * 1j, UnsupportedError, "Expected real rows (got torch.complex128): keep the real and"),
    (lambda t: t.x.to(torch.complex64), UnsupportedError, "Expected real rows (got torch.complex64)"),
    (lambda t: t.x + t.full * 1j, UnsupportedError, "keep the real and the imaginary part as two tensors"),
    (lambda t: distribute(t.full * 1j, node_rows()), UnsupportedError, "Expected real rows (got torch.complex128)"),
    # Files and other libraries.
    (lambda t: pickle.dumps(t.x), MixedRowsError, "copied by copy.copy: each rank holds some"),
    (lambda t: torch.save({"x": t.x}, io.BytesIO()), MixedRowsError, "load with num_workers=0, or use copy.deepcopy"),
    (lambda t: copy.copy(t.x), MixedRowsError, "cannot be pickled, sent to another process or copied"),
    (lambda t: torch.from_dlpack(t.x), MixedRowsError, "A NodeTensor cannot be exported: use .full_tensor()"),
    (lambda t: np.from_dlpack(t.x), MixedRowsError, "A NodeTensor cannot be exported: use .full_tensor()"),
    (lambda t: t.x.__dlpack__(), MixedRowsError, "A NodeTensor cannot be exported"),
    # Transforms of functions.
    (lambda t: t.x._is_view(), MixedRowsError, TRACED),
    (lambda t: t.x._base, MixedRowsError, TRACED),
    (lambda t: torch.func.jvp(scaled, (t.x,), (t.y,)), MixedRowsError, "has no distributed form"),
    (of_weights(torch.func.grad, "vector"), UnsupportedError, "do not reach the rows of other ranks"),
    (of_weights(torch.func.hessian, "vector"), UnsupportedError, "use torch.autograd.grad"),
    (of_a_layer(torch.func.grad), UnsupportedError, "do not reach the rows of other ranks"),
    (of_weights(torch.vmap, "weight"), UnsupportedError, "do not reach the rows of other ranks"),
]  # fmt: skip


def inside(layer: torch.nn.Module) -> torch.nn.Module:
    layer.compile(backend="eager")
    return torch.nn.Sequential(layer)


COMPILED: list[tuple[Callable[[Operands], object], str]] = [
    (lambda t: compiled(scaled)(t.x), TRACED),
    (lambda t: compiled(lambda w: (t.x * w).sum())(t.vector), TRACED),
    (lambda t: compiled(torch.nn.Linear(t.F, 2).double())(t.x), "^torch.compile of Linear cannot trace"),
    (lambda t: compiled(torch.nn.Sequential(torch.nn.Linear(t.F, 2).double()))(t.x), "^torch.compile of Sequential"),
    (lambda t: inside(torch.nn.Linear(t.F, 2).double())(t.x), TRACED),
]


@on_ranks(*WORLD_SIZES)
def test_refused() -> None:
    refuse_all(REFUSED)


@on_ranks(1)
def test_compiled() -> None:
    """Of functions, and of modules inside of others, the error comes in one of torch's own."""
    for expression, message in COMPILED:
        with pytest.raises(Exception, match=message):
            expression(Operands("tall", True))
    plain = torch.nn.Linear(3, 2)
    plain.compile(backend="eager", fullgraph=True)
    assert plain(torch.ones(4, 3)).shape == (4, 2)


@on_ranks(3)
def test_not_dispatched() -> None:
    """What docs/reference/limits.md lists: torch hands these to nobody, and they see this rank's rows."""
    t, _plain = Operands("tall", True), Operands("tall", False)
    x = t.x.detach()
    local = x.to_local()
    result = torch.ops.aten.clone.default(x)
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, local, rtol=1e-6, atol=1e-6)
    if local.shape[0] < len(x):  # what comes out does not pass for all rows
        with pytest.raises(LayoutMismatchError, match="a plain operand with 1 or 7 rows"):
            x + result
    assert torch.as_tensor(x) is x


@on_ranks(2)
def test_what_hands_rows_on_is_refused() -> None:
    """Torch asks nobody here: functions of pyg_dist stand for its own."""
    x = Operands("tall", True).x.detach()
    calls: list[Callable[[Any], object]] = [
        torch.vmap(scaled), torch.func.grad(torch.sum), torch.func.jacrev(scaled), torch.func.functionalize(scaled),
        torch.utils.dlpack.to_dlpack, torch.to_dlpack,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            (MixedRowsError, UnsupportedError), match=r"do not reach the rows of other ranks|cannot be exported"
        ):
            call(x)


@on_ranks(1, 3)
def test_kept() -> None:
    """What keeps the distribution without any function of the table."""
    t = Operands("tall", True)
    for x in (t.x, t.mask):
        assert type(copy.deepcopy(x.detach())) is NodeTensor
        assert torch.equal(copy.deepcopy(x.detach()).to_local(), x.to_local())
    assert type(torch.nn.Parameter(t.x.detach())) is NodeTensor
    assert type(t.x.detach().requires_grad_()) is NodeTensor
    rows = node_rows()
    assert issubclass(NodeTensor, torch.Tensor)
    assert not issubclass(EdgeTensor, NodeTensor)
    assert (t.x.new_zeros(3).shape, t.x.new_ones(7, 1).shape) == ((3,), (7, 1))
    assert torch.equal(
        (t.x.detach() * 0 + t.x.new_full((7, 3), 2.0)).to_local(), torch.full((rows.num_local, 3), 2.0).double()
    )


@on_ranks(1, 3)
def test_other_graph() -> None:
    """Rows of edges do not meet those of another number of nodes."""
    from against_torch import distribute, graph

    t = Operands("tall", True)
    edges = graph("tall").graph.edge_sharding
    e = distribute(torch.ones(edges.size, 3).double(), edges)
    assert type(e * 2) is EdgeTensor
    e = e[:-1]
    for expression in (
        lambda: t.x + e,
        lambda: torch.cat([t.x, e], 1),
        lambda: F.mse_loss(t.x, e),
        lambda: t.x[e[:, 0] > 0],
    ):
        with pytest.raises(LayoutMismatchError):
            expression()


@on_ranks(1, 3)
def test_other_graph_of_the_same_size() -> None:
    """An error never says that it expected 40 nodes and got 40 nodes, and no more."""
    from random_graphs import random_graph
    from torch_geometric.nn import GCNConv

    from pyg_dist import DistributedData, distribute

    data, other = (DistributedData(random_graph(40, 160, seed=seed), partition="random") for seed in (1, 2))
    x, conv = data.x.detach().clone(), distribute(GCNConv(5, 3).double())
    for expression in (
        lambda: x.redistribute(other.x._sharding),
        lambda: x[other.train_mask],
        lambda: setattr(x, "grad", other.x.detach()),
        lambda: conv(x, data.edge_index, other.edge_weight),
        lambda: x + other.x,
        lambda: data.subgraph(other.train_mask),
    ):
        with pytest.raises((DataError, LayoutMismatchError), match=r"\(got .* of another graph or selection\)"):
            expression()
