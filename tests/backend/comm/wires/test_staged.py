"""Messages that pass host memory carry the same numbers: everything is sent that way, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from against_stock import Net, Results, Side, compare, gradients, graph, meshes
from against_stock import assert_same as assert_same_results
from torch_geometric.nn import GCNConv, SAGEConv
from workers import Pools, Workers

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.wires import factory
from pyg_dist.backend.comm.wires.wire import Carriers
from pyg_dist.backend.session import session, state
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv


@pytest.fixture(scope="module")
def staged() -> Iterator[Pools]:
    """Ranks whose groups stage everything: they read the setting when they are made."""
    pools = {size: Workers(size) for size in (2, 3)}
    with patch.dict(os.environ, PYG_DIST_STAGE="1"):
        yield pools.__getitem__
    for pool in pools.values():
        pool.close()


def script(side: Side) -> Results:
    """A step with dropout and batch norm, whose sums are small, and rows that are gathered."""
    model, x = Net(side, p=0.3), side.features()
    loss = side.loss(model(x, side.data.edge_index, side.data.edge_weight))
    loss.backward()
    return {"loss": loss, "mean": x.mean(0), "rows": x[3], **gradients(model, x=x)}


def on_parts() -> int:
    from pyg_dist.backend.comm.wires import staged

    with patch.object(staged, "_landing", wraps=staged._landing) as landings:
        compare(script)
    assert isinstance(world_group().wire(torch.zeros(1)), staged.StagedWire)
    return landings.call_count


@pytest.mark.parametrize("world_size", [3])
def test_parts(staged: Pools, world_size: int) -> None:
    assert all(staged(world_size).run(on_parts))


def quantized() -> list[Results]:
    """The same rounding whichever way messages go."""
    found = []
    for bits in (2, (16, 4)):
        data = DistributedData(graph(), partition=torch.arange(47) % 2, bits=bits)
        torch.manual_seed(1)
        conv = DistributedSAGEConv(5, 24).double(), DistributedSAGEConv(24, 4).double()
        out = conv[1](conv[0](data.x, data.edge_index), data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        found.append({"out": out.full_tensor().detach(), **gradients(conv[0]), **gradients(conv[1])})
    return found


def test_few_bits(staged: Pools, workers: Pools) -> None:
    for got, want in zip(staged(2).run(quantized), workers(2).run(quantized), strict=True):
        for one, other in zip(got, want, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


def on_meshes() -> None:
    expected = Side(graph(), SAGEConv, GCNConv, is_stock=True)
    torch.manual_seed(1)
    want = script(expected)
    for mesh in meshes(pyg_dist.world_size()):
        data = pyg_dist.DistributedData(graph(), layout="grid", mesh=mesh)
        torch.manual_seed(1)
        assert_same_results(
            script(Side(data, DistributedSAGEConv, DistributedGCNConv, is_stock=False)), want, str(mesh)
        )


def test_grid(staged: Pools) -> None:
    staged(2).run(on_meshes)


def next_session() -> list[bool]:
    """Whether groups carry rows of the CPU once they shall not, and in the session after."""
    pyg_dist.init()
    found = []
    state.current().of(Carriers).refused.add("cpu")
    found.append(bool(factory.wires_of(dist.group.WORLD)))
    session.shutdown()
    pyg_dist.init()
    found.append("cpu" in world_group().wire(torch.zeros(1)).devices)
    return found


def test_what_is_not_carried_holds_for_a_session(workers: Pools) -> None:
    assert workers(2).run(next_session) == [[False, True]] * 2
