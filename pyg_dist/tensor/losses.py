"""Losses over rows: the same number on every rank, that of one process with all rows (collective)."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.errors import LayoutMismatchError, UnsupportedError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, rows_of, wrap
from pyg_dist.tensor.rows import Rows
from pyg_dist.tensor.table import Function, handles, public_name

# Operands that have one entry per row; the others (class weights, pos_weight) have none.
_PER_ROW = {"input", "target", "input1", "input2", "anchor", "positive", "negative", "var", "x1", "x2"}


@lru_cache(maxsize=None)
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _bind(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], str, Rows]:
    """The arguments by name with plain operands sliced or entered, the reduction asked for, and the rows."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise UnsupportedError(
            f"{public_name(function)} got size_average or reduce, which torch has deprecated: use reduction="
        )
    rows = rows_of(function, *given.values())
    num_dims = max(v.dim() for v in given.values() if isinstance(v, RowTensor))
    for name, value in given.items():
        if isinstance(value, Tensor) and not isinstance(value, RowTensor):
            if name in _PER_ROW or (value.dim() == num_dims and value.shape[0] == rows.size):
                if value.shape[:1] != (rows.size,):
                    raise LayoutMismatchError(
                        f"{public_name(function)} expected '{name}' with {rows.size} rows (got shape "
                        f"{list(value.shape)}): select both operands alike, out[mask] and y[mask]"
                    )
                given[name] = rows.slice(value)
            else:
                given[name] = rows.enter(value)
    return given, given.pop("reduction"), rows


@handles(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss", "multilabel_soft_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip
def elementwise_loss(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses that are a value per element or row, and then its sum or mean."""
    if "reduction" not in _signature_or_none(function):
        raise UnsupportedError(f"{public_name(function)} has no distributed form: use torch.nn.functional's")
    with LOCALLY():
        given, reduction, rows = _bind(function, args, kwargs)
        values = wrap(function(**given, reduction="none"), rows)
    if reduction == "none":
        return values
    if reduction == "batchmean":
        return values.sum() / rows.size
    return values.sum() if reduction == "sum" else values.mean()


def _signature_or_none(function: Function) -> Any:
    try:
        return _signature(function).parameters
    except ValueError:  # torch's C functions below F have none
        return ()


@handles("cross_entropy", "nll_loss")
def class_loss(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Means are weighted by each row's class weight, and rows with ``ignore_index`` do not count."""
    if function not in (F.cross_entropy, F.nll_loss):
        raise UnsupportedError(f"{public_name(function)} has no distributed form: use torch.nn.functional's")
    with LOCALLY():
        given, reduction, rows = _bind(function, args, kwargs)
        if reduction == "none":
            return wrap(function(**given, reduction="none"), rows)
        total = function(**given, reduction="sum")
        if reduction == "sum":
            return rows.leave(total)
        number = _weight_of_targets(given["target"], given["weight"], given["ignore_index"], given["input"])
        # One message for both; the second is a constant.
        total, number = rows.leave(torch.stack([total, number.to(total.dtype)])).unbind()
        return total / number.detach()


def _weight_of_targets(target: Tensor, weight: Tensor | None, ignore_index: int, scores: Tensor) -> Tensor:
    """This rank's share of the mean's denominator."""
    if target.dtype.is_floating_point:  # class probabilities: torch divides by the number of targets
        return target.new_tensor(target.numel() // max(target.shape[1], 1))
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight.detach()[target.clamp(0, scores.shape[1] - 1)][counted].sum()
