"""Products of sparse matrices with rows: sums, dot products and extremes over the edges."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from pyg_dist.backend.ops.library import (
    as_rows,
    call,
    factor_of,
    like_rows,
    meta_kernel,
    native,
    nothing,
    sum_dtype,
    written_rows,
)

SpmmForm = Literal["plain", "blocks"]
_FORM_NUMBER: dict[SpmmForm | None, int] = {None: 0, "plain": 1, "blocks": 2}  # csrc/problems/spmm_csr.h

PREFETCH_EDGES = 32
"""Default prefetch distance of :func:`spmm_csr`, in edges. Zen 4, one thread, graph B of benchmarks/power_law.py, at 32
and 64 edges: rows of 128 bytes in pages of 4 KiB take 107 and 150 ms; 47 columns by blocks, in huge pages, 131 and 109;
256 columns, all at once, 905 and 914."""


class SpmmWay(NamedTuple):
    """The form of a product (:func:`spmm_csr`), and how many edges ahead rows are prefetched: the same bits."""

    form: SpmmForm | None = None
    prefetch_edges: int = PREFETCH_EDGES


def csr_from_edges(
    row: Tensor, col: Tensor, edge: Tensor | None, num_rows: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The entries of a sparse matrix grouped by row, those of one row in their order: a counting sort. All are checked.

    Exact, in O(E + N) time; two passes over the entries, or a copy where they are in order already. N and the number of
    columns are below 2^31.

    Shapes:
        - row, col, edge: ``[E]`` int32 or int64
        - output: rowptr int64 ``[N + 1]``; col int32 ``[E]``; the ``edge`` of each entry, in its dtype, or, if none is
          given, where the entry stood, int32 (int64 from 2^31 entries on); None: each entry where it stood
    """
    given = None if edge is None else edge.contiguous()
    args = (row.contiguous(), col.contiguous(), given, num_rows, num_cols)
    made: list[Tensor] = call(native.csr_from_edges.default, *args)
    rowptr, sorted_col, sorted_edge = made
    stays = edge is None and sorted_edge.numel() < col.numel()
    return rowptr, sorted_col, None if stays else sorted_edge


class SpmmOptions(TypedDict, total=False):
    """The options of :func:`spmm_csr`."""

    row_scale: Tensor | None
    col_scale: Tensor | None
    divide: bool
    out: Tensor | None
    accumulate: bool


def spmm_csr(
    rowptr: Tensor, col: Tensor, x: Tensor, weight: Tensor | None = None, *,
    row_scale: Tensor | None = None, col_scale: Tensor | None = None, divide: bool = False,
    out: Tensor | None = None, accumulate: bool = True, form: SpmmForm | SpmmWay | None = None,
) -> Tensor:  # fmt: skip
    r"""Sparse times dense: the sum over the in-edges of every row.

    .. math::
        y_i = r_i \sum_{e=\mathrm{rowptr}_i}^{\mathrm{rowptr}_{i+1}-1} w_e \, c_{\mathrm{col}_e} \, x_{\mathrm{col}_e}

    where factors that are not given are one. GCN's norm is two scales. With ``divide``, r and c divide: a mean is the
    sum divided by the degree, and its transpose takes rows divided by it (and rounded to x's dtype), bit for bit as
    PyG has both. Exact up to rounding, and the same for every number of threads. With ``out``, y is *added* to it, or
    written into it where ``accumulate`` is False. ``form`` says how, with the same bits: all columns of a row at once,
    or by blocks of columns that caches hold; where there is only one form, it changes nothing. A way says more.

    That ``col`` lies in ``[0, M)`` is not checked here, but once for every pattern
    (:class:`~pyg_dist.backend.sparse.csr.CSR`): a look at every edge takes up to a seventh of a narrow
    product. A wrong ``col`` reads outside of x.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` or ``[M]``, float32, float64, bfloat16 or float16; copied unless its rows are contiguous
        - weight: ``[E]``, row_scale: ``[N]``, col_scale: ``[M]``, in the sum dtype of x (or its dtype)
        - out: as the output; its rows may be apart (a slice of a larger tensor)
        - output: ``[N, F]``, or ``[N]`` if x is ``[M]``
    """
    x_MF = as_rows(x)
    factors = (factor_of(weight, x), factor_of(row_scale, x), factor_of(col_scale, x))
    way = form if isinstance(form, SpmmWay) else SpmmWay(form)
    numbers = _FORM_NUMBER[way.form], way.prefetch_edges
    if out is None:
        return like_rows(call(native.spmm_csr.default, rowptr, col, x_MF, *factors, divide, *numbers), x)
    op = native.spmm_csr_add if accumulate else native.spmm_csr_into
    call(op.default, written_rows(out), rowptr, col, x_MF, *factors, divide, *numbers)
    return out


def guessed_form(rowptr: Tensor, col: Tensor, x: Tensor) -> SpmmForm | None:
    """The form of :func:`spmm_csr` that the caches of this processor speak for; None: there is only one."""
    number: int = call(native.spmm_csr_guess.default, rowptr, col, as_rows(x))
    return next(form for form in _FORM_NUMBER if _FORM_NUMBER[form] == number)


def sddmm_csr(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    r"""One dot product per edge: the derivative of :func:`spmm_csr` by its weights.

    .. math::
        d_e = \langle a_i, b_{\mathrm{col}_e} \rangle \quad\text{for } \mathrm{rowptr}_i \le e < \mathrm{rowptr}_{i+1}

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - a: ``[N, F]`` or ``[N]``, b: ``[M, F]`` or ``[M]``; float32, float64, bfloat16 or float16, the same for both
        - output: ``[E]`` in the sum dtype
    """
    return call(native.sddmm_csr.default, rowptr, col, as_rows(a), as_rows(b))


def extreme_csr(rowptr: Tensor, col: Tensor, x: Tensor, reduce: Literal["max", "min"]) -> Tensor:
    r"""Largest or smallest value among the in-edges of every row, column by column.

    .. math::
        y_i = \max_{\mathrm{rowptr}_i \le e < \mathrm{rowptr}_{i+1}} x_{\mathrm{col}_e}

    Exact: zero for a row without edges, and a NaN wins, as in ``Tensor.scatter_reduce`` from zeros without them.
    :func:`extreme_csr_grad` is the derivative.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` float32, float64, bfloat16 or float16
        - output: ``[N, F]``
    """
    return call(native.extreme_csr.default, rowptr, col, as_rows(x), reduce == "max")


def extreme_csr_shares(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    r"""The gradient of each extreme divided by its number of ties: the first half of :func:`extreme_csr`'s backward.

    .. math::
        s_i = g_i \, / \, \big( |\{e : x_{\mathrm{col}_e} = y_i\}| + [y_i = 0] \big)

    The zero that torch's ``scatter_reduce`` starts from counts as one of the ties, and its share is lost; so here.

    Shapes:
        - rowptr, col, x, y: the arguments and the output of :func:`extreme_csr`
        - grad: ``[N, F]``, dtype of x
        - output: ``[N, F]`` in the sum dtype
    """
    return call(native.extreme_csr_shares.default, rowptr, col, as_rows(x), y, grad.contiguous())


def extreme_csr_grad(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    r"""The shares brought back to every source that ties: the second half of :func:`extreme_csr`'s backward.

    .. math::
        d_j = \sum_{\mathrm{rowptr}_j \le e < \mathrm{rowptr}_{j+1}} s_{\mathrm{col}_e} \, [x_j = y_{\mathrm{col}_e}]

    Added up in the order of the edges, without atomics: the same for every number of threads.

    Shapes:
        - rowptr: ``[M + 1]`` int64, col: ``[E]`` int32, the *transposed* pattern
        - x: ``[M, F]``, y: ``[N, F]``, shares: ``[N, F]``, of :func:`extreme_csr` and :func:`extreme_csr_shares`
        - output: ``[M, F]``, dtype of x
    """
    return call(native.extreme_csr_grad.default, rowptr, col, as_rows(x), y, shares)


@meta_kernel("csr_from_edges")
def _(row: Tensor, col: Tensor, edge: Tensor | None, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    number = edge if edge is not None else col.to(torch.int32)
    return row.new_empty(num_rows + 1, dtype=torch.int64), torch.empty_like(col, dtype=torch.int32), number.clone()


@meta_kernel("spmm_csr", "extreme_csr")
def _(rowptr: Tensor, col: Tensor, x: Tensor, *others: object) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


meta_kernel("spmm_csr_into", "spmm_csr_add")(nothing)


@meta_kernel("sddmm_csr")
def _(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(col.shape[0], dtype=sum_dtype(a))


@meta_kernel("extreme_csr_shares")
def _(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(y, dtype=sum_dtype(x))


@meta_kernel("extreme_csr_grad")
def _(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    return x.new_empty(x.shape)
