"""Attention over the in-edges of every row: logits, softmax and weighted sum in one pass, and its two gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pyg_dist.backend.ops.library import as_rows, call, factor_of, meta_kernel, native, nothing, signed, sum_dtype
from pyg_dist.backend.ops.rows import empty_rows

MAX_HEADS = 2048
"""Of the kernels: the dropout words of an edge lie in one batch (``csrc/cpu/attention.h``)."""

_FORMS = ("additive", "dynamic", "dot")


@dataclass(frozen=True)
class AttentionSpec:
    """How logits are made; the formulas are :func:`attention_csr`'s."""

    # ``"additive"`` (GAT), ``"dynamic"`` (GATv2) or ``"dot"`` (scaled dot product)
    form: Literal["additive", "dynamic", "dot"]
    heads: int  # number of heads H
    slope: float = 0.0  # of the leaky ReLU, zero or more; not for ``"dot"``
    scale: float = 1.0  # of the logits; for ``"dot"`` alone
    p: float = 0.0  # the probability that dropout drops an edge from a head, in ``[0, 1)``
    seed: int = 0  # of the dropout, any integer modulo 2^64


class AttentionInputs(NamedTuple):
    """The inputs of logits and sums; shapes are :func:`attention_csr`'s."""

    value: Tensor
    key: Tensor | None = None
    query: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_weight: Tensor | None = None
    att: Tensor | None = None


Far = tuple[Tensor | None, Tensor | None]
"""Rows of value and of key behind those of :class:`AttentionInputs`."""

Sums = tuple[Tensor, Tensor, Tensor]
"""The outputs of :func:`attention_csr`: y, the sums of edge_attr, and l."""


def attention_csr(
    rowptr: Tensor,
    col: Tensor,
    edge: Tensor,
    inputs: AttentionInputs,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    far: Far = (None, None),
    out: Sums | None = None,
    is_part: bool = False,
) -> Sums:
    r"""Softmax over the in-edges of every row, and the sum of the sources' rows that it weighs, head by head.

    .. math::
        y_{ih} = \sum_e k_{eh} \, \exp(s_{eh} - l_{ih}) \, v_{\mathrm{col}_e h},
        \qquad l_{ih} = \log \sum_e \exp(s_{eh})

    with :math:`\mathrm{rowptr}_i \le e < \mathrm{rowptr}_{i+1}`, :math:`j = \mathrm{col}_e`, the edge's features
    :math:`f = \mathrm{edge\_attr}_{\mathrm{edge}_e}` and the logits :math:`s_{eh}`

    - ``additive``: :math:`\mathrm{leaky}(\mathrm{key}_{jh} + \mathrm{query}_{ih} + \langle w_{ih}, f \rangle)`
      (Veličković et al., "Graph attention networks", 2018)
    - ``dynamic``: :math:`\langle a_h, \mathrm{leaky}(v_{jh} + \mathrm{query}_{ih} + f w_h) \rangle` (Brody et al., "How
      attentive are graph attention networks?", 2022)
    - ``dot``: :math:`\mathrm{scale} \, (\langle \mathrm{key}_{jh}, \mathrm{query}_{ih} \rangle + \langle w_{ih}, f
      \rangle)` (Shi et al., "Masked label prediction", 2021)

    k is zero or :math:`1 / (1 - p)`, the mask of :func:`keyed_dropout` for rows ``edge_key[edge[e]]`` and H columns.
    No logit is stored: the sums go with a running maximum (Milakov and Gimelshein, 2018), and l is all that the
    gradients need beside the output (Dao, "FlashAttention-2", 2023). Exact up to rounding; sums do not depend on the
    number of threads. ``col`` and ``edge`` are not checked, as in :func:`spmm_csr`.

    A logit of minus infinity has weight zero. Where a row has edges and no other logits, y is NaN, as a softmax is. If
    rows are parts of their targets' edges (``is_part``), y is a sum of zeros there, and the other parts decide.

    Sources from number M on, the rows of value and key, are the rows of ``far``: what other ranks have sent.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32, edge: ``[E]`` int32, places among S stored edges
        - value: ``[M, H, C]`` or ``[M, H C]``, float32, float64, bfloat16 or float16; the next four in the same dtype
        - key: ``[M, H]`` (additive), ``[M, H, C]`` (dot); query: ``[N, H]`` or none for zeros (additive), else
          ``[N, H, C]``
        - edge_attr: ``[S, D]`` or none; edge_weight: with it, ``[N, H, D]`` or ``[1, H, D]``; dynamic: ``[D, H C]``
          in the dtype of value or its sum dtype, and att: ``[H C]`` alike
        - edge_key: ``[S]`` int64; far: as value and key but for the number of rows, or none
        - output: y ``[N, H C]``; for ``dot`` with edge_attr the same sums of f, ``[N, H D]`` (else empty); l ``[N, H]``
          in the sum dtype, minus infinity for a row without edges or finite logits
        - out: as the output, without gaps; overwritten, and returned
    """
    arguments = _arguments(rowptr, col, edge, inputs, edge_key, spec)
    sums = empty_sums(rowptr.shape[0] - 1, inputs, spec) if out is None else out
    call(native.attention_csr.default, *sums, *arguments, *_far_rows(far), is_part)
    return sums


def empty_sums(num_rows: int, inputs: AttentionInputs, spec: AttentionSpec) -> Sums:
    """Uninitialised outputs of :func:`attention_csr` for N rows."""
    value, attr = inputs.value, inputs.edge_attr
    edge_columns = 0 if attr is None else spec.heads * attr.shape[1]
    return (
        empty_rows(value, num_rows, value.shape[1:].numel()),
        empty_rows(value, num_rows if spec.form == "dot" and attr is not None else 0, edge_columns),
        value.new_empty(num_rows, spec.heads, dtype=sum_dtype(value)),
    )


def attention_csr_by_target(
    rowptr: Tensor,
    col: Tensor,
    edge: Tensor,
    inputs: AttentionInputs,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    grad_z: Tensor | None,
    by_edge_attr: bool,
    far: Far = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The gradients of :func:`attention_csr` that add up by target: by query, edge_weight, edge_attr and att.

    Probabilities p and the mask k are computed again; then
    :math:`ds_{eh} = p_{eh} (k_{eh} (\langle g_{ih}, v_{jh} \rangle + \langle g^z_{ih}, f \rangle) - \delta_{ih})`.

    Shapes:
        - lse: the last output; delta: ``[N, H]`` in the sum dtype, :math:`\langle g, y \rangle +
          \langle g^z, z \rangle` head by head; grad: ``[N, H C]``, grad_z: ``[N, H D]`` or none, contiguous
        - output: by query ``[N, H]`` or ``[N, H C]``; by edge_weight ``[N, H D]`` (additive, dot); by edge_attr
          ``[S, D]``, zero where the pattern has no edge (``[0, D]`` unless requested); dynamic: by att, and
          below it by edge_weight, ``[1 + D, H C]`` in the sum dtype. What there is none of is empty.
    """
    args = _arguments(rowptr, col, edge, inputs, edge_key, spec)
    known = lse, delta, grad, grad_z
    return call(native.attention_csr_by_target.default, *args, *_far_rows(far), *known, by_edge_attr)


def attention_csr_by_source(
    rowptr: Tensor,
    col: Tensor,
    edge: Tensor,
    inputs: AttentionInputs,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    grad_z: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`attention_csr` that add up by source: by value and key. No atomics.

    Shapes:
        - rowptr: ``[M + 1]``, col: ``[E]``, edge: ``[E]``, the *transposed* pattern
        - all others: as for :func:`attention_csr_by_target`
        - output: as value, ``[M, H C]``, and as key (``[0, 0]`` without)
    """
    args = _arguments(rowptr, col, edge, inputs, edge_key, spec)
    return call(native.attention_csr_by_source.default, *args, lse, delta, grad, grad_z)


def _far_rows(far: Far) -> list[Tensor | None]:
    return [None if rows is None else as_rows(rows) for rows in far]


_Arguments = tuple[Tensor | int | float | None, ...]


def _arguments(
    rowptr: Tensor, col: Tensor, edge: Tensor, inputs: AttentionInputs, edge_key: Tensor | None, spec: AttentionSpec
) -> _Arguments:
    value = as_rows(inputs.value)
    key, query, edge_attr = (None if rows is None else as_rows(rows) for rows in inputs[1:4])
    weight, att = inputs.edge_weight, inputs.att
    if weight is not None:
        weight = factor_of(weight, value) if spec.form == "dynamic" else as_rows(weight)
    att = None if att is None else factor_of(att.reshape(-1), value)
    keys = None if edge_key is None else edge_key.contiguous()
    form = _FORMS.index(spec.form)
    numbers = form, spec.heads, spec.slope, spec.scale, spec.p, signed(spec.seed)
    return rowptr, col, edge, value, key, query, edge_attr, weight, att, keys, *numbers


meta_kernel("attention_csr")(nothing)


@meta_kernel("attention_csr_by_target")
def _(rowptr: Tensor, col: Tensor, edge: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    edge_attr, form, heads = rest[2], rest[6], rest[7]  # see _arguments
    num_rows, is_dynamic = rowptr.shape[0] - 1, form == 1
    storage, edge_columns = (0, 0) if edge_attr is None else edge_attr.shape
    return (
        value.new_empty(num_rows, heads if form == 0 else value.shape[1]),
        value.new_empty(0 if edge_attr is None or is_dynamic else num_rows, heads * edge_columns),
        value.new_empty(storage if rest[-1] else 0, edge_columns),
        value.new_empty(1 + edge_columns if is_dynamic else 0, value.shape[1], dtype=sum_dtype(value)),
    )


@meta_kernel("attention_csr_by_source")
def _(
    rowptr: Tensor, col: Tensor, edge: Tensor, value: Tensor, key: Tensor | None, *rest: object
) -> tuple[Tensor, ...]:
    by_key = value.new_empty((0, 0)) if key is None else value.new_empty(key.shape)
    return value.new_empty(value.shape), by_key
