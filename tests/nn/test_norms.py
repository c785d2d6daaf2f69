"""The fused pass against torch's three functions, plain and on ranks, and its kernels against their reference."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import reference_ops as reference
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from random_graphs import random_graph
from torch import Tensor, nn
from torch.library import opcheck
from torch_geometric.nn import GCNConv

import pyg_dist
from pyg_dist.backend import ops
from pyg_dist.backend.comm.checks.calls import Calls
from pyg_dist.backend.dense.norm_relu_dropout import norm_relu_dropout_rows
from pyg_dist.backend.ops import NormReLUDropoutSpec as Spec
from pyg_dist.errors import DataError, OptionError
from pyg_dist.grid.sharding import Tile
from pyg_dist.nn import NormReLUDropout, norm_relu_dropout

NORMS: list[Any] = ["layer", "rms", None]
WIDTHS = [1, 3, 16, 47, 128, 257, 5000]
KEY = torch.tensor([5, 0, 2**40, 7, 17, 3, 2, 1, 9, 2**62, 11, 12, 13])


def reals(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_kernels_equal_the_reference(width: int, dtype: torch.dtype, norm: Any) -> None:
    """With and without ReLU, with and without weights: two of the four for each, all of them for any two options."""
    turn = (WIDTHS.index(width) + NORMS.index(norm)) % 2 == 0
    for relu in (True, False):
        check_kernels(width, dtype, norm, relu, affine=relu == turn)


def check_kernels(width: int, dtype: torch.dtype, norm: Any, relu: bool, affine: bool) -> None:
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    x = reals(KEY.numel(), width, dtype=dtype) * 3 + 1
    weight, bias = (reals(width, dtype=sums, seed=s) if affine else None for s in (1, 2))
    grad = reals(KEY.numel(), width, dtype=dtype, seed=4)
    for key in (KEY, None):
        options = (norm, 1e-3, relu, 0.3 if key is not None else 0.0, 123, 6)
        spec = Spec(*options)
        y, moments = ops.norm_relu_dropout(x, (weight, bias, key), spec)
        inputs = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
        expected = reference.norm_relu_dropout(*inputs, *(() if affine else (None, None)), key, *options)
        eps = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(y.double(), expected.detach(), rtol=eps, atol=eps)  # ReLU is continuous
        # Its gradient is not: which side of zero a value falls on is rounding's choice where it is that close.
        operands = (*inputs, *(() if affine else (None, None)))
        before_relu = reference.norm_relu_dropout(*operands, None, norm, 1e-3, relu=False, p=0.0, seed=0)
        sure = (before_relu.abs() > 1e-3).logical_or(torch.tensor(not relu))
        assert float(sure.double().mean()) > 0.98 or (norm == "layer" and width == 1)  # without a variance: all zero
        grad = torch.where(sure, grad, 0)
        by_kernel = ops.norm_relu_dropout_grad(grad, x, (weight, bias, key), spec, moments)
        by_autograd = torch.autograd.grad(expected, inputs, grad.double())
        for got, want in zip(by_kernel, by_autograd, strict=False):
            torch.testing.assert_close(got.double(), want, rtol=10 * eps, atol=10 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cut", [0, 1, 40, 57])
def test_two_passes_over_columns_equal_one(cut: int, norm: Any, dtype: torch.dtype) -> None:
    """Columns in two pieces: moments of each, put together, give each piece of y; the same backward."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    x, grad = reals(13, 57, dtype=dtype) * 3 + 1, reals(13, 57, dtype=dtype, seed=4)
    weight, bias = (reals(57, dtype=sums, seed=s) for s in (1, 2))
    spec = Spec(norm, 1e-3, True, 0.3, 123, 6)
    y, of_rows = ops.norm_relu_dropout(x, (weight, bias, KEY), spec)
    whole = ops.norm_relu_dropout_grad(grad, x, (weight, bias, KEY), spec, of_rows)
    pieces = [slice(0, cut), slice(cut, 57)]
    share = torch.tensor([cut, 57 - cut], dtype=sums).view(2, 1) / 57
    moments = [ops.row_moments(x[:, piece], norm) for piece in pieces]
    for got, want in zip(moments[1], reference.row_moments(x[:, pieces[1]], norm), strict=True):
        torch.testing.assert_close(got, want if cut < 57 else torch.zeros_like(want))
    means, squares = (torch.stack(m) for m in zip(*moments, strict=True))
    square = (squares * share).sum(0)
    if norm == "layer":
        square += ((means - (means * share).sum(0)).square() * share).sum(0)
    eps = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(torch.rsqrt(square + 1e-3), of_rows[1], rtol=min(eps, 1e-5), atol=0)
    of_piece = [(x[:, p], (weight[p], bias[p], KEY), replace(spec, first_column=6 + p.start), of_rows) for p in pieces]
    for piece, given in zip(pieces, of_piece, strict=True):
        torch.testing.assert_close(ops.norm_relu_dropout(*given)[0], y[:, piece], rtol=eps, atol=eps)
    parts = [ops.norm_relu_dropout_grad(grad[:, p], *given, True) for p, given in zip(pieces, of_piece, strict=True)]
    by_row = (parts[0][3] + parts[1][3]) / 57
    for piece, (by_n, by_weight, by_bias, _) in zip(pieces, parts, strict=True):
        ops.row_norm_grad_(by_n, x[:, piece], of_rows, by_row, norm)
        for got, want in zip(
            (by_n, by_weight, by_bias), (whole[0][:, piece], *(w[piece] for w in whole[1:3])), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=10 * eps, atol=10 * eps)


@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(norm: Any) -> None:
    x, weight, bias = (reals(*s, seed=k).requires_grad_() for k, s in enumerate([(13, 6), (6,), (6,)]))
    call = lambda x, w, b: norm_relu_dropout_rows(x, w, b, KEY, Spec(norm, 1e-5, True, 0.4, 3))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, b: call(x, None, b), (x, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_norm_the_output_tells_the_gradient(dtype: torch.dtype) -> None:
    x, bias = (reals(*shape, dtype=dtype).requires_grad_() for shape in ((13, 47), (47,)))
    x.data[3, 5:7] = torch.tensor([float("nan"), float("inf")])
    y = norm_relu_dropout_rows(x, None, bias, KEY, Spec(None, 1e-5, True, 0.4, 3))
    grad = reals(13, 47, dtype=dtype, seed=4)
    by_x, by_bias = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    kept = ~(y <= 0)
    expected = torch.where(kept, grad.float() / 0.6, 0)
    torch.testing.assert_close(by_x, expected.to(dtype))
    torch.testing.assert_close(by_bias, expected.sum(0).to(dtype))
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("norm", NORMS)
def test_equals_torch_without_dropout(norm: Any) -> None:
    x = reals(50, 33).requires_grad_()
    weight, bias = (reals(33, seed=s).requires_grad_() for s in (1, 2))
    stock = {
        "layer": lambda: F.layer_norm(x, (33,), weight, bias),
        "rms": lambda: F.rms_norm(x, (33,), weight, 1e-5) + bias,
        None: lambda: x * weight + bias,
    }[norm]().relu()
    ours = norm_relu_dropout(x, weight, bias, norm=norm, training=False)
    torch.testing.assert_close(ours, stock)
    grad = reals(50, 33, seed=5)
    for got, want in zip(*(torch.autograd.grad(y, (x, weight, bias), grad) for y in (ours, stock)), strict=True):
        torch.testing.assert_close(got, want)


def test_sums_do_not_depend_on_threads() -> None:
    x, weight, key = reals(3000, 64, dtype=torch.float32), reals(64, dtype=torch.float32), torch.arange(3000)
    factors, spec = (weight, None, key), Spec("layer", 1e-5, True, 0.5, 1)
    y, moments = ops.norm_relu_dropout(x, factors, spec)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(ops.norm_relu_dropout_grad(y, x, factors, spec, moments)[:3])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, a, b in zip(("x", "weight", "bias"), results[0], other, strict=True):
            assert_same_bits(a, b, name)


def test_opcheck_and_zero_sizes() -> None:
    native, x = torch.ops.pyg_dist, reals(13, 6, dtype=torch.float32)
    forward = (x, None, None, KEY, 1, 1e-5, True, 0.5, 1, 0)
    opcheck(native.norm_relu_dropout.default, forward)
    y, mean, rstd = native.norm_relu_dropout(*forward)
    for is_part in (False, True):
        opcheck(native.norm_relu_dropout_grad.default, (y, x, mean, rstd, None, None, KEY, 1, True, 0.5, 1, 0, is_part))
    opcheck(native.row_moments.default, (x, 1))
    opcheck(native.norm_relu_dropout_of.default, (x, mean, rstd, None, None, KEY, 1, True, 0.5, 1, 0))
    opcheck(native.row_norm_grad_.default, (y.clone(), x, mean, rstd, torch.zeros(13, 2), 1))
    _, statistics = ops.norm_relu_dropout(x[:, :0], (None,) * 3, Spec("layer", 1e-5, True, 0.0, 0))
    assert all(torch.equal(found, torch.zeros(13)) for found in statistics)
    for shape in [(0, 4), (4, 0)]:
        x = torch.ones(shape, requires_grad=True)
        norm_relu_dropout(x).sum().backward()
        assert x.grad is not None


def test_without_a_key_only_the_factor_of_dropout_is_left() -> None:
    x = reals(13, 6)
    for norm in NORMS:
        y, _ = ops.norm_relu_dropout(x, (None,) * 3, Spec(norm, 1e-5, True, 0.2, 1))
        torch.testing.assert_close(y, reference.norm_relu_dropout(x, None, None, None, norm, 1e-5, True, 0.2, 1))
    torch.testing.assert_close(y, 1.25 * x.relu())


def test_factors_may_be_slices() -> None:
    x, factors = reals(13, 6, dtype=torch.float32), reals(6, 2, dtype=torch.float32)
    expected = F.layer_norm(x, (6,), factors[:, 0], factors[:, 1]).relu()
    torch.testing.assert_close(norm_relu_dropout(x, factors[:, 0], factors[:, 1], p=0.0), expected)


def test_state_dicts_are_those_of_torch() -> None:
    assert NormReLUDropout(8).state_dict().keys() == torch.nn.LayerNorm(8).state_dict().keys()
    assert NormReLUDropout(8, "rms").state_dict().keys() == torch.nn.RMSNorm(8).state_dict().keys()
    x, rms = reals(9, 8, dtype=torch.float32), torch.nn.RMSNorm(8)
    torch.testing.assert_close(NormReLUDropout(8, "rms", p=0)(x), rms(x).relu())
    assert not NormReLUDropout(8, p=1.0)(x).any()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="'norm'"):
        NormReLUDropout(8, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'p'"):
        norm_relu_dropout(torch.ones(2, 2), p=1.5)
    with pytest.raises(DataError, match=r"Expected x \[N, F\]"):
        norm_relu_dropout(torch.ones(2, 2, 2))
    with pytest.raises(DataError, match="norm_relu_dropout: expected 'weight' to have 2 entries"):
        norm_relu_dropout(torch.ones(2, 2), torch.ones(3))


def compare_with_three_functions(rows_of: str = "node", norm: Any = "layer", **layout: Any) -> float:
    """On every rank: the same draw gives the same mask, so the fused pass equals the three functions."""
    data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), **(layout or {"partition": "random"}))
    results = []
    for fused in (True, False):
        torch.manual_seed(4)
        layer = torch.nn.Linear(data.num_features, 24, dtype=data.x.dtype)
        module = NormReLUDropout(24, norm, eps=1e-5).to(data.x.dtype)
        h = layer(data.x if rows_of == "node" else data.x[data.edge_index[0]])
        n = F.layer_norm(h, (24,)) if norm == "layer" else F.rms_norm(h, (24,), eps=1e-5)
        n = n * module.weight if module.bias is None else n * module.weight + module.bias
        y = module(h) if fused else F.dropout(n.relu(), 0.5)
        (y * (1 + h.detach())).sum().backward()
        parameters = (*layer.parameters(), *module.parameters())
        results.append([y.full_tensor().detach(), *(p.grad for p in parameters)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree_with_torch(workers: Any, world_size: int) -> None:
    for rows_of in ("node", "edge"):
        for error in workers(world_size).run(compare_with_three_functions, rows_of):
            assert error < 1e-10


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("mesh", [{"y": 2}, {"x": 2}, {"y": 4}, {"x": 2, "y": 2}], ids=str)
def test_tiles_agree_with_torch(workers: Any, mesh: dict[str, int], norm: Any) -> None:
    for error in workers(math.prod(mesh.values())).run(
        compare_with_three_functions, norm=norm, layout="grid", mesh=mesh
    ):
        assert error < 1e-10


def residual_steps(mesh: dict[str, int], fused: bool, **switches: str) -> tuple[list[Tensor], Counter[str]]:
    """Three steps of layers with residuals: parameters and gradients; the calls of the last one by kind."""
    with mock.patch.dict(os.environ, switches):
        data = pyg_dist.DistributedData(random_graph(47, 310, num_features=24, seed=1), layout="grid", mesh=mesh)
        torch.manual_seed(2)
        convs = nn.ModuleList([GCNConv(24, 24) for _ in range(3)]).double()
        norms = nn.ModuleList([NormReLUDropout(24, "rms") for _ in range(3)]).double()
        pyg_dist.distribute(convs)
        parameters = [*convs.parameters(), *norms.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            with mock.patch.object(Calls, "next", autospec=True, side_effect=Calls.next) as called:
                h = data.x
                for conv, norm in zip(convs, norms, strict=True):
                    out = conv(h, data.edge_index)
                    h = norm(out, h) if fused else norm(out) + h
                optimizer.zero_grad()
                h.square().mean().backward()
            optimizer.step()
    tensors = [t.detach().clone() for p in parameters for t in (p, p.grad)]
    return tensors, Counter(call.args[1] for call in called.call_args_list)


@pytest.mark.parametrize("sums", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("mesh", [{"y": 2}, pytest.param({"x": 2, "z": 2}, marks=pytest.mark.slow)], ids=str)
def test_early_residuals_change_no_number(workers: Any, mesh: dict[str, int], sums: str) -> None:
    """A residual that goes early, norms of split columns, early sums of gradients: as on one rank."""
    (expected, _), size = workers(1).run(residual_steps, dict.fromkeys(mesh, 1), False)[0], math.prod(mesh.values())
    costs = []
    for fused in (False, True):
        for found, calls in workers(size).run(residual_steps, mesh, fused, PYG_DIST_GRID_SUMS=sums):
            for got, want in zip(found, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            costs.append(calls)
    assert all(calls == costs[0] for calls in costs)  # earlier, not more


def unasked_residuals() -> list[int]:
    """Redistributions of each step, in which the residual is added twice, then never, then twice."""
    data = pyg_dist.DistributedData(random_graph(47, 310, num_features=24, seed=1), layout="grid", mesh={"x": 2})
    conv, norm = pyg_dist.distribute(GCNConv(24, 24).double()), NormReLUDropout(24, p=0.0).double()
    counts = []
    for adds in (True, True, False, False, True, True):
        h = norm(data.x)
        with mock.patch.object(Tile, "start_to", autospec=True, side_effect=Tile.start_to) as started:
            out = norm(conv(h, data.edge_index), h if adds else None)
        counts.append(started.call_count)
        expected = norm(conv(h, data.edge_index)) + (h if adds else 0)
        torch.testing.assert_close(out.full_tensor(), expected.full_tensor())
    return counts


def test_residuals_that_nobody_asks_for(workers: Any) -> None:
    first, second = workers(2).run(unasked_residuals)
    assert first == second
    assert max(first) == 1


def masks(**layout: Any) -> list[Tensor]:
    """Results do not depend on the layout, whichever the norm."""
    data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), **layout)
    results = []
    for norm in NORMS:
        torch.manual_seed(4)
        results.append(norm_relu_dropout(data.x, norm=norm, p=0.5).full_tensor())
    return results


def test_tiles_have_the_masks_of_rows(workers: Any) -> None:
    of_rows, of_tiles = (workers(2).run(masks, **layout)[0] for layout in ({}, {"layout": "grid", "mesh": {"y": 2}}))
    for ours, other in zip(of_rows, of_tiles, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-10)
