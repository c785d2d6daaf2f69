"""Cached aggregation: a sum over neighbours of a constant input is computed once, as layer 1's of ``data.x``.

The cache is an attribute of the input tensor and is freed with it. An entry holds for one operator, which changes with
the edge weights, and for one version of the tensor, which torch counts up at every change in place. On the grid
redistributing a tensor is such an operator, too: a root's features move to where its neighbours' sum is.

A result is kept if its input needs no gradient and is lasting: an attribute of a ``DistributedData``, or, outside of
checkpoints, a tensor that has been aggregated before. Every rank decides alike, by the object and its version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.session.settings import REMEMBER_MIB
from pyg_dist.tensor.row_tensor import NodeTensor, version_of
from pyg_dist.tensor.sharding import RowSharding

# A tensor meets one operator per kind of conv; more of them at once are edge weights that change.
_MAX_OPERATORS = 2


@dataclass(frozen=True)
class CachedAggregate:
    """``result`` is ``operator`` times ``owner``, at their versions."""

    owner: weakref.ref[NodeTensor]  # a copy of a tensor may carry its attributes along
    version: int | None
    operator: object
    result: Tensor
    result_version: int


def is_cached(x: NodeTensor, operator: Callable[[], object], rows: RowSharding) -> bool:
    """Whether the result is known, or would be kept for the next time. Not collective, apart from ``operator``.

    Args:
        x: what is aggregated.
        operator: gives the operator; called only where x has some results.
        rows: of the result.
    """
    return is_cacheable(x, rows) or (bool(x._cached_aggregates) and lookup(x, operator()) is not None)


def lookup(x: NodeTensor, operator: object) -> Tensor | None:
    """The local rows of what ``operator`` made of x, if they are still right."""
    for known in x._cached_aggregates:
        if known.operator is operator and known.owner() is x:
            is_valid = (
                _may_cache(x) and known.version == version_of(x) and known.result_version == known.result._version
            )
            return known.result if is_valid else None
    return None


def is_cacheable(x: NodeTensor, rows: RowSharding, num_results: int = 1) -> bool:
    """Whether results of x with these rows are worth keeping: up to a number of bytes a rank, on average."""
    # Autograd refuses tensors made in inference mode, later.
    if not (_may_cache(x) and (x._is_attribute or x._is_reused)) or torch.is_inference_mode_enabled():
        return False
    return num_results * x.numel() * x.element_size() <= REMEMBER_MIB.value() * 2**20 * rows.group.size


def store(x: NodeTensor, operator: object, result: Tensor) -> None:
    """Remember the local rows of what ``operator`` made of x."""
    known = CachedAggregate(weakref.ref(x), version_of(x), operator, result, result._version)
    alike = [r for r in x._cached_aggregates if type(r.operator) is type(operator) and r.operator is not operator]
    others = [r for r in x._cached_aggregates if type(r.operator) is not type(operator)]
    x._cached_aggregates = (*others, *(*alike, known)[-_MAX_OPERATORS:])


def _may_cache(x: NodeTensor) -> bool:
    """Whether results of x may be remembered, and what is remembered may stand for them, here and now."""
    if x.requires_grad or x.is_inference():
        return False
    # In a checkpoint, what is computed again must take the same way, whatever was remembered meanwhile: an attribute
    # is remembered from its first time on, another tensor would be from its second one.
    return x._is_attribute or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
