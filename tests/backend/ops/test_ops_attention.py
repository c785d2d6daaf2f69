"""Attention: the kernels against their reference, gradients too, and the autograd function twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference_ops as reference
import torch
from bits import assert_all_same_bits
from op_inputs import DTYPES, IS_SIMT
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import _arguments
from pyg_dist.backend.sparse.attention import RankAttention, attend
from pyg_dist.backend.sparse.attention_by_edge import attention_by_edge
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import DataError

NUM_ROWS, NUM_SOURCES = 30, 25
FORMS: list[Any] = ["additive", "dynamic", "dot"]
# Heads, columns and columns of edge features (none).
WIDTHS = [(1, 1, 0), (2, 4, 3), (4, 32, 0), (3, 7, 1), (5, 17, 2), (8, 8, 0), (1, 100, 5)]
if IS_SIMT:  # vectors and single values, groups of 8 and of 32 lanes, heads side by side and in slices
    WIDTHS = [(4, 32, 0), (3, 7, 1), (1, 100, 5), (2, 129, 0)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def pattern(hub: int = 300) -> CSR:
    """Rows of 0 to 8 edges, repeated edges among them, empty ones at both ends, and two hubs."""
    rng = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 9, (NUM_ROWS,), generator=rng)
    degree[:2] = degree[-1] = 0
    degree[7], degree[8] = hub, hub // 8
    row = torch.repeat_interleave(torch.arange(NUM_ROWS), degree)
    col = torch.randint(0, NUM_SOURCES - 3, (row.numel(),), generator=rng)  # the last sources have no target
    return CSR.from_edges(row, col, torch.randperm(row.numel(), generator=rng), NUM_ROWS, NUM_SOURCES)


def inputs(csr: CSR, form: str, heads: int, columns: int, edges: int, dtype: torch.dtype) -> AttentionInputs:
    rng = torch.Generator().manual_seed(heads + columns)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()

    wide = heads * columns
    logits = heads if form == "additive" else wide
    weight = {"additive": (1, heads * edges), "dynamic": (edges, wide), "dot": (NUM_ROWS, heads * edges)}[form]
    return AttentionInputs(
        leaf(NUM_SOURCES, wide),
        None if form == "dynamic" else leaf(NUM_SOURCES, logits),
        leaf(NUM_ROWS, logits),
        leaf(csr.num_entries, edges) if edges else None,
        leaf(*weight) if edges else None,
        leaf(wide) if form == "dynamic" else None,
    )


def spec_of(form: Any, heads: int, p: float = 0.0) -> AttentionSpec:
    return AttentionSpec(form, heads, slope=0.2, scale=0.5 if form == "dot" else 1.0, p=p, seed=2**63 + 5)


def keys(csr: CSR, p: float) -> Tensor | None:
    return 3 * torch.arange(csr.num_entries) + 2**33 if p else None


def results(run: Any, given: AttentionInputs, has_sums: bool) -> list[Tensor]:
    """Both outputs, and the gradients of a loss that weighs each of their entries."""
    outputs = run()[: 1 + has_sums]
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype) for out in outputs]
    leaves = [x for x in given if x is not None]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def assert_near(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected)
    for have, want in zip(got, expected, strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        assert float((have - want).abs().max()) <= tolerance * (1 + float(want.abs().max()))


@pytest.mark.parametrize("heads_columns_edges", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_equal_the_reference(form: Any, dtype: torch.dtype, heads_columns_edges: tuple[int, int, int]) -> None:
    heads, columns, edges = heads_columns_edges
    p = 0.4 if heads % 2 else 0.0
    # chunk_work of csrc/ops/cpu/attention.cpp; least_work of csrc/cuda/row_reduction.cuh
    chunk = 128 if IS_SIMT else 2**18 // (heads * columns)
    csr = pattern(2 * chunk + 5 if chunk < 5000 else 300)
    given, spec, key = inputs(csr, form, heads, columns, edges, dtype), spec_of(form, heads, p), keys(csr, p)
    has_sums = form == "dot" and edges > 0
    got = results(lambda: attend(RankAttention(csr, key, spec), given), given, has_sums)
    expected = results(
        lambda: reference.attention_csr(csr.rowptr, csr.col, csr.edge, given, key, spec), given, has_sums
    )
    assert_near(got, expected, 2 * heads * columns**0.5 * TOLERANCE[dtype])


@pytest.mark.parametrize("slope", [0.0, 1.5])
@pytest.mark.parametrize("form", FORMS)
def test_any_slope_and_any_scale(form: Any, slope: float) -> None:
    """Rows of edges that fill no vector: what stands for the others must not count, whatever logits are scaled by."""
    csr, spec = pattern(), AttentionSpec(form, 3, slope=slope, scale=-slope)
    given = inputs(csr, form, 3, 4, 0, torch.float64)
    got = results(lambda: attend(RankAttention(csr, None, spec), given), given, False)
    expected = results(lambda: reference.attention_csr(csr.rowptr, csr.col, csr.edge, given, None, spec), given, False)
    assert_near(got, expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_at_extreme_logits(form: Any) -> None:
    """Differences of logits beyond what exp holds, descending and ascending over batches; infinities and NaN."""
    csr = pattern()
    given = inputs(csr, form, 2, 4, 0, torch.float32)
    spec = spec_of(form, 2)
    with torch.no_grad():
        of_sources = given.value if given.key is None else given.key
        of_sources *= torch.linspace(-300, 300, NUM_SOURCES).view(-1, 1)
    args = csr.rowptr, csr.col, csr.edge, given, None, spec
    y, _, lse = ops.attention_csr(*args)
    torch.testing.assert_close(
        y, reference.attention_csr(*args)[0], rtol=1e-4, atol=1e-4 * float(y.detach().abs().max())
    )
    assert torch.equal(lse.isfinite(), (csr.rowptr.diff() > 0).view(-1, 1).expand(-1, 2))
    with torch.no_grad():
        of_sources[3] = float("nan")
    y = ops.attention_csr(*args)[0]
    torch.testing.assert_close(y.isnan(), reference.attention_csr(*args)[0].isnan(), rtol=0, atol=0)


MASKED = 3  # the first sources


def masked_pattern(hub: int) -> CSR:
    """Rows whose masked sources come first, last or alone, more than a batch of them; hubs have pieces of them."""
    others, none = [5, 6, 5], [k % MASKED for k in range(70)]
    sources = [[0, 1, *others], [*others, 2, 0], [], none, [*none, *others], [*others, *none, 7], [1], [4], others]
    many = [k % MASKED for k in range(hub)]
    sources += [[*many, *others], many, none]
    sources += [[]] * (NUM_ROWS - len(sources))
    row = torch.repeat_interleave(torch.arange(NUM_ROWS), torch.tensor([len(own) for own in sources]))
    return CSR.from_edges(row, torch.tensor([j for own in sources for j in own]), None, NUM_ROWS, NUM_SOURCES)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, float("inf")), (torch.float32, 0.0)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_logits_of_minus_infinity_weigh_nothing(form: Any, dtype: torch.dtype, value: float) -> None:
    """NaN where a row has no others, but not where it is a part of its target's edges; values and gradients."""
    heads, columns = 2, 64
    csr = masked_pattern(2 * (128 if IS_SIMT else 2**18 // (heads * columns)) + 7)
    given, spec = inputs(csr, form, heads, columns, 1, dtype), spec_of(form, heads)
    with torch.no_grad():
        given.value[0, 5] += value  # weight zero times infinity is NaN, in this column
        for positive in (given.edge_weight, given.att):
            if positive is not None:
                positive.abs_()
        if form == "dot":
            given.key[:MASKED] = -torch.inf  # type: ignore[index]
            given.query.abs_()  # type: ignore[union-attr]
        else:
            given.edge_attr[csr.edge[csr.col < MASKED]] = -torch.inf  # type: ignore[index]
    got = results(lambda: attend(RankAttention(csr, None, spec), given), given, form == "dot")
    args = csr.rowptr, csr.col, csr.edge, given, None, spec
    expected = results(lambda: reference.attention_csr(*args), given, form == "dot")
    assert expected[0].isnan().all(1).nonzero().view(-1).tolist() == [3, 6, 10, 11]
    with torch.no_grad():
        got += ops.attention_csr(*args, is_part=True)[: 1 + (form == "dot")]
        expected += reference.attention_csr(*args, is_part=True)[: 1 + (form == "dot")]
    assert value or expected[-1].isfinite().all()
    for have, want in zip(got, expected, strict=True):
        tolerance = 20 * TOLERANCE[dtype]
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not (value and form == "dynamic"):  # whose logits are NaN then
        lse = ops.attention_csr(*args)[2]
        assert lse.isneginf().all(1).nonzero().view(-1).tolist() == [2, 3, 6, *range(10, NUM_ROWS)]


@pytest.mark.parametrize("num_near", [0, 9, NUM_SOURCES])
@pytest.mark.parametrize("form", FORMS)
def test_far_sources_give_the_same_bits(form: Any, num_near: int) -> None:
    """Rows of value and key that lie apart, some columns of wider ones."""
    csr = pattern(hub=300 if IS_SIMT else 9000)
    given, spec, key = inputs(csr, form, 4, 16, 2, torch.float32), spec_of(form, 4, 0.3), keys(csr, 0.3)
    args = csr.rowptr, csr.col, csr.edge

    def apart(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if rows is None:
            return None, None
        return rows[:num_near], torch.cat([rows, rows], 1)[num_near:, : rows.shape[1]]

    (value, far_value), (key_rows, far_key) = apart(given.value), apart(given.key)
    there, far = given._replace(value=value, key=key_rows), (far_value, far_key)
    with torch.no_grad():
        y, z, lse = expected = ops.attention_csr(*args, given, key, spec)
        assert_all_same_bits(expected, ops.attention_csr(*args, there, key, spec, far))
        known = lse, torch.ones_like(lse), y.cos(), z.cos() if len(z) else None, True
        by_target = ops.attention_csr_by_target(*args, given, key, spec, *known)
        assert_all_same_bits(by_target, ops.attention_csr_by_target(*args, there, key, spec, *known, far))


@pytest.mark.parametrize("form", FORMS)
def test_kernels_give_the_same_bits_on_any_number_of_threads(form: Any) -> None:
    csr = pattern(hub=300 if IS_SIMT else 9000)
    given, spec, key = inputs(csr, form, 4, 16, 2, torch.float32), spec_of(form, 4, 0.3), keys(csr, 0.3)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(results(lambda: attend(RankAttention(csr, key, spec), given), given, form == "dot"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert_all_same_bits(found[0], other)


@pytest.mark.parametrize("edges", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_any_order(form: Any, edges: int) -> None:
    csr = CSR.from_edges(torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([1, 1, 2, 0, 3, 3]), None, 4, NUM_SOURCES)
    heads, columns = 2, 3
    full = inputs(csr, form, heads, columns, edges, torch.float64)
    given = full._replace(query=full.query[:4].detach().requires_grad_())  # type: ignore[index]
    if form == "dot" and edges:
        given = given._replace(edge_weight=full.edge_weight[:4].detach().requires_grad_())  # type: ignore[index]
    spec, key = spec_of(form, heads, 0.3), keys(csr, 0.3)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        own = iter(leaves)
        inputs_ = AttentionInputs(*(None if x is None else next(own) for x in given))  # type: ignore[arg-type]
        return attend(RankAttention(csr, key, spec), inputs_)[: 1 + (form == "dot" and edges > 0)]

    leaves = [x for x in given if x is not None]
    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves, fast_mode=True)


def test_one_tensor_in_two_places_has_both_gradients() -> None:
    csr = CSR.from_edges(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 2]), None, 3, 3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    att = torch.randn(4, dtype=torch.float64)
    given, spec = AttentionInputs(x, None, x, att=att), AttentionSpec("dynamic", 2, slope=0.1)
    for create_graph in (False, True):
        (got,) = torch.autograd.grad(
            attend(RankAttention(csr, None, spec), given)[0].square().sum(), x, create_graph=create_graph
        )
        (want,) = torch.autograd.grad(attention_by_edge(csr, None, spec, given)[0].square().sum(), x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: Any) -> None:
    csr = pattern(hub=20)
    given = AttentionInputs(*(x if x is None else x.detach() for x in inputs(csr, form, 2, 4, 3, torch.float32)))
    arguments = _arguments(csr.rowptr, csr.col, csr.edge, given, keys(csr, 0.5), spec_of(form, 2, 0.5))
    args = csr.rowptr, csr.col, csr.edge, given, keys(csr, 0.5), spec_of(form, 2, 0.5)
    sums = _, z, lse = ops.attention_csr(*args)
    far = given.value[:3], None if given.key is None else given.key[:3]
    opcheck(torch.ops.pyg_dist.attention_csr.default, (*sums, *arguments, *far, True))
    known = lse, torch.zeros(NUM_ROWS, 2), torch.ones(NUM_ROWS, 8), torch.ones_like(z) if len(z) else None
    opcheck(torch.ops.pyg_dist.attention_csr_by_target.default, (*arguments, *far, *known, True))
    back = csr.transposed
    arguments = _arguments(back.rowptr, back.col, back.edge, given, keys(csr, 0.5), spec_of(form, 2, 0.5))
    opcheck(torch.ops.pyg_dist.attention_csr_by_source.default, (*arguments, *known))


def test_wrong_arguments_are_refused() -> None:
    csr = pattern(hub=20)
    given, spec = inputs(csr, "dot", 2, 4, 3, torch.float32), spec_of("dot", 2)
    wrong: list[tuple[AttentionInputs, AttentionSpec, str]] = [
        (given._replace(key=None), spec, "expected 'key' with this form of attention, got none"),
        (given._replace(att=torch.ones(8)), spec, "expected no 'att' with this form of attention, got one"),
        (given._replace(edge_weight=None), spec, "expected 'edge_weight' with this form"),
        (given, replace(spec, heads=3), "expected 'heads' to lie in [1, 2048] and to divide the 8 columns"),
        (given, replace(spec, p=1.0), "expected 'p' to lie in [0, 1), got 1"),
        (given, replace(spec, slope=-1.0), "expected 'slope' not to be negative"),
        (given._replace(query=given.value), spec, "expected 'query' to have shape [30, 8], got [25, 8]"),
        (given._replace(key=given.key.double()), spec, "expected 'key' to have the dtype of 'value'"),  # type: ignore[union-attr]
    ]
    for inputs_, spec_, message in wrong:
        with pytest.raises(DataError) as caught:
            ops.attention_csr(csr.rowptr, csr.col, csr.edge, inputs_, None, spec_)
        assert message in str(caught.value)
    for far, message in (
        ((given.value, None), "expected 'far_key' with this form of attention, got none"),
        ((None, given.key), "expected 'far_value' where there is 'far_key', got none"),
    ):
        with pytest.raises(DataError, match=message):
            ops.attention_csr(csr.rowptr, csr.col, csr.edge, given, None, spec, far=far)
