"""TorchScript sees the stock conv: a scripted model works on plain tensors in one process.

``torch.jit.script(model)`` also leaves the stock convs in ``model``; to go on training, script a ``copy.deepcopy``.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch_geometric.nn import MessagePassing

C = TypeVar("C", bound=MessagePassing)


def stock_twin(conv: MessagePassing, stock: type[C]) -> C:
    """A ``stock`` conv with the parameters, buffers and options of ``conv``, its subclass (not copies)."""
    with torch.random.fork_rng(devices=[]):
        twin = stock(1, 1)  # constructed, not only allocated: PyG completes a class at its first instance
    twin.__dict__.clear()
    twin.__dict__.update(conv.__dict__)
    return twin  # type: ignore[no-any-return]
