"""Methods of convs beside forward: a conv that ``distribute`` has changed does what the stock conv does, once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from test_any_conv import CASES, NUM_NODES, F, G, arguments, graph, mlp
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import on_ranks

import pyg_dist

# No test compares what these compute.
MORE: dict[str, Callable[[], nn.Module]] = {
    "HEAT": lambda: gnn.HEATConv(F, G, 2, 3, 5, 3, 5),
    "PAN": lambda: gnn.PANConv(F, G, 2),
    "PointGNN": lambda: gnn.PointGNNConv(mlp(F, 3), mlp(F + 3, G), mlp(G, F)),
    "ARMA": lambda: gnn.ARMAConv(F, G),
}
MAKERS = {name: case.make for name, case in CASES.items()} | MORE


def _convs(name: str) -> tuple[nn.Module, nn.Module]:
    """The stock module, and a copy of it through ``distribute``."""
    torch.manual_seed(0)
    stock = MAKERS[name]()
    return stock, pyg_dist.distribute(copy.deepcopy(stock))


@pytest.mark.parametrize("name", MAKERS)
def test_reset_parameters_draws_as_stock(name: str) -> None:
    draws = []
    for module in _convs(name):
        torch.manual_seed(2)
        for part in module.modules():
            if isinstance(part, gnn.MessagePassing):
                part.reset_parameters()
        draws.append((module.state_dict(), torch.get_rng_state()))
    (expected, state), (got, own_state) = draws
    assert torch.equal(state, own_state)
    assert [*expected] == [*got]
    lazy = torch.nn.parameter.UninitializedParameter
    for key, value in expected.items():  # RGATConv never fills its l2, which may thus have NaN
        assert isinstance(value, lazy) or torch.allclose(value, got[key], rtol=0, atol=0, equal_nan=True), key


@pytest.mark.parametrize("name", MAKERS)
def test_what_convs_say_of_themselves(name: str) -> None:
    stock, ours = _convs(name)
    assert repr(ours) == repr(stock)
    assert [*ours.state_dict()] == [*stock.state_dict()]
    assert ours.eval().training is False
    assert isinstance(ours, type(stock))


HOOKS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


def _count_hooks(data: Any, name: str, module: nn.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in module.modules():
        if isinstance(part, gnn.MessagePassing):
            for step in HOOKS:
                for kind in (f"{step}_forward_pre", f"{step}_forward"):
                    register = getattr(part, f"register_{kind}_hook")
                    register(lambda *_, kind=kind: counts.update([kind]))
    module(*arguments(data, CASES[name].inputs)[0])
    return counts


@on_ranks(1)
def test_hooks_are_called_as_often() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data)
    for name in CASES:
        stock, distributed = _convs(name)
        if any(isinstance(part, (gnn.SAGEConv, gnn.GCNConv, gnn.ARMAConv)) for part in stock.modules()):
            continue  # these refuse hooks on their steps
        expected = _count_hooks(data, name, stock.double())
        assert _count_hooks(ours, name, distributed.double()) == expected, name
        assert expected["propagate_forward"] > 0


class Chain(gnn.GATConv):
    """A class of a script's that goes on where PyG's ends, in each method that it may, and counts."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls["__init__"] += 1
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        self.calls["reset_parameters"] += 1
        super().reset_parameters()

    def extra_repr(self) -> str:
        self.calls["extra_repr"] += 1
        return f"chain {super().extra_repr()}"

    def train(self, mode: bool = True) -> Any:
        self.calls["train"] += 1
        return super().train(mode)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        self.calls["message"] += 1
        return 2 * super().message(x_j, alpha)

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: int | None = None) -> Tensor:
        self.calls["aggregate"] += 1
        return 3 * super().aggregate(inputs, index, ptr, dim_size)

    def update(self, inputs: Tensor) -> Tensor:
        self.calls["update"] += 1
        return super().update(inputs) + 1

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        self.calls["forward"] += 1
        return super().forward(x, edge_index)  # type: ignore[no-any-return]


@on_ranks(1)
def test_every_method_of_a_chain_runs_once() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data)
    torch.manual_seed(3)
    stock = Chain(F, G, heads=2).double()
    conv = pyg_dist.distribute(copy.deepcopy(stock))

    def use(made: Any, graph: Any) -> tuple[Any, Counter[str]]:
        Chain.calls.clear()
        torch.manual_seed(4)
        made.reset_parameters()
        out = made.eval()(graph.x, graph.edge_index)
        return (out.detach(), repr(made)), Counter(Chain.calls)

    (expected, words), calls = use(stock, data)
    assert expected.shape[0] == NUM_NODES
    for graph_given in (data, ours):
        (out, own_words), own_calls = use(conv, graph_given)
        assert own_calls == calls
        assert own_words == words
        full = out.full_tensor() if graph_given is ours else out
        torch.testing.assert_close(full, expected)
    Chain.calls.clear()
    torch.manual_seed(5)
    again = type(conv)(F, G, heads=2)
    assert Chain.calls == {"__init__": 1, "reset_parameters": 1}
    torch.manual_seed(5)
    assert torch.equal(again.lin.weight, Chain(F, G, heads=2).lin.weight)
