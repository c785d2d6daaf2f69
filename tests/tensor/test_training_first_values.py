"""Ranks that seed differently, or load different files, still train one model: first values come from rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import NUM_CLASSES, NUM_FEATURES, NUM_NODES, Net, sides
from bits import assert_same_bits
from torch import Tensor, nn
from workers import Pools

import pyg_dist

Values = dict[str, Tensor]


class Buffered(Net):
    """Buffers and parameters at the root, of several dtypes, and a shared and a frozen one."""

    def __init__(self, side: Any, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(side)
        self.register_buffer("scale", torch.rand(NUM_CLASSES, dtype=torch.float64))
        self.register_buffer("enabled", torch.rand(NUM_CLASSES) < 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.gate = nn.Parameter(torch.randn(NUM_FEATURES, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(NUM_CLASSES, dtype=torch.float64), requires_grad=False)
        self.shared = self.first.lin_r
        self.lazy = nn.LazyLinear(3).double()
        self.norm.running_mean.add_(seed)
        self.norm.running_var.mul_(seed + 1)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out = super().forward(x * self.gate.sigmoid(), edge_index) * self.scale + self.frozen
        return torch.cat([out * self.enabled, self.lazy(out)], dim=-1)


class Scaled(nn.Module):
    """A number first, and rows by keyword."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, factor: float, x: Tensor, edge_index: Any) -> Tensor:
        return factor * self.net(1.0 * x, edge_index)  # type: ignore[no-any-return]


def trained(rank_seeds: bool, call: str) -> tuple[Values, Values]:
    """State before the first forward and after a step, of a model that each rank has seeded by itself."""
    _, ours = sides()
    seed = 10 + pyg_dist.rank() if rank_seeds else 10
    net, data = Buffered(ours, seed), ours.data
    before = {k: v.clone() for k, v in net.state_dict().items() if not nn.parameter.is_lazy(v)}
    torch.manual_seed(seed)  # the lazy layer draws in the first forward
    calls: dict[str, Callable[[], Tensor]] = {
        "positions": lambda: net(data.x, data.edge_index),
        "keywords": lambda: net(x=data.x, edge_index=data.edge_index),
        "both": lambda: Scaled(net)(1.0, x=data.x, edge_index=data.edge_index),
        "sequential": lambda: nn.Sequential(nn.Identity(), Caller(net, data.edge_index))(data.x),
        "evaluated first": lambda: evaluated_first(net, data),
    }
    out = calls[call]()
    torch.manual_seed(0)
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(p.grad)
    return before, {k: v.clone() for k, v in net.state_dict().items()} | {"out": out.detach().full_tensor()}


class Caller(nn.Module):
    def __init__(self, net: nn.Module, edge_index: Any) -> None:
        super().__init__()
        self.net, self.edge_index = net, edge_index

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, self.edge_index)  # type: ignore[no-any-return]


def evaluated_first(net: nn.Module, data: Any) -> Tensor:
    net.eval()
    with torch.no_grad():
        net(data.x, data.edge_index)
    return net.train()(data.x, data.edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", ["positions", "keywords", "both", "sequential", "evaluated first"])
@pytest.mark.parametrize("world_size", [3])
def test_models_agree_though_each_rank_seeds_differently(workers: Pools, world_size: int, call: str) -> None:
    equal = workers(world_size).run(trained, False, call)
    different = workers(world_size).run(trained, True, call)
    names = different[0][0].keys()
    assert any(not torch.equal(different[0][0][n], different[1][0][n]) for n in names), "the ranks did not differ"
    for _, after in different:
        for name, value in equal[0][1].items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def used_without_module() -> list[Values]:
    """Leaves that no module owns, a parameter that is replaced, a copy, and a second model."""
    _, ours = sides()
    rank, data = pyg_dist.rank(), ours.data
    torch.manual_seed(rank)
    free = torch.randn(NUM_FEATURES, 3, dtype=torch.float64).requires_grad_()
    rows = torch.randn(NUM_NODES, 3, dtype=torch.float64).requires_grad_()
    found = [{"free": (data.x @ free + rows).detach().full_tensor(), "leaf": free.detach().clone()}]
    net = Net(ours)
    net(data.x, data.edge_index)
    net.first.lin_l.weight = nn.Parameter(torch.randn_like(net.first.lin_l.weight) + rank)
    found.append({"replaced": net(data.x, data.edge_index).detach().full_tensor()})
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(rank)
    found.append({"copied": twin(data.x, data.edge_index).detach().full_tensor()})
    conv = ours.SAGEConv(NUM_FEATURES, 2, aggr="softmax", aggr_kwargs={"learn": True}).double()
    found.append({"conv": conv(data.x, data.edge_index).detach().full_tensor(), **conv.state_dict()})
    return found


def test_what_no_module_owns_agrees(workers: Pools) -> None:
    ranks = workers(3).run(used_without_module)
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            for name, value in mine.items():
                assert_same_bits(value, theirs[name], name)


def entries_without_gradients() -> tuple[list[int], list[float]]:
    """Versions of a parameter one of whose entries is NaN, as its entries meet rows, and what comes of it."""
    _, ours = sides()
    weight = nn.Parameter(torch.tensor([2.0, float("nan")], dtype=torch.float64))
    versions, sums = [], []
    with torch.no_grad():
        for place in (0, 1, 0, 1):
            versions.append(weight._version)
            sums.append(float((weight[place] * ours.data.x).isnan().all()))
    return versions, sums


def differing_entries_without_gradients() -> list[float]:
    """An entry that each rank has drawn anew, as it meets rows."""
    _, ours = sides()
    weight = nn.Parameter(torch.rand(2, dtype=torch.float64, generator=generator_of_rank()))
    with torch.no_grad():
        return [float((weight[0] * ours.data.x).square().mean()), float(weight[0])]


def generator_of_rank() -> torch.Generator:
    return torch.Generator().manual_seed(pyg_dist.rank())


def test_entries_that_differ_become_those_of_rank_0_without_gradients(workers: Pools) -> None:
    """Else torch refuses the entry on the ranks where it was written."""
    first, second = workers(2).run(differing_entries_without_gradients)
    assert first == second


def test_values_that_are_nan_on_all_ranks_are_not_written_again(workers: Pools) -> None:
    """A view of a parameter would not be usable after it."""
    assert workers(2).run(entries_without_gradients) == [([0] * 4, [0.0, 1.0, 0.0, 1.0])] * 2
