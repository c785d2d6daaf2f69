"""What the C library does with memory that is freed: given back after planning, kept while training if asked to."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

logger = logging.getLogger("pyg_dist")

# <malloc.h> and <sys/mman.h> of glibc on Linux.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _MADV_HUGEPAGE = -1, -4, 14
_HUGE_PAGE = 1 << 21

KEEP_MEMORY = "PYG_DIST_KEEP_MEMORY"
"""Environment variable: ``1`` lets :func:`keep_freed_memory` do its work."""


def release_free_memory() -> None:
    """Return freed heap pages to the system (glibc; elsewhere nothing happens). Not collective.

    Planning sorts edges through temporaries of a few megabytes each. glibc keeps such blocks in its heap when they are
    freed: on Amazon Computers at four ranks that was a third of what a rank held.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> bool:
    """With ``PYG_DIST_KEEP_MEMORY=1``, keep large freed blocks for the next allocation (glibc); True if that worked.

    glibc maps every block over 32 MiB anew and unmaps it when it is freed, so a full-batch epoch, which allocates the
    same few large tensors again and again, pays a page fault for each 4 KiB that it writes: 42,000 faults and 75 ms
    for a 170,000 x 256 tensor whose copy takes 14 ms (docs/performance.md). Kept blocks fault once. But the holes
    between them stay in memory too: a SAGE epoch peaked at 1.7 times what it needs, so this has to be asked for.

    A stretch of address space, not of memory, is reserved at the top of the heap, to be advised in one piece to use
    huge pages. Freed memory stays with the process until the next :func:`release_free_memory`. Not collective.
    """
    libc = _libc()
    if libc is None or os.environ.get(KEEP_MEMORY) != "1" or getattr(libc, "mallopt", None) is None:
        return False
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1)):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    address = libc.malloc(num_bytes)
    if not address:  # a limit on address space: the heap then grows as it must, in small pages
        logger.debug("no huge pages: %d bytes of address space could not be reserved", num_bytes)
        return True
    begin = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    libc.madvise(begin, (address + num_bytes - begin) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    libc.free(address)
    return True


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
