"""What the server that ranks are forked from has imported: torch, PyG, the package and what tests have in common.

An import of the package opens nothing and reads no environment, so a rank starts as if it had imported all by itself.
"""

import gc

import leftovers
import pytest  # noqa: F401
import scipy.sparse  # noqa: F401

import pyg_dist.conv
import pyg_dist.data
import pyg_dist.nn
import pyg_dist.report.profile  # noqa: F401

leftovers.write_propagates()
gc.collect()
gc.freeze()  # the collections after each body pass over all that stays
