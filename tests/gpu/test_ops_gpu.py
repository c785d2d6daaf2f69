"""The native ops on a GPU: float64 references, the CPU's bits where bits are promised, captured steps, late errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec, library
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import DataError

pytestmark = pytest.mark.gpu

Op = Callable[..., Any]
NARROW = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WIDTHS = [1, 16, 47, 100, 602]


class Graph:
    """Rows of some edges, empty ones, and a hub of ``size``, on the CPU and on a device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.num_rows = self.num_sources = size // 10
        generator = torch.Generator().manual_seed(0)
        degree = torch.randint(0, 9, (self.num_rows,), generator=generator)
        degree[self.num_rows // 2], degree[:3] = size, 0
        row = torch.repeat_interleave(torch.arange(self.num_rows), degree)
        col = torch.randint(0, self.num_sources, (row.numel(),), generator=generator)
        self.csr = CSR.from_edges(row, col, torch.arange(row.numel()), self.num_rows, self.num_sources)
        self.there = self.csr.to(device)


@pytest.fixture(scope="module")
def graph(size: int, device: torch.device) -> Graph:
    return Graph(size, device)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def moved(values: Any, device: torch.device) -> list[Any]:
    return [v.to(device) if isinstance(v, Tensor) else v for v in values]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """As near as sums in the dtype's own sum type come, beside the largest."""
    error = (got.double().cpu() - expected.double()).abs().max()
    assert float(error) <= TOLERANCE[dtype] * (1 + float(expected.abs().max()))


def assert_captured(run: Op, device: torch.device) -> None:
    """Replays of a CUDA graph have the bits of the call; where nothing can be captured, a second call has them."""
    expected = run()
    # Without torch's cache each tensor is allocated by the driver, which a capture forbids. Its presence counts.
    if device.type != "cuda" or "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        for a, b in zip(tensors(run()), tensors(expected), strict=True):
            assert_same_bits(a.cpu(), b.cpu())
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # what the first call allocates
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        got = run()
    for _ in range(2):
        captured.replay()
        for a, b in zip(tensors(got), tensors(expected), strict=True):
            assert_same_bits(a.cpu(), b.cpu())


def test_nothing_is_captured_without_torchs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is under compute-sanitizer."""

    def refused(*args: object) -> None:
        raise AssertionError("an allocation of the driver's would break the capture")

    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    monkeypatch.setattr(torch.cuda, "Stream", refused)
    monkeypatch.setattr(torch.cuda, "graph", refused)
    assert_captured(lambda: torch.ones(2), torch.device("cuda"))


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products(graph: Graph, device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, g = drawn(graph.num_sources, width, dtype=dtype), drawn(graph.num_rows, width, seed=1, dtype=dtype)
    weight, scale = drawn(graph.csr.num_entries, seed=2).float(), drawn(graph.num_rows, seed=3).float()
    scales = (weight.double(), scale.double()) if dtype == torch.float64 else (weight, scale)
    here, there = graph.csr, graph.there
    x_there, weight_there, scale_there = moved((x, *scales), device)

    def run() -> Tensor:
        return there.multiply(x_there, weight_there, row_scale=scale_there)

    exact = here.multiply(x.double(), weight.double(), row_scale=scale.double())
    assert_near(run(), exact, dtype)
    assert_captured(run, device)
    g_there, old = g.to(device), drawn(graph.num_rows, width, seed=4, dtype=dtype)
    old_there = old.to(device)

    def run_others() -> list[Tensor]:
        added = there.multiply(x_there, weight_there, row_scale=scale_there, out=old_there.clone())
        written = there.multiply(x_there, weight_there, row_scale=scale_there, out=old_there.clone(), accumulate=False)
        return [added, written, ops.sddmm_csr(there.rowptr, there.col, g_there, x_there)]

    added, written, dots = run_others()
    assert_near(added, exact + old.double(), dtype)
    assert_near(written, exact, dtype)
    assert_near(dots, ops.sddmm_csr(here.rowptr, here.col, g.double(), x.double()), dtype)
    assert_captured(run_others, device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extremes(graph: Graph, device: torch.device, dtype: torch.dtype) -> None:
    """No sum in the forward: equal bits. Ties are counted in both gradients."""
    x = torch.randint(-50, 50, (graph.num_sources, 33), generator=torch.Generator().manual_seed(1)).to(dtype)
    grad = drawn(graph.num_rows, 33, dtype=dtype)
    here, there, turned = graph.csr, graph.there, graph.there.transposed
    y = ops.extreme_csr(here.rowptr, here.col, x, "max")
    shares = ops.extreme_csr_shares(here.rowptr, here.col, x, y, grad)
    by_x = ops.extreme_csr_grad(here.transposed.rowptr, here.transposed.col, x, y, shares)
    x_there, y_there, grad_there = moved((x, y, grad), device)

    def run() -> list[Tensor]:
        found = ops.extreme_csr(there.rowptr, there.col, x_there, "max")
        parts = ops.extreme_csr_shares(there.rowptr, there.col, x_there, y_there, grad_there)
        return [found, parts, ops.extreme_csr_grad(turned.rowptr, turned.col, x_there, y_there, parts)]

    found, parts, by_there = run()
    assert_same_bits(found.cpu(), y)
    assert_near(parts, shares, dtype)
    assert_near(by_there, by_x, dtype)
    assert_captured(run, device)


def test_random_numbers_are_the_cpus(size: int, device: torch.device) -> None:
    key = torch.randint(-(2**62), 2**62, (size // 100,), generator=torch.Generator().manual_seed(3))
    key_there = key.to(device)
    for width, offset in ((1, 0), (47, 3), (128, 0)):
        x = drawn(key.numel(), width, dtype=torch.float32)
        got = ops.keyed_dropout(x.to(device), key_there, 0.3, 11, offset)
        assert_same_bits(got.cpu(), ops.keyed_dropout(x, key, 0.3, 11, offset))
        for dtype in TOLERANCE:
            got = ops.keyed_uniform(key_there, width, 5, offset, dtype)
            assert_same_bits(got.cpu(), ops.keyed_uniform(key, width, 5, offset, dtype))
            normal = ops.keyed_normal(key_there, width, 5, offset, dtype)
            assert_near(normal, ops.keyed_normal(key, width, 5, offset, dtype).double(), dtype)
    place = torch.arange(size // 100)
    permuted = ops.keyed_permutation(place.to(device), size // 100, 9)
    assert_same_bits(permuted.cpu(), ops.keyed_permutation(place, size // 100, 9))
    x_there, place_there = x.to(device), place.to(device)

    def run() -> list[Tensor]:
        dropped = ops.keyed_dropout(x_there, key_there, 0.3, 11, 0)
        numbers = [draw(key_there, 47, 5, 3, torch.float32) for draw in (ops.keyed_uniform, ops.keyed_normal)]
        return [dropped, *numbers, ops.keyed_permutation(place_there, size // 100, 9)]

    assert_captured(run, device)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_packed_rows_are_the_cpus(graph: Graph, device: torch.device, bits: int) -> None:
    """Of rows as they are, bit for bit; of sums where sums are exact."""
    here, there, width = graph.csr, graph.there, 100
    key = torch.arange(graph.num_rows) * 7 + 2**40
    own = CSR.identity(graph.num_rows, torch.device("cpu"))
    for pattern, x in (
        (own, drawn(graph.num_sources, width, dtype=torch.float32)),
        (here, torch.randint(-8, 9, (graph.num_sources, width), generator=torch.Generator().manual_seed(2)).float()),
    ):
        packed = ops.quantize_csr(pattern.rowptr, pattern.col, x, bits, key=key, seed=3)
        one = own.to(device)
        place = there if pattern is here else one
        x_there, key_there = moved((x, key), device)

        def run(place: CSR = place, one: CSR = one, x: Tensor = x_there, key: Tensor = key_there) -> list[Tensor]:
            packed = ops.quantize_csr(place.rowptr, place.col, x, bits, key=key, seed=3)
            out = torch.zeros(graph.num_rows, width, device=device)
            return [packed, ops.dequantize_csr_add(out, one.rowptr, one.col, packed, bits)]

        got, unpacked = run()
        assert_same_bits(got.cpu(), packed)
        out = torch.zeros(graph.num_rows, width, dtype=torch.float64)
        assert_near(unpacked, ops.dequantize_csr_add(out, own.rowptr, own.col, packed, bits), torch.float32)
        assert_captured(run, device)


def test_rows(size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(0, size // 100, (size // 10,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.randint(-9, 9, (size // 100, 47), generator=generator).to(dtype)
        got = ops.gather_rows(*moved((x, index), device))
        assert_same_bits(got.cpu(), x[index])
    rows, out = drawn(index.numel(), 47, dtype=torch.float32), torch.zeros(size // 100, 47)
    index_there, rows_there = moved((index, rows), device)

    def run() -> list[Tensor]:
        added = ops.scatter_add_rows(torch.zeros_like(out, device=device), index_there, rows_there)
        into = torch.empty_like(rows, device=device)
        return [added, ops.gather_rows(added, index_there), ops.gather_rows(added, index_there, out=into)]

    added, gathered, into = run()
    assert_near(added, out.double().index_add(0, index, rows.double()), torch.float32)
    assert_same_bits(gathered.cpu(), added.cpu()[index])
    assert_same_bits(into.cpu(), added.cpu()[index])
    assert_captured(run, device)


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm_relu_dropout(size: int, device: torch.device, dtype: torch.dtype, norm: Any) -> None:
    for width in (130, 64, 128, 256, 512):  # the first one's rows are no whole vectors
        check_norm_relu_dropout(width, size // 100, device, dtype, norm)


def check_norm_relu_dropout(width: int, num_rows: int, device: torch.device, dtype: torch.dtype, norm: Any) -> None:
    x, grad = drawn(num_rows, width, dtype=dtype), drawn(num_rows, width, seed=1, dtype=dtype)
    weight, bias, key = drawn(width, seed=2), drawn(width, seed=3), torch.arange(num_rows)
    if dtype != torch.float64:
        weight, bias = weight.float(), bias.float()
    spec = ops.NormReLUDropoutSpec(norm, 1e-5, True, 0.3, 7)
    wide, factors = x.double(), (weight.double(), bias.double(), key)
    y, moments = ops.norm_relu_dropout(wide, factors, spec)
    x_there, weight_there, bias_there, key_there, grad_there = moved((x, weight, bias, key, grad), device)
    factors_there = (weight_there, bias_there, key_there)

    def run() -> list[Tensor]:
        made, moments = ops.norm_relu_dropout(x_there, factors_there, spec)
        return [made, *ops.norm_relu_dropout_grad(grad_there, x_there, factors_there, spec, moments)[:3]]

    by_x, by_weight, by_bias, _ = ops.norm_relu_dropout_grad(grad.double(), wide, factors, spec, moments)
    found = run()
    assert_near(found[0], y, dtype)
    if dtype not in NARROW:  # there a value that rounding takes over the ReLU's kink moves a gradient by itself
        for got, expected in zip(found[1:], (by_x, by_weight, by_bias), strict=True):
            assert_near(got, expected, dtype)
    assert_captured(run, device)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norm_relu_dropout_of_some_columns(size: int, device: torch.device, norm: Any) -> None:
    """Moments first, which ranks would sum, then the rows; both ways. Of all columns: the whole op's numbers."""
    num_rows = size // 100
    x, grad = drawn(num_rows, 130), drawn(num_rows, 130, seed=1)
    weight, bias, key = drawn(130, seed=2), drawn(130, seed=3), torch.arange(num_rows)
    factors, spec = (weight, bias, key), ops.NormReLUDropoutSpec(norm, 1e-5, True, 0.3, 7)
    y, moments = ops.norm_relu_dropout(x, factors, spec)
    by_x, by_weight, by_bias, _ = ops.norm_relu_dropout_grad(grad, x, factors, spec, moments)
    x_there, weight_there, bias_there, key_there, grad_there = moved((x, weight, bias, key, grad), device)
    factors_there = (weight_there, bias_there, key_there)

    def run() -> list[Tensor]:
        mean, square = ops.row_moments(x_there, norm)
        moments = mean, (square + 1e-5).rsqrt()
        made, _ = ops.norm_relu_dropout(x_there, factors_there, spec, moments)
        by_n, *rest, by_row = ops.norm_relu_dropout_grad(grad_there, x_there, factors_there, spec, moments, True)
        return [made, ops.row_norm_grad_(by_n, x_there, moments, by_row / 130, norm), *rest]

    for got, expected in zip(run(), (y, by_x, by_weight, by_bias), strict=True):
        assert_near(got, expected, torch.float64)
    assert_captured(run, device)


@pytest.mark.parametrize("form", ["additive", "dynamic", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention(graph: Graph, device: torch.device, dtype: torch.dtype, form: Any) -> None:
    """Forward and both gradients with edge features and dropout, against the CPU's in float64."""
    heads, columns, edges = 4, 32, 3
    wide, logits = heads * columns, heads if form == "additive" else heads * columns
    weight = {"additive": (1, heads * edges), "dynamic": (edges, wide), "dot": (graph.num_rows, heads * edges)}[form]
    given = AttentionInputs(
        drawn(graph.num_sources, wide),
        None if form == "dynamic" else drawn(graph.num_sources, logits, seed=1),
        drawn(graph.num_rows, logits, seed=2),
        drawn(graph.csr.num_entries, edges, seed=3),
        drawn(*weight, seed=4),
        drawn(wide, seed=5) / columns if form == "dynamic" else None,
    )
    spec = AttentionSpec(form, heads, slope=0.2, scale=columns**-0.5 if form == "dot" else 1.0, p=0.3, seed=5)
    key = torch.arange(graph.csr.num_entries)

    def run(csr: CSR, inputs: AttentionInputs, keys: Tensor) -> list[Tensor]:
        y, z, lse = ops.attention_csr(csr.rowptr, csr.col, csr.edge.int(), inputs, keys, spec)
        grad, grad_z = y.cos(), z.cos() if z.numel() else None
        delta = (grad * y).view(-1, heads, columns).sum(2).to(lse.dtype)
        if grad_z is not None:
            delta = delta + (grad_z * z).view(-1, heads, edges).sum(2).to(lse.dtype)
        known, turned = (lse, delta, grad, grad_z), csr.transposed
        by_target = ops.attention_csr_by_target(
            csr.rowptr, csr.col, csr.edge.int(), inputs, keys, spec, *known, by_edge_attr=True
        )
        by_source = ops.attention_csr_by_source(
            turned.rowptr, turned.col, turned.edge.int(), inputs, keys, spec, *known
        )
        return [found for found in (y, z, lse, *by_target, *by_source) if found.numel()]

    expected = run(graph.csr, given, key)
    there, key_there = AttentionInputs(*(None if x is None else x.to(device, dtype) for x in given)), key.to(device)

    def run_there() -> list[Tensor]:
        return run(graph.there, there, key_there)

    got = run_there()
    for a, b, again in zip(got, expected, run_there(), strict=True):
        is_number = b.isfinite()
        assert torch.equal(a.cpu().isfinite(), is_number)
        assert_near(a.cpu()[is_number], b[is_number], dtype)
        assert_same_bits(again.cpu(), a.cpu())
    assert_captured(run_there, device)


def test_patterns(graph: Graph, device: torch.device) -> None:
    """All but ``restrict_csr`` can be captured: that one waits for a number, how many entries stay."""
    rowptr, col = graph.csr.rowptr, graph.csr.col
    row = torch.randperm(graph.num_rows, generator=torch.Generator().manual_seed(1))[: graph.num_rows // 2]
    column = torch.arange(0, graph.num_sources, 3)
    expected = ops.restrict_csr(rowptr, col, row, column, graph.num_sources)
    got = ops.restrict_csr(*moved((rowptr, col, row, column), device), graph.num_sources)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a.cpu(), b)
    rowptr_there, col_there, row_there, column_there = moved((rowptr, col, row, column), device)

    def run() -> list[Tensor]:
        turned = ops.transpose_csr(rowptr_there, col_there, graph.num_sources)
        return [*turned, ops.find_sorted(column_there, row_there)]

    turned = ops.transpose_csr(rowptr, col, graph.num_sources)
    for a, b in zip(run(), [*turned, ops.find_sorted(column, row)], strict=True):
        assert_same_bits(a.cpu(), b)
    assert_captured(run, device)


def test_an_index_out_of_range_is_found_late(device: torch.device) -> None:
    x, index = torch.ones(5, 3, device=device), torch.tensor([0, 7], device=device)

    def run() -> None:
        ops.gather_rows(x, index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ops.keyed_uniform(index, 3, seed=0)  # any op

    with pytest.raises(DataError, match=r"gather_rows: expected 'index' to lie in \[0, 5\), got 7 at position 1"):
        run()
    ops.gather_rows(x, index[:1])  # said once


def test_the_driver_says_its_version(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there is no driver")
    assert (library.driver_version() or 0) >= 12_000


def test_tensors_of_two_devices_are_refused(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there is one device")
    with pytest.raises(DataError, match="expected all tensors on one device, got them on cuda:0 and cpu"):
        ops.gather_rows(torch.ones(5, 3, device=device), torch.tensor([0]))
