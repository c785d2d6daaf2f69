"""A training script run twice in one process: on PyG's ``Data`` and convs, and on ``DistributedData`` and ours.

What it returns (outputs, losses, gradients, by name) must be the same. The ranks are uneven on purpose: with three or
more, rank 1 owns no rows, and with two or more the last rank alone has training nodes.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import ARMAConv, ChebConv, GCNConv, GraphConv, SAGEConv, SGConv, TAGConv

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import world_group
from pyg_dist.conv import DistributedConv, DistributedGCNConv, DistributedSAGEConv
from pyg_dist.grid.plan import node_order

NUM_NODES = 47
NUM_FEATURES = 5
NUM_CLASSES = 4

Results = dict[str, Any]
T = TypeVar("T")


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
    data = graph(dtype)
    distributed = pyg_dist.DistributedData(data, partition=parts(data, pyg_dist.world_size()))
    if pyg_dist.world_size() == 3:
        num_rows, num_training = distributed.x.to_local().shape[0], int(distributed.train_mask.to_local().sum())
        assert (num_rows > 0, num_training > 0) == [(True, False), (False, False), (True, True)][pyg_dist.rank()]
    return (
        Side(data, SAGEConv, GCNConv, is_stock=True),
        Side(distributed, DistributedSAGEConv, DistributedGCNConv, is_stock=False),
    )


def of_first_rank(make: Callable[[], T]) -> T:
    """What stock PyG makes, which every rank would make alike: the first rank makes it for all (collective)."""
    world = world_group()
    made = make() if world.rank == 0 else None
    found: T = pickle.loads(world.gather_bytes(pickle.dumps(made))[0])
    return found


def compare(script: Script, dtype: torch.dtype = torch.float64) -> None:
    """Run ``script`` on both sides and compare everything that it returns. Runs on ranks."""
    stock, ours = sides(dtype)
    torch.manual_seed(1)
    expected = of_first_rank(lambda: script(stock))
    torch.manual_seed(1)
    assert_same(script(ours), expected)


def convs(kind: str) -> tuple[Any, Any]:
    """PyG's class and ours."""
    own: dict[str, tuple[Any, Any]] = {"sage": (SAGEConv, DistributedSAGEConv), "gcn": (GCNConv, DistributedGCNConv)}
    if kind in own:
        return own[kind]
    stock: Any = {"graph": GraphConv, "tag": TAGConv, "sg": SGConv, "cheb": ChebConv, "arma": ARMAConv}[kind]
    return stock, lambda *channels, **options: DistributedConv(stock(*channels, **options))


def twins(kind: str, *channels: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """A stock conv and ours with the same weights."""
    stock, ours = (conv(*channels, **copy.deepcopy(options)).to(dtype) for conv in convs(kind))
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def meshes(num_ranks: int) -> list[dict[str, int]]:
    """All meshes of so many ranks."""
    from pyg_dist.grid.plan.mesh_shape import meshes

    return [{"x": m.x, "y": m.y, "z": m.z} for m in meshes(num_ranks)]


def whole(results: Results) -> Results:
    """Every tensor with all rows, on every rank, detached. Collective."""
    found = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in results.items()}
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in found.items()}


def differences(got: Results, expected: Results) -> list[str]:
    """A line for each value that is another than expected; what counts as the same says :func:`assert_same`."""
    assert expected, "a script that returns nothing shows nothing"
    got, expected = whole(got), whole(expected)
    lines = [] if got.keys() == expected.keys() else [f"got {list(got)}, expected {list(expected)}"]
    for name in expected:
        lines += _difference(name, got[name], expected[name]) if name in got else []
    return lines


def _difference(name: str, have: Any, want: Any) -> list[str]:
    if not (isinstance(want, Tensor) and isinstance(have, Tensor)):
        is_same = type(have) is type(want) and have == want
        return [] if is_same else [f"{name} is {have!r}, expected {want!r}"]
    if (have.shape, have.dtype) != (want.shape, want.dtype):
        return [f"{name} is {have.dtype} {list(have.shape)}, expected {want.dtype} {list(want.shape)}"]
    error, size = (have.double() - want.double()).abs(), want.double().abs()
    is_narrow = want.dtype == torch.float32
    bound = (1e-4 * size.max() + 1e-5 if is_narrow and size.numel() else 1e-10 * (1 + size)).expand_as(size)
    if bool((error <= bound).all()):  # so that NaN fails
        return []
    return [f"{name} is off by {float(error.max()):.2e}, allowed {float(bound.max()):.2e}"]


def assert_same(got: Results, expected: Results, what: str = "") -> None:
    """The same names and values: |a - b| <= 1e-10 (1 + |b|) in float64, max|a - b| <= 1e-4 max|b| + 1e-5 in float32."""
    lines = differences(got, expected)
    assert not lines, f"{what}: {'; '.join(lines)}"


@patch.dict(os.environ)  # what is set ends with the body
def compare_on_meshes(
    graph: Data, shapes: list[dict[str, int]], run: Callable[[Any, int], Results], expected: list[Results], stride: int
) -> None:
    """On every rank, for every mesh and form of the sums: every ``stride``-th case, another first one each time.

    Args:
        graph: of all cases.
        shapes: the meshes.
        run: a case, by its number, on a ``DistributedData``.
        expected: of each case.
        stride: see above.
    """
    for turn, mesh in enumerate(shapes):
        # One order (that of the input) every third time; else what balance asks for.
        imbalance = 1e9 if turn % 3 == 2 else node_order.GOOD_IMBALANCE
        os.environ["PYG_DIST_GRID_BLOCKS"] = str(1 + turn % 3)
        for form, sums in enumerate(("reduce_scatter", "all_reduce")):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            with patch.object(node_order, "GOOD_IMBALANCE", imbalance):
                data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
            for number in range((2 * turn + form) % stride, len(expected), stride):
                assert_same(run(data, number), expected[number], f"{mesh} {sums}, case {number}")


class Pair:
    """A stock conv on a whole graph and ours on the distributed one, with the same weights."""

    def __init__(
        self, kind: str, channels: tuple[int, int], options: dict[str, Any] | None = None, **layout: Any
    ) -> None:
        self.graph = random_graph(61, 400, num_features=channels[0], seed=3)
        self.data: Any = DistributedData(self.graph, **layout)
        self.stock, self.ours = twins(kind, *channels, **(options or {}))

    def run(self, x: Any = None, want: Any = None, *weight: Any, grad: bool = True) -> Callable[[], None]:
        """Run ours, forward and backward; what is returned runs the stock conv and compares."""
        x, want = (self.data.x, self.graph.x) if x is None else (x, want)

        def results(conv: nn.Module, x: Tensor, edge_index: Any, weight: list[Tensor]) -> Results:
            with torch.set_grad_enabled(grad):
                out = conv(x, edge_index, *weight)
                if grad:  # of ours no sum over ranks, whose message would be counted
                    (out.to_local() if hasattr(out, "to_local") else out).square().sum().backward()
            return {"out": out.detach(), **gradients(conv)}

        got = results(self.ours, x, self.data.edge_index, list(weight))

        def compare() -> None:
            plain = [w.view(-1) for w in whole({str(k): w for k, w in enumerate(weight)}).values()]
            assert_same(got, results(self.stock, want, self.graph.edge_index, plain))

        return compare
