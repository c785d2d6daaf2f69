"""Attention layers of torch over rows: a sequence for each row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.moved_rows import HANDLERS, MovedRows
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, like_rows, local_tensors


def _attention(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``nn.MultiheadAttention`` with a sequence for each row: ``batch_first=True`` of ``[N, L, F]``."""
    names = (
        "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
        "dropout_p out_proj_weight out_proj_bias"
    )
    bound = {"training": True, **bind(names, args, kwargs)}
    sequences = [bound[name] for name in ("query", "key", "value")]
    if any(type(s) is not MovedRows or s.dim() != 3 or s.place != 1 for s in sequences):
        raise MixedRowsError(
            f"{public_name(function)} is row-wise only for one sequence per row: expected query, key and value "
            f"[N, L, F] with batch_first=True"
        )
    if bound["dropout_p"] and bound["training"]:
        raise MixedRowsError(f"{public_name(function)} draws dropout for all rows: pass dropout=0, and use F.dropout")
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


HANDLERS[F.multi_head_attention_forward] = _attention
