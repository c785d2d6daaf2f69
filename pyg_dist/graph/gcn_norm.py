"""GCN norm ``D^-1/2 (A + loops) D^-1/2``, for every layout: ``D_ii = sum_j (A + loops)_ij`` (Kipf and Welling, 2017).

Constant weights make two scales for each node, :func:`gcn_scales`. Weights that learn make a product of products,
:func:`gcn_product`, since the degree depends on them, too. A conv that needs the weight of each edge gets
``scale[source] * weight * scale[target]`` (``pyg_dist/conv/graph_functions.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def inverse_sqrt_degree(degree: T) -> T:
    """``degree^-1/2``, zero where the degree is zero, as PyG's ``gcn_norm`` has it."""
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)  # type: ignore[return-value]


def mask_non_sources(scale: T, is_source: Tensor) -> T:
    """``scale``, zero for nodes that are no source: no sum needs theirs, and NaN there would be their gradient.

    Degrees are negative where weights are, and their roots NaN.

    Shapes:
        - scale: ``[n, ...]``
        - is_source: bool ``[n]``
    """
    return scale.masked_fill(~is_source.view(-1, *[1] * (scale.dim() - 1)), 0.0)  # type: ignore[return-value]


def gcn_scales(
    degree: Tensor, at_columns: Callable[[Tensor], Tensor], is_source: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scales of a tile's rows and columns.

    Args:
        degree: of the rows' nodes, loops included.
        at_columns: the same nodes' values where the columns need them.
        is_source: whether a column has an entry, bool; ``None``: every one has.
    """
    scale = inverse_sqrt_degree(degree)
    of_columns = at_columns(scale)
    return scale, of_columns if is_source is None else mask_non_sources(of_columns, is_source)


class LearnedScales:
    """``s = (A_w 1)^-1/2`` for weights that learn, differentiable by them.

    One for all products of an operator, which holds for one forward pass.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, bool], tuple[Any, Any]] = {}

    def get(self, dtype: torch.dtype, degree: Callable[[], Any], is_source: Tensor | None) -> tuple[Any, Any]:
        """Those of rows and of columns (collective at the first use, if ``degree`` is).

        Args:
            dtype: of the product.
            degree: ``A_w 1``, loops included, ``[N, 1]``.
            is_source: whether a node has an out-edge; ``None``: every one has.
        """
        key = dtype, torch.is_grad_enabled()
        if key not in self._known:
            scale = inverse_sqrt_degree(degree())
            self._known[key] = scale, scale if is_source is None else mask_non_sources(scale, is_source)
        return self._known[key]


def gcn_product(x: Any, scales: tuple[Any, Any], multiply: Callable[[Any], Any]) -> Any:
    """``y = s * A_w (s * x)``; differentiable by x and by the weights (collective).

    Args:
        x: node tensor ``[N, F]``.
        scales: s, of rows and of columns.
        multiply: ``A_w``, loops included, times a node tensor (collective).
    """
    of_rows, of_columns = scales
    return multiply(x * of_columns.to(x.dtype)) * of_rows.to(x.dtype)
