"""Freed memory: blocks of large outputs wait to be reused, the C library's is given back to the system.

Full-batch epochs allocate the same few large tensors again and again, mini-batches tensors of varying sizes. The native
ops take outputs of 2 MiB and more from a pool of huge pages (``csrc/ops/cpu/block_pool.h``): freed blocks wait for the
next request, of whatever size. The pool never holds more than was in use at once (in the last thousand or two
requests), and while pages wait the kernel may take them back. benchmarks/REPORT.md has the figures. With torch 2.10 and
outside of Linux there is no pool.
"""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import torch

from pyg_dist.backend.ops.library import native

_WORTH_A_CALL = 1 << 16
"""Entries: some megabytes, and a millisecond or two for the call."""
_WORTH_A_CALL_EACH_STEP = 1 << 20
"""The same where it may be called in every step of mini-batches."""

_LARGEST_KEPT = (32 << 20) - (1 << 16)
"""Bytes: glibc's ``DEFAULT_MMAP_THRESHOLD_MAX``, less what a block has around it."""


class BlockBytes(NamedTuple):
    """Sizes of the blocks of large outputs, in whole huge pages: in use by tensors, and waiting to be used again."""

    in_use: int
    waiting: int


def has_pool() -> bool:
    """Whether large outputs of the native ops come out of the pool. Not collective."""
    return sys.platform == "linux" and torch.__version__ >= "2.11"


def block_bytes() -> BlockBytes:
    """The pool's blocks now. Not collective."""
    return BlockBytes(*native.block_bytes())


def release_free_memory() -> None:
    """Return blocks that wait, and :func:`trim_heap`. Not collective."""
    native.release_blocks()
    trim_heap()


def release_after(num_entries: int, each_step: bool = False) -> None:
    """:func:`release_free_memory` after work on so many entries, if that is worth the call. Not collective."""
    if num_entries > (_WORTH_A_CALL_EACH_STEP if each_step else _WORTH_A_CALL):
        release_free_memory()


def keep_freed_blocks() -> None:
    """Let the C library keep freed blocks of less than 32 MiB from now on (glibc). Not collective.

    glibc asks the system for each larger block, and gives it back, until it has freed one of that size: a block that
    nobody writes to. Small graphs' epochs otherwise spend up to a third of their time on page faults.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")


def trim_after(num_entries: int, each_step: bool = False) -> None:
    """:func:`trim_heap` after work on so many entries, if that is worth the call. Not collective.

    Its arrays would lie freed beside the first epoch's tensors: 147 MiB of two layers of ``GINConv`` on 2.3 million
    edges.
    """
    if num_entries > (_WORTH_A_CALL_EACH_STEP if each_step else _WORTH_A_CALL):
        trim_heap()


def trim_heap() -> None:
    """Return freed pages of the C library's heap to the system (glibc; elsewhere nothing happens). Not collective.

    Planning sorts edges through temporaries that glibc keeps: a third of a rank, of Amazon Computers at four ranks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
