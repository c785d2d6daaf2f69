"""What the server that ranks are forked from has imported: torch, PyG, the package and what tests have in common.

The import reads PYG_DIST_LOG, PYG_DIST_ISA and what a launcher tells, as they are when the tests start. What is about
these takes a launch that is not forked.
"""

import gc
import inspect
import weakref
from typing import Any

import hypothesis  # noqa: F401
import leftovers
import pytest  # noqa: F401
import scipy.sparse  # noqa: F401
import shortcuts
import torch

import pyg_dist.backend.calibration
import pyg_dist.checkpoint
import pyg_dist.cli.bench
import pyg_dist.cli.doctor
import pyg_dist.data.grid_data
import pyg_dist.data.stored_graph
import pyg_dist.grid.graph
import pyg_dist.loader  # noqa: F401

shortcuts.take()
leftovers.write_propagates()
inspect.stack()  # torchrun asks for it; where each module's file is, the first call finds out
_finalizers: Any = weakref.finalize
for _finalizer in list(_finalizers._registry):
    if _finalizer.peek()[1] is torch.library._del_library:  # a process that ends need not take torch's libraries apart
        _finalizer.atexit = False
gc.collect()
gc.freeze()
