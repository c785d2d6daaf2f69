"""Saves twice; the second time a rank is killed as it writes its part: ``killed_script.py FOLDER RANK``."""

from __future__ import annotations

import os
import signal
import sys

from torch import nn

import pyg_dist
from pyg_dist import checkpoint
from pyg_dist.checkpoint.writer import Writer


def die(*args: object) -> None:
    """As by the system."""
    os.kill(os.getpid(), signal.SIGKILL)


pyg_dist.init()
model = nn.Linear(40, 30)
nn.init.constant_(model.weight, 1)
checkpoint.save(sys.argv[1], model, number=1)
if pyg_dist.rank() == int(sys.argv[2]):
    Writer._write_shards = die  # type: ignore[method-assign, assignment]
checkpoint.save(sys.argv[1], model, number=2)
