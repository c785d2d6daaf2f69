"""The models of the training benchmarks, with stock convs and with distributed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from pyg_dist import distribute
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.nn import NormReLUDropout


class Model(torch.nn.Module):
    """Norm, ReLU and dropout between convs: as a stock script writes them, or ``norms`` that do all three."""

    def __init__(self, convs: list[torch.nn.Module], norms: list[torch.nn.Module], is_fused: bool) -> None:
        super().__init__()
        self.convs, self.norms, self.is_fused = torch.nn.ModuleList(convs), torch.nn.ModuleList(norms), is_fused

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edges))
            if not self.is_fused:
                x = x.relu()
                x = F.dropout(x, p=0.5, training=self.training)
        return self.convs[-1](x, edges)


def sage(in_channels: int, out_channels: int, conv: type, is_fused: bool = False) -> Model:
    """GraphSAGE, hidden 256, LayerNorm, ReLU, dropout 0.5."""
    convs = [conv(a, b) for a, b in pairwise((in_channels, 256, 256, out_channels))]
    make = partial(NormReLUDropout, 256, "layer", p=0.5) if is_fused else partial(torch.nn.LayerNorm, 256)
    return Model(convs, [make() for _ in range(2)], is_fused)


def gcn(in_channels: int, out_channels: int, conv: type, is_fused: bool = False) -> Model:
    """GCN, hidden 128, ReLU, dropout 0.5."""
    convs = [conv(a, b, cached=True) for a, b in pairwise((in_channels, 128, 128, out_channels))]
    make = partial(NormReLUDropout, 128, None, p=0.5) if is_fused else torch.nn.Identity
    return Model(convs, [make() for _ in range(2)], is_fused)


def gat(in_channels: int, out_channels: int, conv: Callable[..., torch.nn.Module], is_fused: bool = False) -> Model:
    """GAT, hidden four heads of 32, ReLU, dropout 0.5."""
    convs = [conv(in_channels, 32, heads=4), conv(128, 32, heads=4), conv(128, out_channels)]
    make = partial(NormReLUDropout, 128, None, p=0.5) if is_fused else torch.nn.Identity
    return Model(convs, [make() for _ in range(2)], is_fused)


MODELS = {
    "sage": (sage, SAGEConv, DistributedSAGEConv),
    "gcn": (gcn, GCNConv, DistributedGCNConv),
    "gat": (gat, GATConv, lambda *sizes, **options: distribute(GATConv(*sizes, **options))),
}
