"""What the native ops are tried on."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from pyg_dist.backend.ops import library

IS_FORCED = "PYG_DIST_ISA" in os.environ
"""Whether ``test_ops_isa.py`` runs this for one more instruction set."""
IS_SIMT = library.isa() == "simt"
"""Whether the kernels for GPUs run, in an emulator: slowly."""

# There a vector of 16 bytes, one of 8, single values, a part of a group's lanes, all, and more than one slice.
WIDTHS = [3, 16, 47, 602] if IS_SIMT else [1, 2, 3, 7, 8, 16, 17, 47, 64, 100, 128, 129, 256, 602]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUM_ROWS, NUM_SOURCES = 60, 50


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def equal_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether all bits agree, the signs of zeros included; NaNs must lie alike, and may differ in their bits."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, expected)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    numbers = ~expected.isnan()
    return torch.equal(~got.isnan(), numbers) and torch.equal(
        got.contiguous().view(whole)[numbers], expected.contiguous().view(whole)[numbers]
    )


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers: every order of summation gives the same bits, so a kernel must equal its reference exactly."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reals(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pattern(width: int, seed: int = 0, num_sources: int = NUM_SOURCES) -> tuple[Tensor, Tensor]:
    """Rows of 0 to 12 edges, empty ones at both ends and in runs, and two hubs that are cut into several pieces."""
    generator = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 13, (NUM_ROWS,), generator=generator)
    degree[:2] = degree[20:25] = degree[-1] = 0
    # chunk_work of csrc/ops/cpu/hub_rows.h; least_work of csrc/cuda/row_reduction.cuh
    chunk = 128 if IS_SIMT else min(max(2**18 // width, 256), 16384)
    degree[7], degree[8] = 3 * chunk + 5, chunk + 1
    rowptr = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=rowptr[1:])
    return rowptr, torch.randint(0, num_sources, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)
