"""Losses over rows: the same number on every rank, that of one process with all rows (collective)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.dense import large_tensors
from pyg_dist.errors import LayoutMismatchError, MixedRowsError, UnsupportedError
from pyg_dist.tensor.functions.pointwise import as_operand
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.operands import like_rows
from pyg_dist.tensor.registry import Args, Function, Kwargs, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sharding import RowSharding

# Operands with one entry per row, though they may have fewer dimensions than the scores.
_PER_ROW = ("input", "target", "input1", "input2", "anchor", "positive", "negative")


_signature = cache(inspect.signature)


def _bound(function: Function, args: Args, kwargs: Kwargs) -> tuple[dict[str, Any], str, RowSharding]:
    """The operands of a loss beside local rows, its reduction, and the rows."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    name, reduction = public_name(function), given.pop("reduction")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise UnsupportedError(f"{name} got size_average or reduce, which torch has deprecated: use reduction=")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    operands, rows = like_rows(function, *given.values())
    given.update(zip(given, operands, strict=True))
    num_dims = max(value.dim() for key, value in given.items() if key in _PER_ROW and isinstance(value, Tensor))
    for key, value in given.items():
        is_var = key == "var" and np.shape(value)[:1] == (rows.size,)  # of each row, also in fewer dimensions
        if (key in _PER_ROW or is_var) and isinstance(value, Tensor) and not isinstance(value, RowTensor):
            if value.shape[:1] != (rows.size,):
                raise LayoutMismatchError(
                    f"{name} expected '{key}' with {rows.size} rows (got shape {list(value.shape)}): "
                    f"select both operands alike, out[mask] and y[mask]"
                )
            given[key] = rows.slice(value)
        elif key not in _PER_ROW and not (key == "var" and isinstance(value, RowTensor)):
            given[key] = as_operand(function, value, rows, num_dims)
    return given, reduction, rows


_FOR_OTHERS = ("weight", "pos_weight", "size_average", "reduce")


def _by_torch(function: Function, args: Args, kwargs: Kwargs, of_classes: bool) -> Tensor | None:
    """The mean over rows that are all on one rank, by torch itself, which is faster on small graphs; else ``None``."""
    if len(args) != 2 or kwargs.get("reduction") != "mean":
        return None
    for name in _FOR_OTHERS:
        if kwargs.get(name) is not None:
            return None
    scores, target = args
    if not isinstance(scores, RowTensor) or not isinstance(target, RowTensor):
        return None
    rows = scores._sharding
    if rows is not target._sharding or not rows.is_on_one_rank:
        return None
    with local_tensors():
        num_dims = scores.dim(), target.dim()
        is_usual = num_dims in ((2, 1), (2, 2)) if of_classes else num_dims[0] == num_dims[1]
        has_one_dtype = of_classes or scores.dtype == target.dtype
        if not is_usual or not has_one_dtype or large_tensors.is_large(scores, scores.numel()):
            return None
        return function(*args, **kwargs)  # type: ignore[no-any-return]


@implements(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss", "multilabel_soft_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss", namespaces=(F,),
)  # fmt: skip
def elementwise_loss(function: Function, *args: object, **kwargs: object) -> Tensor:
    """Losses that are a value per element or row, then summed or averaged (two of them by weight)."""
    if function is F.l1_loss:
        kwargs.setdefault("weight", _weight_of_l1_loss())
    by_torch = _by_torch(function, args, kwargs, of_classes=False)
    if by_torch is not None:
        return by_torch
    with local_tensors():
        operands, reduction, rows = _bound(function, args, kwargs)
        dims = {operands[name].dim() for name in ("input", "target") if name in operands}
        if function is F.multilabel_soft_margin_loss and 1 in dims:
            raise MixedRowsError(f"{public_name(function)} expected scores and targets [rows, classes] (got [rows])")
        per_row = function in (F.multi_margin_loss, F.multilabel_margin_loss)
        if (len(dims) > 1 and not per_row) or (per_row and 2 not in dims):
            raise MixedRowsError(
                f"{public_name(function)} would align rows with columns: give 'input' and 'target' the same number of "
                f"dimensions, .view(-1, 1) or .view(-1)"
            )
        dtype = _widen(operands) if function is F.binary_cross_entropy_with_logits else None
        values = as_row_tensor_(function(**operands, reduction="none"), rows)
    if dtype is not None:
        loss = values if reduction == "none" else values.sum() if reduction == "sum" else values.mean()
        return loss.to(dtype)
    if reduction == "none":
        return values
    if reduction == "batchmean":
        return values.sum() / rows.size
    weight = operands.get("weight")
    if reduction == "mean" and weight is not None and function in (F.mse_loss, F.l1_loss):
        with local_tensors():
            weight = weight.sum()
        return values.sum() / rows.reduce_from_ranks(weight)
    return values.sum() if reduction == "sum" else values.mean()


def _weight_of_l1_loss() -> object:
    """The weight that ``F.l1_loss`` was called with: torch does not hand it on."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["weight"]


def _widen(operands: dict[str, Any]) -> torch.dtype | None:
    """Give scores and targets the wider of their dtypes; if they differ, return the targets', which the loss has."""
    scores: Tensor = operands["input"]
    target: Tensor = operands["target"]
    if scores.dtype == target.dtype or not target.dtype.is_floating_point:
        return None
    wide = torch.promote_types(scores.dtype, target.dtype)
    operands["input"], operands["target"] = scores.to(wide), target.to(wide)
    return target.dtype


@implements("cross_entropy", "nll_loss", namespaces=(F,))
def class_loss(function: Function, *args: object, **kwargs: object) -> Tensor:
    """Means are weighted by each row's class weight, and rows with ``ignore_index`` do not count."""
    by_torch = _by_torch(function, args, kwargs, of_classes=True)
    if by_torch is not None:
        return by_torch
    with local_tensors():
        operands, reduction, rows = _bound(function, args, kwargs)
        scores, target = operands["input"], operands["target"]
        if scores.dim() < 2:
            raise MixedRowsError(f"{public_name(function)} expected scores of shape [rows, classes] (got 1 dimension)")
        if reduction == "none":
            return as_row_tensor_(function(**operands, reduction="none"), rows)
        total = _total(function, operands)
        if reduction == "sum":
            return rows.reduce_from_ranks(total)
        number = _weight_of_targets(target, operands["weight"], operands["ignore_index"], scores.shape[1])
        # One message for both; the second is a constant.
        pair = torch.stack([total.to(accumulation_dtype(total.dtype)), number.to(accumulation_dtype(total.dtype))])
        total_of_all, number_of_all = rows.reduce_from_ranks(pair).unbind()
        return (total_of_all / number_of_all.detach()).to(total.dtype)


def _total(function: Callable[..., Tensor], operands: dict[str, Any]) -> Tensor:
    scores, target = operands["input"], operands["target"]
    plain = function is F.cross_entropy and scores.dim() == 2 and target.dim() == 1 and not operands["label_smoothing"]
    if not plain or torch.is_autocast_enabled(scores.device.type):
        return function(**operands, reduction="sum")
    weight, ignored = operands["weight"], operands["ignore_index"]
    return F.nll_loss(large_tensors.log_softmax(scores), target, weight, ignore_index=ignored, reduction="sum")


def _weight_of_targets(target: Tensor, weight: Tensor | None, ignore_index: int, num_classes: int) -> Tensor:
    """This rank's share of the mean's denominator."""
    if target.dtype.is_floating_point:  # class probabilities: torch divides by the number of targets
        return torch.full((), target.numel() // max(num_classes, 1), device=target.device)
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight.detach()[target.clamp(0, num_classes - 1)].masked_fill(~counted, 0.0).sum()
