"""A rank that fails or ends before ``init``, which the others have begun: what the launches of test_leaving run.

early_script.py CASE RANK
"""

from __future__ import annotations

import sys
from datetime import timedelta

import pyg_dist

case, concerned = sys.argv[1], int(sys.argv[2])
if pyg_dist.rank() == concerned:
    if case == "raises":
        raise RuntimeError(f"the fault of rank {concerned}\nand more")
    if case == "ends":
        sys.exit(0)
if case != "none inits":
    pyg_dist.init(timeout=timedelta(hours=9))  # no test waits as long
