"""Messages fly while local edges are multiplied, and each is added when it has arrived, always in the same order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from workers import on_ranks

import pyg_dist
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import PHASES
from pyg_dist.conv import DistributedSAGEConv

NUM_NODES, NUM_RANKS = 60, 5


def chain() -> tuple[Data, Tensor]:
    """A graph in which each part has edges to and from the next one only: messages, not an all-to-all."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, NUM_NODES, (900,), generator=generator)
    step = torch.randint(-12, 13, (900,), generator=generator)
    edge_index = torch.stack([source, (source + step) % NUM_NODES])
    parts = torch.arange(NUM_NODES) // (NUM_NODES // NUM_RANKS)
    near = (parts[edge_index[0]] - parts[edge_index[1]]).abs() <= 1
    x = torch.randn(NUM_NODES, 9, generator=generator)
    return Data(x=x, edge_index=edge_index[:, near]), parts


@on_ranks(NUM_RANKS)
@pytest.mark.parametrize("exchange", ["post", "pre", "hybrid"])
def test_messages_are_added_one_by_one(world_size: int, exchange: Any) -> None:
    torch.manual_seed(0)
    graph, parts = chain()
    data = pyg_dist.DistributedData(graph, partition=parts, exchange=exchange)
    assert not data.plan.is_dense
    stock, ours = SAGEConv(9, 30), DistributedSAGEConv(9, 30)
    stock.load_state_dict(ours.state_dict())

    def results(conv: Any, data: Any, late: int) -> list[Tensor]:
        x = data.x.clone().requires_grad_()
        if pyg_dist.rank() == late:
            time.sleep(0.05)
        out = conv(x, data.edge_index)
        if pyg_dist.rank() == (late + 2) % world_size:
            time.sleep(0.05)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return [out.detach(), grad]

    expected = results(stock, graph, -1)
    first = [t.to_local() for t in results(ours, data, 0)]
    with pyg_dist.profile() as found:
        again = results(ours, data, 3)
    for ours_once, ours_again, theirs in zip(first, again, expected, strict=True):
        assert_same_bits(ours_again.to_local(), ours_once, "sums depend on who came first")
        torch.testing.assert_close(ours_again.full_tensor(), theirs, rtol=1e-4, atol=1e-5)

    num_neighbours = len(data.graph.row_transfer.exchange.arrivals)
    named = [PHASES[s.phase] for s in found.spans[pyg_dist.rank()]]
    flights = [name for name in named if name in ("pack", "exchange", "aggregate", "unpack")]
    once = ["pack", "exchange", "aggregate", *num_neighbours * ["exchange", "unpack"], "exchange"]
    assert flights == 2 * once, "forward and backward: sent before, received after the local product, one by one"


def test_columns_of_a_pattern() -> None:
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, 8, (50,), generator=generator), torch.randint(0, 10, (50,), generator=generator)
    whole = CSR.from_edges(row, col, torch.arange(50), 8, 10)
    x = torch.randn(10, 3, generator=generator)
    for low, high in ((0, 10), (0, 4), (4, 10), (5, 5)):
        part = whole.columns(low, high)
        assert (part.num_rows, part.num_cols) == (8, high - low)
        kept = (col[part.edge] >= low) & (col[part.edge] < high)
        assert bool(kept.all())
        assert part.num_entries == int(((col >= low) & (col < high)).sum())
        assert torch.equal(part.row(), row[part.edge])
        dense = torch.zeros(8, 10).index_put_((row, col), torch.ones(50), accumulate=True)[:, low:high]
        ours = torch.zeros(8, 3).index_add_(0, part.row(), x[low:high][part.col.long()])
        torch.testing.assert_close(ours, dense @ x[low:high])
