"""On the grid, too, constant inputs are aggregated once: no exchange and no sparse product after the first time."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from random_graphs import random_graph
from torch_geometric.nn import GCNConv, SAGEConv
from workers import Workers

Pools = Callable[[int], Workers]


def shapes(num_ranks: int) -> list[dict[str, int]]:
    from pyg_dist.backend.grid.mesh import meshes

    return [{"x": m.x, "y": m.y, "z": m.z} for m in meshes(num_ranks)]


class Products:
    """Counts the sparse products of this rank."""

    def __init__(self) -> None:
        from pyg_dist.backend import ops

        self.ops, self.multiply, self.number = ops, ops.spmm_csr, 0

    def __enter__(self) -> Products:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return self.multiply(*args, **kwargs)

        self.ops.spmm_csr = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.ops.spmm_csr = self.multiply


class Pair:
    """A stock conv on the whole graph and ours on the grid, with equal weights."""

    def __init__(self, kind: str, channels: tuple[int, int], mesh: dict[str, int], **options: Any) -> None:
        from pyg_dist import DistributedData
        from pyg_dist import conv as ours

        self.graph = random_graph(61, 400, num_features=channels[0], seed=3)
        self.data: Any = DistributedData(self.graph, layout="grid", mesh=mesh)
        sage = kind == "sage"
        self.stock = (SAGEConv if sage else GCNConv)(*channels, **options).double()
        self.ours = (ours.DistributedSAGEConv if sage else ours.DistributedGCNConv)(*channels, **options).double()
        self.ours.load_state_dict(self.stock.state_dict())

    def aggregates(self, x: Any = None, want: Any = None, *weight: Any, grad: bool = True) -> bool:
        """Run and compare both; whether there was a sparse product, or a message other than the linear map's sums."""
        x, want = (self.data.x, self.graph.x) if x is None else (x, want)
        traffic = self.data.graph.grid.mesh.traffic
        for counter in traffic.values():
            counter.num_bytes = 0
        with Products() as products, torch.set_grad_enabled(grad):
            out = self.ours(x, self.data.edge_index, *weight)
            if grad:
                out.to_local().square().sum().backward()
        sent = sum(counter.num_bytes for axes, counter in traffic.items() if axes != ("y",))
        with torch.set_grad_enabled(grad):
            stock_weight = [w.full_tensor() for w in weight]
            expected = self.stock(want, self.graph.edge_index, *stock_weight)
            torch.testing.assert_close(out.full_tensor().detach(), expected.detach(), rtol=0, atol=1e-11)
            if grad:
                expected.square().sum().backward()
                for (name, p), q in zip(self.ours.named_parameters(), self.stock.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-9, msg=name)
        assert products.number > 0 or not sent, f"{sent} bytes for no product"
        return products.number > 0


@patch.dict(os.environ)  # what is set ends with the body
def epochs(meshes: list[dict[str, int]], kind: str, channels: tuple[int, int]) -> None:
    for mesh in meshes:
        for sums in ("reduce_scatter", "all_reduce"):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            pair = Pair(kind, channels, mesh)
            seen = [pair.aggregates(), pair.aggregates(), pair.aggregates(grad=False)]
            with torch.inference_mode():
                seen.append(pair.aggregates(grad=False))
            for x in (pair.data.x, pair.graph.x):
                x.mul_(0.5)
            seen += [pair.aggregates(), pair.aggregates()]
            pair.data.x = pair.data.x * 2
            pair.graph.x = pair.graph.x * 2
            seen += [pair.aggregates(), pair.aggregates()]
            twin = copy.deepcopy(pair.data.x)
            twin.add_(1.0)
            seen.append(pair.aggregates(twin, pair.graph.x + 1, grad=False))
            seen.append(pair.aggregates())
            assert seen == [True, False, False, False, True, False, True, False, True, False], (mesh, sums, seen)


@pytest.mark.parametrize("kind", ["sage", "gcn"])
@pytest.mark.parametrize("channels", [(6, 8), (8, 3)])
@pytest.mark.parametrize("num_ranks", [4])
def test_an_attribute_is_aggregated_once_per_version(
    workers: Pools, num_ranks: int, kind: str, channels: tuple[int, int]
) -> None:
    workers(num_ranks).run(epochs, shapes(num_ranks), kind, channels)


@patch.dict(os.environ)  # what is set ends with the body
def other_cases(mesh: dict[str, int]) -> None:
    pair = Pair("gcn", (5, 4), mesh)
    weight = pair.data.edge_weight
    assert [pair.aggregates(None, None, weight) for _ in range(2)] == [True, False]
    weight.mul_(2.0)  # another operator
    assert [pair.aggregates(None, None, weight) for _ in range(2)] == [True, False]
    learning = weight.detach().clone().requires_grad_()
    assert all(pair.aggregates(None, None, learning) for _ in range(2))

    # An intermediate that is used again is kept from the second time, with the place of its root.
    pair = Pair("sage", (4, 5), mesh)
    hidden, want = pair.data.x.tanh(), pair.graph.x.tanh()
    assert [pair.aggregates(hidden, want, grad=False) for _ in range(3)] == [True, True, False]
    pair.data.x.requires_grad_()
    assert all(pair.aggregates() for _ in range(2))

    # A change of what was returned is not handed out again.
    pair = Pair("sage", (5, 4), mesh)
    conv = pair.ours
    conv.lin_l, conv.root_weight, pair.stock.lin_l, pair.stock.root_weight = (torch.nn.Identity(), False) * 2
    expected = pair.stock(pair.graph.x, pair.graph.edge_index)
    for _ in range(3):
        out = conv(pair.data.x, pair.data.edge_index)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-11)
        out.mul_(2.0)

    os.environ["PYG_DIST_REMEMBER_MIB"] = "0"
    pair = Pair("sage", (5, 8), mesh)
    assert all(pair.aggregates() for _ in range(3))


@pytest.mark.parametrize("mesh", [{"x": 2, "z": 2}, {"y": 2, "z": 2}])
def test_weights_intermediates_results_changed_in_place_and_the_limit(workers: Pools, mesh: dict[str, int]) -> None:
    workers(4).run(other_cases, mesh)
