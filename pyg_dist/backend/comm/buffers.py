"""Message buffers that are reused: every new block of memory costs a page fault for each 4 KiB written to it."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend import out_of_memory


class Buffers:
    """Blocks of bytes for the messages of one graph. Not collective.

    A block that has been taken belongs to its messages alone until it is given back. Layers, models and directions
    whose messages fly at the same time so have blocks of their own, and there are as many blocks as ever flew together,
    each as large as the widest rows needed. Messages that an exception has cut off give nothing back: the process group
    may still write into their blocks, which are freed when it lets go of them.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all free blocks."""
        return sum(block.numel() for block in self._free)

    @torch.inference_mode(False)  # else a block from evaluation could not be written to in training
    def acquire(self, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """Return a block of its own, uint8 ``[num_rows, row_bytes]``, with any content."""
        size = num_rows * row_bytes
        there = [k for k, block in enumerate(self._free) if block.device == device]
        fitting = [k for k in there if self._free[k].numel() >= size]
        if fitting and size:
            block = self._free.pop(min(fitting, key=lambda k: self._free[k].numel()))
        else:
            if size and there:  # it grows instead of staying beside a larger one
                self._free.pop(min(there, key=lambda k: self._free[k].numel()))
            with out_of_memory.explained():
                block = torch.empty(size, dtype=torch.uint8, device=device)
        return block[:size].view(num_rows, row_bytes)

    def release(self, *messages: Tensor) -> None:
        """Take back what :meth:`acquire` returned; it may not be read or written any more."""
        for message in messages:
            block = message._base
            if block is not None and block.numel():
                self._free.append(block)
