"""Attention layers of torch over rows: over all nodes, where nodes are the sequence, or a sequence for each row.

Over all nodes each rank has the queries of its rows and gathers all keys and values, 2 N F numbers: for N up to 50,000
or so. torch's kernel multiplies them; on most devices it keeps no matrix of scores. With dropout, whose numbers are
drawn by query and key, the weights of a rank's queries are kept: n N numbers for each head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.tensor.functions.moved_rows import MovedRows, implements_anywhere, rows_and_place
from pyg_dist.tensor.operands import like_rows
from pyg_dist.tensor.registry import Function, bind, by_steps, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sharding import RowSharding

_OF_LAYER = (
    "key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias"
)


def _place(x: object) -> int | None:
    """The dimension that rows are in; ``None`` for a plain tensor."""
    return rows_and_place(x)[1] if isinstance(x, (RowTensor, MovedRows)) else None


def _require_rows(function: Function, query: object) -> None:
    if _place(query) is None:
        raise MixedRowsError(f"{public_name(function)} expected a query with a row for each node (got a plain one)")


def _require_plain(mask: object) -> None:
    if _place(mask) is not None:
        raise MixedRowsError(
            "Expected a plain mask of scores, or none (got one with rows): use attn_mask.full_tensor()"
        )


def _require_no_dropout(function: Function, p: float) -> None:
    if p:
        raise MixedRowsError(f"{public_name(function)} draws dropout by sequence: pass dropout=0, and use F.dropout")


def _as_seen(local: Tensor, place: int, rows: RowSharding) -> Tensor:
    return MovedRows.make(as_row_tensor_(local.movedim(place, 0).contiguous(), rows), place)


@implements_anywhere("multi_head_attention_forward")
def attention_layer(function: Function, query: Tensor, *args: object, **kwargs: object) -> object:
    """``nn.MultiheadAttention``: over all nodes for ``[N, F]``, ``[N, B, F]`` and, batch first, ``[B, N, F]``.

    Collective, then. With a sequence for each row, ``[N, L, F]`` with ``batch_first=True``, row by row.
    """
    bound: dict[str, Any] = {"query": query, "training": True, **bind(function, _OF_LAYER, args, kwargs)}
    if _place(query) == 1 and query.dim() == 3:  # torch has turned what was batch first
        _require_no_dropout(function, bound["dropout_p"] if bound["training"] else 0.0)
        return _by_row(function, bound)
    if _place(query) != 0:
        _require_rows(function, None)
    _require_plain(bound.get("attn_mask"))
    # Projected one by one: views of one tensor would lie otherwise in memory than torch's.
    bound.update({name: bound[name].view_as(bound[name]) for name in ("key", "value")})
    whole = ("key_padding_mask", *(("key", "value") if bound.get("add_zero_attn") else ()))  # to which a row is added
    bound.update({name: bound[name].full_tensor() for name in whole if _place(bound.get(name)) is not None})
    return by_steps(F.multi_head_attention_forward, **bound)


def _by_row(function: Function, bound: dict[str, Any]) -> object:
    sequences = [bound[name] for name in ("query", "key", "value")]
    if any(type(s) is not MovedRows or s.dim() != 3 or s.place != 1 for s in sequences):
        raise MixedRowsError(
            f"{public_name(function)} is row-wise only for one sequence per row: expected query, key and value "
            f"[N, L, F] with batch_first=True"
        )
    with local_tensors():
        (query, key, value), rows = like_rows(function, *(s.of for s in sequences))
        local = {
            id(s): t.as_subclass(Tensor).transpose(0, 1) for s, t in zip(sequences, (query, key, value), strict=True)
        }
        for name, given in bound.items():
            if type(given) is MovedRows:
                bound[name] = local[id(given)]
            elif isinstance(given, RowTensor):  # a padding mask
                bound[name] = given.redistribute(rows).as_subclass(Tensor)
            elif isinstance(given, Tensor) and (
                name == "key_padding_mask" or (name == "attn_mask" and given.dim() == 3)
            ):
                bound[name] = _of_sequences(given, bound["num_heads"] if given.dim() == 3 else 1, rows)
            elif isinstance(given, Tensor):
                bound[name] = rows.copy_to_ranks(given)
        out, weights = function(**bound)
        of = as_row_tensor_(out.transpose(0, 1).contiguous(), rows)
        return MovedRows.make(of, 1), weights if weights is None else as_row_tensor_(weights, rows)


def _of_sequences(mask: Tensor, num_heads: int, rows: RowSharding) -> Tensor:
    """This rank's piece of a plain mask for each row, ``[N, S]``, or for each row and head, ``[N heads, L, S]``."""
    if mask.shape[0] != rows.size * num_heads:
        raise DataError(
            f"Expected a mask for each of {rows.size} rows and {num_heads} heads (got {list(mask.shape)}): one of "
            f"scores for all of them is [L, S]"
        )
    by_row: Tensor = rows.copy_to_ranks(mask).unflatten(0, (rows.size, num_heads))
    return by_row.index_select(0, on_device(rows.position, mask.device)).flatten(0, 1)


@implements_anywhere("scaled_dot_product_attention")
def scaled_product(
    function: Function, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **options: bool,
) -> Tensor:  # fmt: skip
    """Over all nodes, ``[..., N, C]`` (collective), or row by row, ``[N, ..., L, C]``."""
    _require_rows(function, query)
    of, place = rows_and_place(query)
    rows = of._sharding
    if place < query.dim() - 2:
        _require_no_dropout(function, dropout_p)
        is_alike = (place, place) == (_place(key), _place(value)) and query.dim() == key.dim() == value.dim()
        if not is_alike or attn_mask is not None:
            raise MixedRowsError(f"{public_name(function)} is row-wise only for query, key and value with rows alike")
        with local_tensors():
            like, rows = like_rows(function, *(rows_and_place(x)[0] for x in (query, key, value)))
            of_rows = (x.as_subclass(Tensor).movedim(0, place) for x in like)
            return _as_seen(function(*of_rows, is_causal=is_causal, scale=scale, **options), place, rows)
    if place != query.dim() - 2:
        raise MixedRowsError(
            f"{public_name(function)} over nodes expected queries [..., N, C] (got rows in dimension {place} of "
            f"{query.dim()}): transpose them"
        )
    _require_plain(attn_mask)
    if is_causal:
        order = torch.arange(key.shape[-2], device=query.device)
        attn_mask = torch.arange(query.shape[-2], device=query.device).view(-1, 1) >= order
    if dropout_p:
        if options.get("enable_gqa"):
            raise MixedRowsError(f"{public_name(function)} with dropout has no enable_gqa: repeat the keys and values")
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return F.dropout(scores.softmax(-1), dropout_p) @ value
    whole_key, whole_value = (_whole(x, rows) for x in (key, value))
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        attn_mask = rows.slice(attn_mask.movedim(-2, 0)).movedim(0, -2)
    with local_tensors():
        local = of.as_subclass(Tensor).movedim(0, place)
        out = function(local, whole_key, whole_value, attn_mask=attn_mask, scale=scale, **options)
        return _as_seen(out, place, rows)


def _whole(x: Tensor, rows: RowSharding) -> Tensor:
    """All of a tensor, for every rank's own queries; differentiable (collective for rows)."""
    if isinstance(x, (RowTensor, MovedRows)):
        return replicated.copy_to_ranks(x.full_tensor(), rows.group)
    return rows.copy_to_ranks(x)
