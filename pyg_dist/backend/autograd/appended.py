"""Rows of several tensors, one behind another, in the graph on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def append(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` along dimension 0, whose derivatives reach tensors without elements, too; not collective.

    ``torch.cat`` leaves flat ones out: their gradients are no part of the graph, and where a second derivative asks
    other ranks for something, a rank without rows would not ask.

    Shapes: ``[n, ...], [m, ...], ... -> [n + m + ..., ...]``.
    """
    if tensors[0].dim() != 1:
        return torch.cat([*tensors])
    return torch.cat([t.unsqueeze(1) for t in tensors]).squeeze(1)
