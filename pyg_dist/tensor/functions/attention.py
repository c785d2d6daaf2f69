"""Attention layers of torch over rows: over all nodes, where nodes are the sequence, or a sequence for each row.

Over all nodes each rank has the queries of its rows, and the keys and values of all are gathered: 2 N F numbers a rank,
up to N = 50,000 or so. torch's kernel makes the products with them, which on most devices keeps no matrix of scores.
With dropout the weights of a rank's queries are kept, n N numbers for each head: they are drawn by query and key.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.moved_rows import MovedRows, implements_anywhere
from pyg_dist.tensor.registry import Function, bind, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, like_rows, local_tensors
from pyg_dist.tensor.sharding import RowSharding

_OF_LAYER = (
    "key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias"
)


def _place(x: object) -> int | None:
    """The dimension that rows are in; ``None`` for a plain tensor."""
    return x.place if type(x) is MovedRows else 0 if isinstance(x, RowTensor) else None


def _local(x: Any) -> Tensor:
    """This rank's rows, in the dimension where they are seen."""
    if type(x) is MovedRows:
        return x.of.to_local().movedim(0, x.place)
    local: Tensor = x.to_local()
    return local


def _sharding(x: Any) -> RowSharding:
    rows: RowSharding = (x.of if type(x) is MovedRows else x)._sharding
    return rows


def _whole(x: Any, rows: RowSharding) -> Tensor:
    """All of a tensor, as every rank's own queries meet it; differentiable (collective for rows)."""
    if _place(x) is None:
        return rows.copy_to_ranks(x) if isinstance(x, Tensor) else x
    return replicated.copy_to_ranks(x.full_tensor(), rows.group)


def _rows_of(mask: object, dim: int, rows: RowSharding) -> object:
    """The local queries' part of a mask of scores, which has queries in dimension ``dim``."""
    if not isinstance(mask, Tensor) or mask.shape[dim] == 1:
        return mask
    if _place(mask) is not None:
        raise MixedRowsError(
            "Expected a plain mask of scores, or none (got one with rows): use attn_mask.full_tensor()"
        )
    return rows.slice(mask.movedim(dim, 0)).movedim(0, dim)


def _as_seen(local: Tensor, place: int, rows: RowSharding) -> object:
    """Rows in dimension ``place``."""
    of = as_row_tensor_(local.movedim(place, 0).contiguous(), rows)
    return MovedRows.make(of, place)


def _require_no_dropout(function: Function, p: float) -> None:
    if p:
        raise MixedRowsError(f"{public_name(function)} draws dropout by sequence: pass dropout=0, and use F.dropout")


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: object, p: float, rows: RowSharding, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of local queries to all keys, and its weights, of which some are dropped, keyed by query and key.

    Shapes: query ``[..., n, C]``, key and value ``[..., N, C]``; output ``[..., n, C]``, and ``[..., n, N]``.
    """
    with local_tensors():
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if isinstance(mask, Tensor):
            scores = scores + _added(~mask if mask.dtype == torch.bool else mask, scores)
        by_query = as_row_tensor_(scores.softmax(-1).movedim(-2, 0).contiguous(), rows)
    weights = F.dropout(by_query, p)
    with local_tensors():
        weights = weights.as_subclass(Tensor).movedim(0, -2)
        return weights @ value, weights


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of torch's layer, which holds where scores are left out, as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def _layer_with_dropout(function: Function, bound: dict[str, Any], rows: RowSharding) -> tuple[Any, Any]:
    """``nn.MultiheadAttention`` over all nodes by its steps: torch would draw other masks on each rank (collective)."""
    if bound.get("add_zero_attn") or any(bound.get(name) is not None for name in ("bias_k", "static_k")):
        raise MixedRowsError(
            f"{public_name(function)} with dropout over nodes has no bias_k, static_k and add_zero_attn (got one of "
            f"them): pass dropout=0"
        )
    weights: Any = [bound.get(f"{name}_proj_weight") for name in "qkv"]
    if not bound.get("use_separate_proj_weight"):
        weights = bound["in_proj_weight"].chunk(3)
    biases: Any = (None,) * 3 if bound["in_proj_bias"] is None else bound["in_proj_bias"].chunk(3)
    inputs, heads = (bound["query"], bound["key"], bound["value"]), bound["num_heads"]
    projected = [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]
    shape, width = projected[0].shape, projected[0].shape[-1] // heads
    key, value = (_whole(x, rows) for x in projected[1:])
    num_seen = shape[1:-1].numel() * heads  # sequences of queries
    local = (_local(projected[0]), key, value)
    query, key, value = (x.reshape(x.shape[0], num_seen, width).movedim(0, 1) for x in local)
    masks = [_added(m, query) for m in (bound["attn_mask"],) if m is not None]
    padding = _whole(bound.get("key_padding_mask"), rows)
    if padding is not None:  # [B, N], or [N]
        of_keys = _added(padding, query).view(-1, 1, 1, padding.shape[-1])
        masks.append(of_keys.expand(-1, heads, -1, -1).flatten(0, 1))
    mask = sum(masks[1:], masks[0]) if masks else None
    out, attended = _with_dropout(query, key, value, mask, bound["dropout_p"], rows)
    of_nodes = as_row_tensor_(out.movedim(1, 0).reshape(rows.num_local, *shape[1:]), rows)
    out = F.linear(of_nodes, bound["out_proj_weight"], bound["out_proj_bias"])
    if not bound.get("need_weights", True):
        return out, None
    attended = attended.reshape(num_seen // heads, heads, *attended.shape[1:])
    attended = attended.mean(1) if bound.get("average_attn_weights", True) else attended
    attended = attended if len(shape) == 3 else attended[0]
    return out, _as_seen(attended, attended.dim() - 2, rows)


@implements_anywhere("multi_head_attention_forward")
def attention_layer(function: Function, query: Tensor, *args: object, **kwargs: object) -> object:
    """``nn.MultiheadAttention``: over all nodes for ``[N, F]``, ``[N, B, F]`` and, batch first, ``[B, N, F]``.

    Collective, then. With a sequence for each row, ``[N, L, F]`` with ``batch_first=True``, row by row.
    """
    bound = {"query": query, "training": True, **bind(function, _OF_LAYER, args, kwargs)}
    drops = bound["training"] and bound["dropout_p"] > 0
    if _place(query) == 1 and query.dim() == 3:  # torch has turned what was batch first
        _require_no_dropout(function, drops)
        return _by_row(function, bound)
    if _place(query) != 0:
        raise MixedRowsError(f"{public_name(function)} expected a query with a row for each node (got a plain one)")
    rows = _sharding(query)
    bound["attn_mask"] = _rows_of(bound.get("attn_mask"), -2, rows)
    if bound["attn_mask"] is not None:
        bound["is_causal"] = False  # it says what this mask is
    if drops:
        return _layer_with_dropout(function, bound, rows)
    given = {name: _whole(value, rows) for name, value in bound.items() if name not in ("query", "attn_mask")}
    with local_tensors():
        out, weights = function(query=_local(query), attn_mask=bound["attn_mask"], **given)
        seen = as_row_tensor_(out, rows)
        return seen, weights if weights is None else _as_seen(weights, weights.dim() - 2, rows)


def _by_row(function: Function, bound: dict[str, Any]) -> object:
    """A sequence for each row."""
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
            elif isinstance(given, Tensor):
                bound[name] = rows.copy_to_ranks(given)
        out, weights = function(**bound)
        of = as_row_tensor_(out.transpose(0, 1).contiguous(), rows)
        return MovedRows.make(of, 1), weights if weights is None else as_row_tensor_(weights, rows)


@implements_anywhere("scaled_dot_product_attention")
def scaled_product(
    function: Function, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> object:  # fmt: skip
    """Over all nodes, ``[..., N, C]`` (collective), or row by row, ``[N, ..., L, C]``."""
    place, mask = _place(query), attn_mask
    if place is None:
        raise MixedRowsError(f"{public_name(function)} expected a query with a row for each node (got a plain one)")
    rows = _sharding(query)
    if place < query.dim() - 2:
        _require_no_dropout(function, dropout_p)
        if (place, place) != (_place(key), _place(value)) or mask is not None:
            raise MixedRowsError(f"{public_name(function)} is row-wise only for query, key and value with rows alike")
        with local_tensors():
            like, rows = like_rows(function, *(x.of if type(x) is MovedRows else x for x in (query, key, value)))
            of_rows = (x.as_subclass(Tensor).movedim(0, place) for x in like)
            return _as_seen(function(*of_rows, is_causal=is_causal, **options), place, rows)
    if place != query.dim() - 2:
        raise MixedRowsError(
            f"{public_name(function)} over nodes expected queries [..., N, C] (got rows in dimension {place} of "
            f"{query.dim()}): transpose them"
        )
    whole_key, whole_value = (_whole(x, rows) for x in (key, value))
    mask = _rows_of(mask, -2, rows)
    if is_causal:
        mask = on_device(rows.position, query.device).view(-1, 1) >= torch.arange(key.shape[-2], device=query.device)
    if dropout_p:
        if options.get("enable_gqa"):
            raise MixedRowsError(f"{public_name(function)} with dropout has no enable_gqa: repeat the keys and values")
        out, _ = _with_dropout(_local(query), whole_key, whole_value, mask, dropout_p, rows, options.get("scale"))
        return _as_seen(out, place, rows)
    with local_tensors():
        return _as_seen(function(_local(query), whole_key, whole_value, attn_mask=mask, **options), place, rows)
