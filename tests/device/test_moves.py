"""What moves to a device: data and batches there and back, random numbers, errors that it finds, mixed devices."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_device
import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same, gradients
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.nn import MessagePassing
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend import timing
from pyg_dist.backend.on_device import CopiedToDevices
from pyg_dist.backend.ops import late_errors
from pyg_dist.backend.session import session
from pyg_dist.backend.session.session import shutdown
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.conv.message_blocks import _Call
from pyg_dist.errors import DataError, LayoutMismatchError
from pyg_dist.loader import LinkNeighborLoader, NeighborLoader, UniformVertexLoader
from pyg_dist.tensor.functions.random import own_randomness

LAYOUTS = ["halo", "grid"]


def graph() -> Any:
    return random_graph(61, 400, num_features=20, seed=3)


def products(data: Any, conv: torch.nn.Module, *weight: Any) -> dict[str, Any]:
    out = conv(data.x, data.edge_index, *weight)
    conv.zero_grad()
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    return {name: None if x is None else x.cpu() for name, x in {"out": out.detach(), **gradients(conv)}.items()}


def move_there_and_back(library: Path, layout: str) -> None:
    device = fake_device.load(library)
    plain = graph()
    data: Any = DistributedData(plain, layout=layout)
    torch.manual_seed(0)
    conv = DistributedGCNConv(20, 4).double()
    drawn = torch.randint(0, 61, (2, 90))
    expected = products(data, conv, data.edge_weight), conv(data.x, drawn).detach()
    edges, source = data.edge_index.full_tensor(), data.edge_index[0].full_tensor()
    for place in (device, torch.device("cpu"), device):
        assert data.to(place) is data
        conv.to(place)
        assert {data.x.device, data.edge_weight.device, data.edge_index.device, data.graph.device} == {place}
        assert_same(products(data, conv, data.edge_weight), expected[0], str(place))
        assert_same({"drawn": conv(data.x, drawn.to(place)).detach().cpu()}, {"drawn": expected[1]})
        assert torch.equal(data.edge_index.full_tensor().cpu(), edges)
        assert torch.equal(data.edge_index[0].full_tensor().cpu(), source)
        assert data.x[[5, 3]].full_tensor().device == place
        pairs = data.x[torch.arange(61, device=place), torch.arange(61, device=place) % 20]
        assert torch.equal(pairs.full_tensor().cpu(), plain.x[torch.arange(61), torch.arange(61) % 20])
        data.x[data.train_mask] = data.x[data.train_mask]
        data.x[torch.arange(0, 61, 7, device=place)] = data.x[torch.arange(0, 61, 7)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_moves_there_and_back(pools: Pools, library: Path, world_size: int, layout: str) -> None:
    pools(world_size).run(move_there_and_back, library, layout)


@pytest.mark.parametrize(("given", "expected"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_a_graph_knows_the_number_of_its_gpu(given: str, expected: str) -> None:
    """The loader's thread has another current one."""

    class Moved(CopiedToDevices):
        device, _elsewhere = torch.device("meta"), {}

        def _build_on(self, device: torch.device) -> None:
            self.device = device

    with patch.object(torch.cuda, "current_device", return_value=3):
        assert str(Moved().to(given).device) == expected


def give_there(library: Path, layout: str, is_sparse: bool) -> None:
    device = fake_device.load(library)
    found = []
    for place in (torch.device("cpu"), device):
        given = graph()
        if is_sparse:
            given.adj_t = torch.sparse_coo_tensor(given.edge_index.flip(0), given.edge_weight, (61, 61))
            del given.edge_index, given.edge_weight, given.edge_attr
        for name, value in list(given):
            if name != "adj_t":  # which has no form on this device
                given[name] = value.to(place)
        data: Any = DistributedData(given, layout=layout)
        edges = data.adj_t if is_sparse else data.edge_index
        assert is_sparse or edges.max().device == place
        lying = {name: value.device for name, value in data if isinstance(value, Tensor)}
        assert {edges.device, data.graph.device, *lying.values()} == {place}, lying
        torch.manual_seed(0)
        conv = DistributedGCNConv(20, 4).double().to(place)
        weight = () if is_sparse else (data.edge_weight,)
        out = conv(data.x, edges, *weight)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        found.append({name: x.detach().cpu() for name, x in {"out": out, **gradients(conv)}.items()})
    assert_same(found[1], found[0])


@pytest.mark.parametrize(("layout", "is_sparse"), [("halo", False), ("grid", False), ("halo", True)])
def test_a_graph_that_is_given_there_trains_there(pools: Pools, library: Path, layout: str, is_sparse: bool) -> None:
    pools(2).run(give_there, library, layout, is_sparse)


def train_on_batches(library: Path, layout: str, moves_data: bool) -> None:
    device = fake_device.load(library)
    found: list[dict[str, Any]] = []
    for place in (torch.device("cpu"), device):
        data: Any = DistributedData(graph(), layout=layout)
        loader = UniformVertexLoader(data, 30, num_steps=2, seed=1)
        if moves_data:
            data.to(place)
        torch.manual_seed(0)
        convs = DistributedGCNConv(20, 4).double().to(place), DistributedSAGEConv(20, 4).double().to(place)
        results: dict[str, Any] = {}
        for step, batch in enumerate(loader):
            assert not moves_data or batch.x.device == place
            batch = batch.to(place)
            assert {batch.x.device, batch.n_id.device, batch.edge_index.device} == {place}
            for conv in convs:
                got = products(batch, conv)
                results |= {f"{step} {type(conv).__name__} {name}": value for name, value in got.items()}
            if moves_data:
                results[f"{step} weights"] = products(batch, convs[0], batch.edge_weight)["out"]
                results[f"{step} rows"] = data.x[batch.n_id].full_tensor().cpu()
        found.append(results)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("moves_data", [True, False], ids=["data", "batches"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_data_there_and_batches_that_are_moved(
    pools: Pools, library: Path, layout: str, moves_data: bool
) -> None:
    pools(2).run(train_on_batches, library, layout, moves_data)


def label_edges(library: Path, moves_data: bool) -> None:
    """On batches around edges, of one type and of several, that lie on the device or are moved there."""
    from torch_geometric.data import HeteroData

    device = fake_device.load(library)
    plain, typed = graph(), HeteroData()
    typed["node"].x, relation = plain.x, ("node", "to", "node")
    typed[relation].edge_index = plain.edge_index
    pairs = plain.edge_index[:, :12]
    for given, edges in ((plain, pairs), (typed, (relation, pairs))):
        found = []
        for place in (torch.device("cpu"), device):
            data: Any = DistributedData(given, partition="random").to(place if moves_data else "cpu")
            loader = LinkNeighborLoader(data, [3], batch_size=8, edge_label_index=edges, neg_sampling="binary")
            batch: Any = next(iter(loader)).to(place)
            store = batch if given is plain else batch[relation]
            x = batch.x if given is plain else batch["node"].x
            assert {store.edge_label.device, store.edge_label_index.device, store.input_id.device} == {place}
            source, target = store.edge_label_index
            logits = (x[source] * x[target]).sum(-1)
            loss = F.binary_cross_entropy_with_logits(logits, store.edge_label.to(logits.dtype))
            found.append({"loss": loss.cpu()})
        assert_same(found[1], found[0])


@pytest.mark.parametrize("moves_data", [True, False], ids=["data", "batches"])
def test_labels_of_edges_lie_where_their_batch_does(pools: Pools, library: Path, moves_data: bool) -> None:
    pools(2).run(label_edges, library, moves_data)


def train_by_default(library: Path, layout: str) -> None:
    """A script that makes the device torch's default: plans stay on the host, and numbers are the CPU's."""
    device, found = fake_device.load(library), []
    for place in (torch.device("cpu"), device):
        plain = graph().to(place)
        torch.set_default_device(place)
        try:
            data: Any = DistributedData(plain, layout=layout, **({} if layout == "grid" else {"partition": "random"}))
            with torch.device("cpu"):
                torch.manual_seed(0)
                conv = DistributedSAGEConv(20, 4).double()
            results = products(data, conv.to(place))
            assert data.x.device == place
            results["listed"] = data.x[[5, 3]].full_tensor().cpu()
            results["picked"] = data.x[torch.arange(0, 61, 7)].sum().cpu()
            loaders = UniformVertexLoader(data, 30, num_steps=2), NeighborLoader(data, [3, 2], batch_size=20)
            for loader in loaders:
                for step, batch in enumerate(loader):
                    results[f"{type(loader).__name__} {step}"] = conv(batch.x, batch.edge_index).sum().detach().cpu()
        finally:
            torch.set_default_device(None)
        found.append(results)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_default_device_is_the_scripts(pools: Pools, library: Path, layout: str) -> None:
    pools(2).run(train_by_default, library, layout)


def draw_there(library: Path) -> list[Tensor]:
    """What this rank draws after code that draws for its own rows: on the CPU, there, and of rows."""
    device = fake_device.load(library)
    session.shutdown()
    rank = pyg_dist.rank()
    torch.fake.set_rng_state(torch.Generator().manual_seed(rank).get_state())  # type: ignore[attr-defined]
    pyg_dist.init()
    drawn = [torch.rand(3, device=device)]  # those that init has found to differ
    with own_randomness(rank, device):
        mine = torch.rand(2 + rank, device=device)
    drawn += [torch.rand(3, device=device), torch.rand(3)]
    state = torch.fake.get_rng_state()  # type: ignore[attr-defined]
    with own_randomness(rank, device):
        pass
    assert torch.equal(torch.fake.get_rng_state(), state)  # type: ignore[attr-defined]
    data: Any = DistributedData(graph()).to(device)
    drawn += [torch.rand_like(data.x).full_tensor(), mine[:2]]
    return [x.cpu() for x in drawn]


def test_replicated_draws_stay_alike(pools: Pools, library: Path) -> None:
    first, second = pools(2).run(draw_there, library)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 4 + [False]


def send_what_cannot_be(library: Path, value: float) -> str:
    device = fake_device.load(library)
    data: Any = DistributedData(graph(), partition=torch.arange(61) % 2, bits=2, exchange="post").to(device)
    conv = DistributedSAGEConv(20, 20).double().to(device)
    x = data.x * 1.0
    x.to_local()[data.graph.node_sharding.global_id.to(device) // 2 == 5] = value
    conv(x, data.edge_index)  # nobody waits for what the device finds
    with pytest.raises(DataError) as caught:
        conv(data.x * 1.0, data.edge_index)
    return str(caught.value)


def test_what_a_device_finds_is_raised_in_the_next_step(pools: Pools, library: Path) -> None:
    for rank, line in enumerate(pools(2).run(send_what_cannot_be, library, float("nan"))):
        assert "in the messages of SAGEConv(20, 20, aggr=mean), which go in 2 bits" in line
        assert f"at node {10 + rank}" in line


def watch_in_a_capture(library: Path) -> list[str]:
    """What is raised of rows that a device refuses before, in and after the capture of a CUDA graph."""
    found, raised = torch.tensor([3], device=fake_device.load(library)), []
    with patch("torch.cuda.is_initialized", return_value=True):
        for step, is_captured in enumerate((False, True, False, False)):
            with patch("torch.cuda.is_current_stream_capturing", return_value=is_captured):
                try:
                    refused = found if step < 2 else -found
                    late_errors.raise_later(refused, lambda row, step=step: DataError(f"{step} {row}"))
                except DataError as error:
                    raised.append(f"in step {step}: {error}")
    late_errors.raise_found()
    return raised


def test_nothing_is_watched_while_a_graph_is_captured(pools: Pools, library: Path) -> None:
    assert pools(1).run(watch_in_a_capture, library) == [["in step 2: 0 3"]]


def phases(library: Path) -> list[Counter[str]]:
    found = []
    for place in (torch.device("cpu"), fake_device.load(library)):
        data: Any = DistributedData(graph(), partition=torch.arange(61) % 2).to(place)
        conv = DistributedGCNConv(20, 30).double().to(place)
        x = (data.x * 1.0).requires_grad_()
        conv(x, data.edge_index)
        recorder = timing.Recorder(overlaps=True)
        timing.record(recorder)
        try:
            conv(x, data.edge_index).sum().backward()
        finally:
            timing.record(None)
        found.append(Counter(timing.PHASES[span.phase] for span in recorder.end()[1]))
    return found


def test_phases_of_a_backward_on_a_device_are_told(pools: Pools, library: Path) -> None:
    """It runs in another thread. Exchanges count copies, too: those before and after a message."""
    for on_cpu, there in pools(2).run(phases, library):
        assert on_cpu["aggregate"] == there["aggregate"] == 2
        assert on_cpu["pack"] == there["pack"] == 2
        assert on_cpu.keys() == there.keys()


def mix(library: Path, layout: str) -> str:
    device = fake_device.load(library)
    data: Any = DistributedData(graph(), layout=layout)
    x = data.x
    data.to(device)
    with pytest.raises(LayoutMismatchError) as caught:
        DistributedSAGEConv(20, 4).double()(x, data.edge_index)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_devices_are_named(pools: Pools, library: Path, layout: str) -> None:
    for line in pools(2).run(mix, library, layout):
        assert "expected features on fake:0, where the edges are (got them on cpu)" in line


class Masked(MessagePassing):
    """Sums of rows of which half are dropped, as torch's generator of the device draws."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * (torch.rand(x_j.shape, device=x_j.device) > 0.5)


def draw_in_messages(library: Path) -> None:
    data: Any = pyg_dist.DistributedData(graph(), partition=torch.arange(61) % 2).to(fake_device.load(library))
    conv = pyg_dist.conv.DistributedConv(Masked())
    x = data.x.detach().clone().requires_grad_()
    by_blocks = patch.object(_Call, "run", autospec=True, side_effect=_Call.run)
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.002"}), by_blocks as seen:
        total = conv(x, data.edge_index).sum()
        total.backward()
    assert seen.call_count > 0
    # A linear map, so <x, its gradient> is the sum: if the backward draws what the forward drew.
    torch.testing.assert_close((x.detach() * x.grad).sum(), total.detach())


def test_blocks_of_messages_draw_alike_there_forward_and_backward(pools: Pools, library: Path) -> None:
    pools(2).run(draw_in_messages, library)


def find_at_last(library: Path, is_read: bool) -> str:
    """What the last op of a run has found, where values are read then, or the run ends."""
    device = fake_device.load(library)
    data: Any = DistributedData(graph()).to(device)
    late_errors.raise_later(torch.tensor([3], device=device), lambda row: DataError(f"row {row}"))
    with pytest.raises(DataError) as caught:
        data.y.tolist() if is_read else shutdown()
    shutdown()
    return str(caught.value)


@pytest.mark.parametrize("is_read", [True, False], ids=["values read", "the end"])
def test_what_the_last_op_finds_is_raised(pools: Pools, library: Path, is_read: bool) -> None:
    assert pools(1).run(find_at_last, library, is_read) == ["row 3"]
