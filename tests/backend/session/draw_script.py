"""What the launches of test_generators run: draws before a message is sent, and on rank 1 once more if told so."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch

import pyg_dist

drawn = [torch.rand(()).item(), np.random.random(), random.random()]
if "apart" in sys.argv:
    np.random.random(pyg_dist.rank())
pyg_dist.init()
drawn.append(np.random.random())
sys.stdout.write(f"{drawn}\n")
sys.stdout.flush()
