"""Torch's factories, on the host wherever a script's default device is (``torch.set_default_device``).

Plans, counts and ids are made with these: they stay on the host, and what a device needs is copied there.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

arange = partial(torch.arange, device="cpu")
as_tensor = partial(torch.as_tensor, device="cpu")
empty = partial(torch.empty, device="cpu")
full = partial(torch.full, device="cpu")
ones = partial(torch.ones, device="cpu")
rand = partial(torch.rand, device="cpu")
randperm = partial(torch.randperm, device="cpu")
tensor = partial(torch.tensor, device="cpu")
zeros = partial(torch.zeros, device="cpu")


def flatnonzero(mask: Tensor) -> Tensor:
    """Places where a mask of the host is true, int64 ``[k]``: torch's function takes up to ten times as long."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def integers_to(last: int) -> torch.dtype:
    """The dtype of numbers from 0 to ``last``: int32 where they fit."""
    return torch.int32 if last <= torch.iinfo(torch.int32).max else torch.int64


def in_few_bits(numbers: Tensor) -> Tensor:
    """Numbers that are not negative, as int32 where all fit, else as they are."""
    dtype = integers_to(int(numbers.max()) if numbers.numel() else 0)
    return numbers if dtype == torch.int64 else numbers.to(dtype)
