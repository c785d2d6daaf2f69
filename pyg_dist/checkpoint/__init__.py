"""Checkpoints: the state that a training run needs to go on, in a folder, for any number of ranks."""

from pyg_dist.checkpoint.checkpoint import load, parts, save
from pyg_dist.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer", "load", "parts", "save"]
