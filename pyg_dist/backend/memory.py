"""Memory that planning has used, given back to the operating system."""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Return freed heap pages to the system (glibc; elsewhere nothing happens). Not collective.

    Planning sorts edges through temporaries of a few megabytes each. glibc keeps such blocks in its heap when they are
    freed: on Amazon Computers at four ranks that was a third of what a rank held.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
