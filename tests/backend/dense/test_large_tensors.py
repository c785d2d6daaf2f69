"""Functions of large tensors against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits, results
from op_inputs import DTYPES
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.dense import indexed_rows, large_tensors

Both = tuple[Callable[..., Tensor], Callable[..., Tensor]]


@pytest.fixture
def num_rows() -> int:
    """Enough for outputs of 37 columns to be large, in the narrowest dtype."""
    return large_tensors.LARGE // 2 // 37 + 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_has_the_bits_of_torch(num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = torch.randn(num_rows, 19).to(dtype), torch.randn(37, 19).to(dtype)
    operands = (x, weight, torch.randn(37).to(dtype)) if has_bias else (x, weight)
    got = results(large_tensors.linear, *operands)
    assert "_Linear" in large_tensors.linear(x, weight.requires_grad_()).grad_fn.name()  # type: ignore[union-attr]
    for mine, expected in zip(got, results(F.linear, *operands), strict=True):
        assert_same_bits(mine, expected)


def test_two_maps_of_the_same_rows(num_rows: int) -> None:
    """Values, gradients, and gradients of these."""
    x, weight, narrow = (torch.randn(*shape, dtype=torch.float64) for shape in ((num_rows, 19), (37, 19), (3, 19)))

    def both(x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
        return torch.cat(large_tensors.linear_pair(x, weight, narrow), 1)

    def penalised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def penalty(*operands: Tensor) -> Tensor:
            return torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(function(*operands).square().mean(), operands, create_graph=True)
                ]
            )

        return penalty

    def stock(x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
        return torch.cat([F.linear(x, weight), F.linear(x, narrow)], 1)

    assert "_LinearPair" in large_tensors.linear_pair(x, weight.requires_grad_(), narrow)[1].grad_fn.name()  # type: ignore[union-attr]
    for mine, torchs in ((both, stock), (penalised(both), penalised(stock))):
        for got, expected in zip(results(mine, x, weight, narrow), results(torchs, x, weight, narrow), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_row_is_added_to_all(num_rows: int) -> None:
    rows, bias = torch.randn(num_rows, 37), torch.randn(37)
    assert "_Sum" in large_tensors.add(rows, bias.requires_grad_()).grad_fn.name()  # type: ignore[union-attr]
    for got, expected in zip(
        results(lambda a, b: large_tensors.add(a, b, alpha=2), rows, bias),
        results(lambda a, b: torch.add(a, b, alpha=2), rows, bias),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_follows_torch_s_precision(matmul_precision: Callable[[str], None], has_bias: bool) -> None:
    """In bf16 matrix units where there are some; elsewhere oneDNN's float32 products stand in for MKL's."""
    x, weight = torch.randn(large_tensors.LARGE // 4 // 256 + 5, 256), torch.randn(256, 256)
    operands = (x, weight, torch.randn(256)) if has_bias else (x, weight)
    whole = results(F.linear, *operands)
    matmul_precision("bf16")
    products = range(3)  # the output, and the gradients by x and by the weight
    expected = results(F.linear, *operands)
    if any(torch.equal(expected[i], whole[i]) for i in products):
        pytest.skip("torch multiplies in one way only on this processor")
    got = results(large_tensors.linear, *operands)
    for i in products:
        assert_same_bits(got[i], expected[i])
    if torch.cpu._is_amx_tile_supported():
        assert (got[0] - whole[0]).abs().max() > 1e-4 * whole[0].abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_softmax_and_select_have_the_bits_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, 37).to(dtype)
    index = torch.randint(num_rows, (num_rows,))
    assert "_LogSoftmax" in large_tensors.log_softmax(x.clone().requires_grad_()).grad_fn.name()  # type: ignore[union-attr]
    for mine, stock in (
        (large_tensors.log_softmax, lambda x: F.log_softmax(x, 1)),
        (lambda x: indexed_rows.select(x, index), lambda x: x.index_select(0, index)),
    ):
        for got, expected in zip(results(mine, x), results(stock, x), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_affine", [True, False])
def test_layer_norm_has_the_bits_of_torch(num_rows: int, dtype: torch.dtype, is_affine: bool) -> None:
    x = torch.randn(num_rows, 37).to(dtype)
    operands = (x, torch.randn(37).to(dtype), torch.randn(37).to(dtype)) if is_affine else (x,)
    got = results(lambda x, *affine: large_tensors.layer_norm(x, [37], *affine), *operands)
    assert "_LayerNorm" in large_tensors.layer_norm(x.requires_grad_(), (37,)).grad_fn.name()  # type: ignore[union-attr]
    for mine, expected in zip(got, results(lambda x, *affine: F.layer_norm(x, [37], *affine), *operands), strict=True):
        assert_same_bits(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_has_the_bits_of_torch_and_keeps_a_bit_each(num_rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, 37).to(dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf")]).to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        got = results(large_tensors.relu, x)
    assert [t.numel() for t in kept if t.dtype == torch.uint8] == [-(-x.numel() // 8)]
    assert len(kept) == 2, "that, and the weights of the sum"
    for mine, expected in zip(got, results(F.relu, x), strict=True):
        assert_same_bits(mine, expected)
    y, passed = ops.relu(x, False)
    assert passed.numel() == 0
    assert_same_bits(y, x.relu())


ELEMENTWISE: dict[str, Both] = {
    "a + b": (large_tensors.add, torch.add),
    "a + 0.3 b": (lambda a, b: large_tensors.add(a, b, alpha=0.3), lambda a, b: torch.add(a, b, alpha=0.3)),
    "a - b": (large_tensors.subtract, torch.sub),
    "a - 3 b": (lambda a, b: large_tensors.subtract(a, b, alpha=3), lambda a, b: torch.sub(a, b, alpha=3)),
    "a b": (large_tensors.multiply, torch.mul),
    "a a": (lambda a, b: large_tensors.multiply(a, a), lambda a, b: a * a),
    "a + 2": (lambda a, b: large_tensors.add(a, 2), lambda a, b: a + 2),
    "0.1 a": (lambda a, b: large_tensors.multiply(a, 0.1), lambda a, b: 0.1 * a),
    "a / 0.3": (lambda a, b: large_tensors.divide(a, 0.3), lambda a, b: a / 0.3),
    "a / b": (large_tensors.divide, torch.div),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ELEMENTWISE)
def test_elementwise_functions_have_the_bits_of_torch(num_rows: int, dtype: torch.dtype, form: str) -> None:
    a, b = torch.randn(num_rows, 37).to(dtype), torch.randn(num_rows, 37).to(dtype)
    a[0, :5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf")]).to(dtype)
    mine, expected = ELEMENTWISE[form]
    assert ("torch.autograd" in str(type(mine(a.clone().requires_grad_(), b).grad_fn))) or form == "a / b"
    for got, right in zip(results(mine, a, b), results(expected, a, b), strict=True):
        assert_same_bits(got, right)


def test_elementwise_functions_keep_what_torch_keeps(num_rows: int) -> None:
    a, b = torch.randn(num_rows, 37, requires_grad=True), torch.randn(num_rows, 37)
    for form, (mine, expected) in ELEMENTWISE.items():
        kept: list[list[int]] = [[], []]
        for function, numels in zip((mine, expected), kept, strict=True):
            with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numels: n.append(t.numel()) or t, lambda t: t):
                function(a, b)
        assert sum(kept[0]) <= sum(kept[1]), form


def test_derivatives_of_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "LARGE", 0)
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3), (4,)))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(large_tensors.linear, (x, weight, bias))
        addend = (x @ weight.t()).detach().sin().requires_grad_()
        assert check(lambda a, *factors: large_tensors.add_product_(a * 1, *factors) ** 2, (addend, x, weight))
        assert check(large_tensors.log_softmax, (x,))
        assert check(lambda x: indexed_rows.select(x, torch.tensor([2, 0, 2])) ** 2, (x,))
        assert check(lambda x: indexed_rows.sum_rows(x, torch.tensor([2, 0, 2, 1, 2]), 4) ** 2, (x,))
        assert check(lambda x: indexed_rows.sum_rows(x, torch.tensor([2, 0, 2, 1, 2]), 4, True) ** 2, (x,))
        assert check(lambda x: large_tensors.relu(x) ** 2, (x,))
        for mine, _ in ELEMENTWISE.values():
            assert check(lambda a, b, mine=mine: mine(a, b) ** 2, (x, x.detach().sin().requires_grad_()))
        assert check(lambda *operands: large_tensors.layer_norm(operands[0], (3,), *operands[1:]), (x, *weight[:2]))


def test_other_forms_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "LARGE", 0)
    x, weight = torch.randn(5, 4, 3), torch.randn(2, 3)
    assert_same_bits(large_tensors.layer_norm(x, (4, 3)), F.layer_norm(x, (4, 3)))
    assert_same_bits(large_tensors.layer_norm(x[0].t(), (4,)), F.layer_norm(x[0].t(), (4,)))
    assert_same_bits(large_tensors.linear(x, weight), F.linear(x, weight))
    assert_same_bits(large_tensors.linear(x[0, 0], weight), F.linear(x[0, 0], weight))
    assert_same_bits(large_tensors.relu(x.transpose(0, 2)), x.transpose(0, 2).relu())
    written = x.clone()
    assert large_tensors.relu(written, inplace=True) is written
    with pytest.raises(RuntimeError, match="dtype"):
        large_tensors.linear(x[0], weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert large_tensors.linear(x[0], weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "function",
    [
        lambda x: large_tensors.linear(x, torch.ones(2, 3)),
        lambda x: large_tensors.relu(x),
        lambda x: large_tensors.layer_norm(x, (3,)),
        lambda x: large_tensors.log_softmax(x),
        lambda x: indexed_rows.select(x, torch.tensor([2, 0, 2])),
        lambda x: indexed_rows.sum_rows(x, torch.tensor([2, 0, 2, 1, 2]), 4),
        lambda x: large_tensors.add(x, large_tensors.multiply(x, x)),
    ],
    ids=["linear", "relu", "layer_norm", "log_softmax", "select", "sum_rows", "elementwise"],
)
def test_transforms_and_forward_mode(monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor]) -> None:
    """Of a large tensor as of a small one."""
    x, tangent = torch.randn(5, 3), torch.randn(5, 3)

    def everything() -> list[Tensor]:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            forward = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
        return [
            forward,
            torch.func.jvp(function, (x,), (tangent,))[1],
            torch.func.grad(lambda x: function(x).square().sum())(x),
            torch.func.vmap(function)(x[None])[0],
        ]

    small = everything()
    monkeypatch.setattr(large_tensors, "LARGE", 0)
    for got, expected in zip(everything(), small, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_columns_have_the_gradients_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    """Columns behind those that are asked for have zeros, also where memory has been used before."""
    x = torch.randn(num_rows, 37).to(dtype)
    factors = [torch.randn(num_rows, 12).to(dtype) for _ in range(3)]

    def mine(x: Tensor) -> Tensor:
        return sum(f * piece for f, piece in zip(factors, large_tensors.split_columns(x, [12] * 3), strict=True))  # type: ignore[return-value]

    def stock(x: Tensor) -> Tensor:
        return sum(f * piece for f, piece in zip(factors, x.split([12] * 3 + [1], 1)[:3], strict=True))  # type: ignore[return-value]

    assert "_SplitColumns" in large_tensors.split_columns(x.clone().requires_grad_(), [12])[0].grad_fn.name()  # type: ignore[union-attr]
    expected = results(stock, x)
    ops.empty_rows(x, num_rows, 37).fill_(torch.nan)
    for got, want in zip(results(mine, x), expected, strict=True):
        assert_same_bits(got, want)


def test_split_columns_are_differentiated_again(num_rows: int) -> None:
    x = torch.randn(num_rows, 37, requires_grad=True)

    def second(split: Callable[[Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(split(x).pow(3).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        return again

    got = second(lambda x: large_tensors.split_columns(x, [12, 12])[1])
    assert_same_bits(got, second(lambda x: x[:, 12:24]))
