"""Attention layers of torch over rows: over all nodes, where nodes are the sequence, or a sequence for each row.

Over all nodes each rank has the queries of its rows, and the keys and values of all are gathered: 2 N F numbers a rank,
up to N = 50,000 or so. torch's kernel makes the products with them, which on most devices keeps no matrix of scores.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.autograd import replicated
from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.moved_rows import HANDLERS, MovedRows
from pyg_dist.tensor.registry import TABLE, Args, Function, Kwargs, bind, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, like_rows, local_tensors
from pyg_dist.tensor.sharding import RowSharding

_OF_LAYER = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
    "dropout_p out_proj_weight out_proj_bias"
)


def _place(x: Any) -> int | None:
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


def _whole(x: Any, rows: RowSharding) -> Any:
    """All of a tensor, as every rank's own queries meet it; differentiable (collective for rows)."""
    if _place(x) is None:
        return rows.copy_to_ranks(x) if isinstance(x, Tensor) else x
    return replicated.copy_to_ranks(x.full_tensor(), rows.group)


def _rows_of(mask: Any, dim: int, rows: RowSharding) -> Any:
    """The local queries' part of a mask of scores, which has queries in dimension ``dim``."""
    if not isinstance(mask, Tensor) or mask.shape[dim] == 1:
        return mask
    if _place(mask) is not None:
        raise MixedRowsError(
            "Expected a plain mask of scores, or none (got one with rows): use attn_mask.full_tensor()"
        )
    return rows.slice(mask.movedim(dim, 0)).movedim(0, dim)


def _as_seen(local: Tensor, place: int, rows: RowSharding) -> Any:
    """Rows in dimension ``place``."""
    of: Any = as_row_tensor_(local.movedim(place, 0).contiguous(), rows)
    return MovedRows.make(of, place)


def _require_no_dropout(function: Function, p: float) -> None:
    if p:
        raise MixedRowsError(f"{public_name(function)} draws dropout for all rows: pass dropout=0, and use F.dropout")


def attention_layer(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``nn.MultiheadAttention``: over all nodes for ``[N, F]``, ``[N, B, F]`` and, batch first, ``[B, N, F]``.

    Collective, then. With a sequence for each row, ``[N, L, F]`` with ``batch_first=True``, row by row.
    """
    bound = {"training": True, **bind(_OF_LAYER, args, kwargs)}
    _require_no_dropout(function, bound["dropout_p"] if bound["training"] else 0.0)
    query = bound["query"]
    if _place(query) == 1 and query.dim() == 3:  # torch has turned what was batch first
        return _by_row(function, bound)
    if _place(query) != 0:
        raise MixedRowsError(f"{public_name(function)} expected a query with a row for each node (got a plain one)")
    if bound.get("is_causal"):
        raise MixedRowsError(f"{public_name(function)} has no order of nodes (got is_causal): pass an attn_mask")
    rows = _sharding(query)
    bound["attn_mask"] = _rows_of(bound.get("attn_mask"), -2, rows)
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


def scaled_product(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Over all nodes, ``[..., N, C]`` (collective), or row by row, ``[N, ..., L, C]``."""
    bound = bind("query key value attn_mask dropout_p is_causal", args, kwargs)
    query, key, value = (bound.pop(name) for name in ("query", "key", "value"))
    _require_no_dropout(function, bound.get("dropout_p", 0.0))
    place, mask = _place(query), bound.pop("attn_mask", None)
    if place is None:
        raise MixedRowsError(f"{public_name(function)} expected a query with a row for each node (got a plain one)")
    rows = _sharding(query)
    if place < query.dim() - 2:
        if (place, place) != (_place(key), _place(value)) or mask is not None:
            raise MixedRowsError(f"{public_name(function)} is row-wise only for query, key and value with rows alike")
        with local_tensors():
            like, rows = like_rows(function, *(x.of if type(x) is MovedRows else x for x in (query, key, value)))
            of_rows = (x.as_subclass(Tensor).movedim(0, place) for x in like)
            return _as_seen(function(*of_rows, **bound), place, rows)
    if place != query.dim() - 2 or bound.get("is_causal"):
        raise MixedRowsError(
            f"{public_name(function)} over nodes expected queries [..., N, C], without is_causal (got rows in "
            f"dimension {place} of {query.dim()}): transpose them, or pass an attn_mask"
        )
    others = [_whole(x, rows) for x in (key, value)]
    mask = _rows_of(mask, -2, rows)
    with local_tensors():
        return _as_seen(function(_local(query), *others, attn_mask=mask, **bound), place, rows)


TABLE[F.scaled_dot_product_attention] = scaled_product
TABLE[F.multi_head_attention_forward] = attention_layer
HANDLERS.update({F.multi_head_attention_forward: attention_layer, F.scaled_dot_product_attention: scaled_product})
