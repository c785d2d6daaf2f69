"""Masked label propagation: some training labels become features, the others the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dist.backend import ops
from pyg_dist.errors import DataError, OptionError
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.random import draw_seed


class MaskedLabelPropagation(nn.Module):
    r"""Adds embedded labels to the features of some training nodes, and leaves the other training nodes to the loss.

    .. math::
        x'_i = x_i + [i \in D] \, E_{y_i}, \qquad D \subseteq T \text{ drawn anew each step}, \qquad
        \text{loss over } T \setminus D

    Source: "Masked Label Prediction" (Shi et al., 2021), as SuperGCN, 2.5 and 6.1 use it: the labels spread with the
    features, and make up for what quantized messages lose. No label of a node in the loss is embedded, so none leaks
    into its own loss. In evaluation the labels of all training nodes are embedded, and the mask is theirs.

    The draw is a function of one number of torch's CPU generator and the node's global id, the same for every world
    size and layout, and for a plain ``Data``. E begins with normal values of variance 1 / channels, so that an
    embedded label is about as long as a row-normalised feature vector. Exact; not collective, except that E enters
    (its gradient is summed).

    Args:
        num_classes: labels are ``0 ... num_classes - 1``; others may stand outside of the mask.
        channels: columns of x.
        rate: the probability with which a training label is embedded, in ``[0, 1)``.

    Shapes:
        - x: ``[N, channels]`` node tensor or plain tensor
        - y: ``[N]`` integers
        - train_mask: bool ``[N]``
        - output: ``[N, channels]``, and the nodes of the loss, bool ``[N]``; node tensors if x is one

    Raises:
        OptionError: ``rate`` lies outside of ``[0, 1)``.
        DataError: x, y and ``train_mask`` do not fit together, or x is a tile of the grid layout.

    Example:
        >>> x, loss_mask = label_propagation(data.x, data.y, data.train_mask)
        >>> out = model(x, data.edge_index)
        >>> loss = F.cross_entropy(out[loss_mask], data.y[loss_mask])
    """

    def __init__(self, num_classes: int, channels: int, rate: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise OptionError(f"Expected 0 <= rate < 1, the share of training labels to embed (got {rate})")
        self.num_classes, self.channels, self.rate = num_classes, channels, rate
        self.weight = nn.Parameter(torch.empty(num_classes, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embedding anew."""
        nn.init.normal_(self.weight, std=self.channels**-0.5)

    def forward(self, x: Tensor, y: Tensor, train_mask: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        rows = x._rows if isinstance(x, NodeTensor) else None
        if rows is not None and rows.kind == "tile":
            raise DataError("MaskedLabelPropagation expected rows (got tiles): use layout='halo'")
        local, labels, mask = (t.to_local() if isinstance(t, NodeTensor) else t for t in (x, y, train_mask))
        if not (local.dim() == 2 and mask.dtype == torch.bool and labels.shape == mask.shape == local.shape[:1]):
            raise DataError(
                f"MaskedLabelPropagation expected x [N, F], y [N] and a bool mask [N] that lie alike (got "
                f"{list(x.shape)}, {list(y.shape)} and {list(train_mask.shape)} of {train_mask.dtype})"
            )
        weight = self.weight if rows is None else rows.enter(self.weight)
        embedded = mask
        if self.training:
            key = torch.arange(local.shape[0]) if rows is None else rows.key
            drawn = ops.keyed_uniform(key, 1, draw_seed()).view(-1).to(mask.device)
            embedded = mask & (drawn < self.rate)
            mask = mask & ~embedded
        nodes = embedded.nonzero().view(-1)
        added = F.embedding(labels[nodes].long(), weight).to(local.dtype)
        out = local.index_add(0, nodes, added)
        if rows is None:
            return out, mask
        return NodeTensor.from_local(out, rows), NodeTensor.from_local(mask, rows)

    def extra_repr(self) -> str:
        """The options."""
        return f"{self.num_classes}, {self.channels}, rate={self.rate}"
