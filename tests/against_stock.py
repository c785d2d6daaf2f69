"""A training script run twice in one process: on PyG's ``Data`` and convs, and on ``DistributedData`` and ours.

What it returns (outputs, losses, gradients, by name) must be the same. The ranks are uneven on purpose: with three or
more, rank 1 owns no rows, and with two or more the last rank alone has training nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

NUM_NODES = 47
NUM_FEATURES = 5
NUM_CLASSES = 4

Results = dict[str, Any]


class Side(NamedTuple):
    """What a script is given: a graph, and what it imports."""

    data: Any
    SAGEConv: Any
    GCNConv: Any
    is_stock: bool

    def features(self) -> Tensor:
        """A leaf with the features, which wants its gradient."""
        return self.data.x.detach().clone().requires_grad_()  # type: ignore[no-any-return]

    def loss(self, out: Tensor, mask: str = "train_mask") -> Tensor:
        return F.cross_entropy(out[self.data[mask]], self.data.y[self.data[mask]])

    def dropout(self, x: Tensor, p: float = 0.4) -> Tensor:
        """Dropout that draws on the stock side what ours draws: there, PyG's nodes are keyed by their number."""
        if not self.is_stock:
            return F.dropout(x, p)
        from pyg_dist.backend import ops
        from pyg_dist.tensor.functions.random import draw_seed

        return ops.keyed_dropout(x, torch.arange(x.shape[0]), p, draw_seed())


Script = Callable[[Side], Results]


class Net(nn.Module):
    """SAGE, batch norm, dropout, GCN. Without kinks: rounding must not decide on a gradient."""

    def __init__(self, side: Side, hidden: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.side, self.p = side, p
        self.first = side.SAGEConv(NUM_FEATURES, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.second = side.GCNConv(hidden, NUM_CLASSES)
        self.to(side.data.x.dtype)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        x = self.norm(self.first(x, edge_index)).tanh()
        if self.p and self.training:
            x = self.side.dropout(x, self.p)
        return self.second(x, edge_index, edge_weight)  # type: ignore[no-any-return]


def gradients(model: nn.Module, **tensors: Tensor) -> Results:
    """Every gradient (``None`` where there is none) and every buffer of ``model``, and the gradients of ``tensors``."""
    found = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    found |= {f"{name}.grad": tensor.grad for name, tensor in tensors.items()}
    return {name: None if value is None else value.clone() for name, value in found.items()}


def graph(dtype: torch.dtype = torch.float64) -> Data:
    """The graph of every script, with a second mask that shares no node with the training nodes."""
    data = random_graph(NUM_NODES, 310, NUM_FEATURES, NUM_CLASSES, seed=11, dtype=dtype)
    data.other_mask = ~data.train_mask & (torch.arange(NUM_NODES) % 3 == 0)
    return data


def parts(data: Data, world_size: int) -> Tensor:
    """Owners: see the module."""
    owners = torch.tensor([rank for rank in range(world_size) if rank != 1 or world_size < 3])
    drawn = owners[torch.randint(0, len(owners), (data.num_nodes,), generator=torch.Generator().manual_seed(7))]
    return torch.where(data.train_mask, owners[-1], drawn)


def sides(dtype: torch.dtype = torch.float64) -> tuple[Side, Side]:
    """PyG's side and ours."""
    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

    data = graph(dtype)
    distributed = pyg_dist.DistributedData(data, partition=parts(data, pyg_dist.world_size()))
    if pyg_dist.world_size() == 3:
        num_rows, num_training = distributed.x.to_local().shape[0], int(distributed.train_mask.to_local().sum())
        assert (num_rows > 0, num_training > 0) == [(True, False), (False, False), (True, True)][pyg_dist.rank()]
    return (
        Side(data, SAGEConv, GCNConv, is_stock=True),
        Side(distributed, DistributedSAGEConv, DistributedGCNConv, is_stock=False),
    )


def compare(script: Script, dtype: torch.dtype = torch.float64) -> None:
    """Run ``script`` on both sides and compare everything that it returns. Runs on ranks."""
    stock, ours = sides(dtype)
    torch.manual_seed(1)
    expected = script(stock)
    torch.manual_seed(1)
    assert_same(script(ours), expected)


def assert_same(got: Results, expected: Results) -> None:
    """The same names and values: 1e-10 elementwise in float64, max|a - b| <= 1e-4 max|b| + 1e-5 in float32."""
    assert expected, "a script that returns nothing shows nothing"
    assert got.keys() == expected.keys(), f"got {list(got)}, expected {list(expected)}"
    for name, want in expected.items():
        have = got[name].full_tensor() if hasattr(got[name], "full_tensor") else got[name]
        if not isinstance(want, Tensor):
            assert have == want, f"{name} is {have}, expected {want}"
            continue
        assert isinstance(have, Tensor), f"{name} is {have!r}, expected a tensor"
        assert have.shape == want.shape, f"{name} has shape {list(have.shape)}, expected {list(want.shape)}"
        assert have.dtype == want.dtype, f"{name} is {have.dtype}, expected {want.dtype}"
        error = (have.double() - want.double()).abs().max().item() if want.numel() else 0.0
        bound = 1e-10 if want.dtype != torch.float32 else 1e-4 * want.abs().max().item() + 1e-5
        assert error <= bound, f"{name} is off by {error:.2e}, allowed {bound:.2e}"  # so that NaN fails
