"""Dropout and random tensors: keyed by (one draw of torch's CPU generator, row, column).

So the same mask falls on a node whatever the world size, the partition or the layout, and recomputation under
activation checkpointing, which restores the generator, draws it again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, wrap
from pyg_dist.tensor.rows import Rows
from pyg_dist.tensor.shapes import global_shape
from pyg_dist.tensor.table import Function, handles, public_name


def draw_seed() -> int:
    """One draw of torch's default CPU generator, whose state the ranks share."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


@handles("dropout")
def dropout(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zero entries with probability p and scale the others by 1 / (1 - p)."""
    names = ("input", "p", "training", "inplace") if function is torch.nn.functional.dropout else ("input", "p", "train")
    bound = {"p": 0.5, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    x, p, training = bound["input"], bound["p"], bound.get("training", bound.get("train", True))
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return x
    with LOCALLY():
        out = ops.keyed_dropout(x.as_subclass(Tensor), x._rows.key, p, draw_seed())
        return x.copy_(out) if bound["inplace"] else wrap(out, x._rows)


def _uniform(shape: torch.Size, rows: Rows, dtype: torch.dtype) -> Tensor:
    return ops.keyed_uniform(rows.key, math.prod(shape[1:]), draw_seed(), dtype=dtype).view(rows.num_local, *shape[1:])


def _normal(shape: torch.Size, rows: Rows, dtype: torch.dtype) -> Tensor:
    return ops.keyed_normal(rows.key, math.prod(shape[1:]), draw_seed(), dtype=dtype).view(rows.num_local, *shape[1:])


@handles("rand_like", "randn_like")
def random_like(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Uniform in [0, 1), or standard normal."""
    x: RowTensor = args[0] if args else kwargs["input"]
    draw = _uniform if function is torch.rand_like else _normal
    with LOCALLY():
        dtype = kwargs.get("dtype") or x.dtype
        out = draw(global_shape(x), x._rows, dtype).to(kwargs.get("device") or x.device)
        return wrap(out.requires_grad_(kwargs.get("requires_grad", False)), x._rows)


@handles("uniform_", "normal_")
def fill_random(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place fills, as ``torch.nn.init`` uses them."""
    x: RowTensor = args[0]
    if kwargs.get("generator") is not None:
        raise UnsupportedError(f"{public_name(function)} of row tensors draws from torch's default CPU generator only")
    uniform = "uniform" in function.__name__
    low, high = [*args[1:], *[0.0, 1.0][len(args) - 1 :]][:2]
    low = kwargs.get("from" if uniform else "mean", low)
    high = kwargs.get("to" if uniform else "std", high)
    with LOCALLY():
        values = (_uniform if uniform else _normal)(global_shape(x), x._rows, x.dtype)
        return x.copy_(low + values * (high - low) if uniform else low + values * high)


@handles("bernoulli", "bernoulli_")
def bernoulli(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ones with the probabilities in x (or ``p``)."""
    x: RowTensor = args[0]
    p = args[1] if len(args) > 1 else kwargs.get("p")
    with LOCALLY():
        uniform = _uniform(global_shape(x), x._rows, x.dtype if x.dtype.is_floating_point else torch.float32)
        drawn = (uniform < (x if p is None else p)).to(x.dtype)
        return x.copy_(drawn) if function.__name__.endswith("_") else wrap(drawn, x._rows)
