"""What the server that ranks are forked from has imported: torch, PyG, the package and what tests have in common.

The import reads PYG_DIST_LOG, PYG_DIST_ISA and what a launcher tells, as they are when the tests start. What is about
these takes a launch that is not forked.
"""

import gc

import leftovers
import pytest  # noqa: F401
import scipy.sparse  # noqa: F401
import shortcuts

import pyg_dist.grid.graph  # noqa: F401

shortcuts.take()
leftovers.write_propagates()
gc.collect()
gc.freeze()
