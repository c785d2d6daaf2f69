"""GCN's norm ``D^-1/2 (A + loops) D^-1/2``, for every layout: ``D_ii = sum_j (A + loops)_ij`` (Kipf and Welling, 2017).

Constant weights make two scales for each node, :func:`gcn_scales`. Weights that learn make a product of products,
:func:`gcn_product`, since the degree depends on them, too. A conv that asks for the weight of each edge gets
``scale[source] * weight * scale[target]`` (``pyg_dist/conv/graph_functions.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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


def gcn_product(x: Any, ones: Any, multiply: Callable[[Any, bool], Any], is_source: Tensor | None) -> Any:
    """``y = s * A_w (s * x)`` with ``s = (A_w 1)^-1/2``; differentiable by x and by the weights (collective).

    Args:
        x: node tensor ``[N, F]``.
        ones: a node tensor ``[N, 1]`` that lies as x does.
        multiply: ``A_w``, loops included, times a node tensor; the second argument: exactly.
        is_source: whether a node has an out-edge; ``None``: every one has.
    """
    scale = inverse_sqrt_degree(multiply(ones, True)).to(x.dtype)
    of_sources = scale if is_source is None else mask_non_sources(scale, is_source)
    return multiply(x * of_sources, False) * scale
