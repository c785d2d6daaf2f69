"""A layer's last additions, without a tensor for each."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.dense import large_tensors
from pyg_dist.tensor.row_tensor import NodeTensor, local_tensors


def add_into_(out: Tensor, addend: Tensor, alpha: float = 1) -> Tensor:
    """``out + alpha * addend``, written into ``out`` where that changes nothing else.

    To be called only if nothing else refers to ``out`` and no derivative needs it, as for the output of a linear map
    without hooks. It is not done in place for views, whose gradients autograd copies for functions in place, nor under
    dispatch modes, since selective checkpointing keeps outputs of linear maps.
    """
    with local_tensors():
        is_plain = type(out) in (Tensor, NodeTensor)  # tiles take operands in their own way
        in_place = (
            is_plain and out.dtype == addend.dtype and not out._is_view() and not torch._C._len_torch_dispatch_stack()
        )
        if in_place and alpha != 1 and type(addend) is type(out):
            return large_tensors.add_(out, addend, alpha)
    return out.add_(addend, alpha=alpha) if in_place else torch.add(out, addend, alpha=alpha)
