"""On the grid, too, constant inputs are aggregated once: no exchange and no sparse product after the first time."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import Pair, meshes
from workers import Pools, on_ranks

from pyg_dist.backend import ops


class Products:
    """Counts the sparse products of this rank."""

    def __init__(self) -> None:
        self.ops, self.multiply, self.number = ops, ops.spmm_csr, 0

    def __enter__(self) -> Products:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return self.multiply(*args, **kwargs)

        self.ops.spmm_csr = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        self.ops.spmm_csr = self.multiply


class OnGrid(Pair):
    """Tells whether a run aggregates."""

    def __init__(self, kind: str, channels: tuple[int, int], mesh: dict[str, int]) -> None:
        super().__init__(kind, channels, layout="grid", mesh=mesh)

    def aggregates(self, x: Any = None, want: Any = None, *weight: Any, grad: bool = True) -> bool:
        """Whether there was a sparse product, or a message other than the linear map's sums."""
        traffic = self.data.graph.grid.mesh.traffic
        before = {axes: counter.num_bytes for axes, counter in traffic.items()}
        with Products() as products:
            compare = self.run(x, want, *weight, grad=grad)
        sent = sum(n.num_bytes - before.get(axes, 0) for axes, n in traffic.items() if axes != ("y",))
        compare()
        assert products.number > 0 or not sent, f"{sent} bytes for no product"
        return products.number > 0


@patch.dict(os.environ)  # what is set ends with the body
def epochs(shapes: list[dict[str, int]], kind: str, channels: tuple[int, int]) -> None:
    for mesh in shapes:
        for sums in ("reduce_scatter", "all_reduce"):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            pair = OnGrid(kind, channels, mesh)
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
@pytest.mark.parametrize("channels", [(6, 8), pytest.param((8, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_ranks", [4])
def test_an_attribute_is_aggregated_once_per_version(
    workers: Pools, num_ranks: int, kind: str, channels: tuple[int, int]
) -> None:
    is_other = (kind == "gcn") != (channels == (8, 3))  # each mesh by one of the two kinds
    workers(num_ranks).run(epochs, meshes(num_ranks)[is_other::2], kind, channels)


@on_ranks(4)
@pytest.mark.parametrize("mesh", [{"x": 2, "z": 2}, {"y": 2, "z": 2}])
@patch.dict(os.environ)  # what is set ends with the body
def test_weights_intermediates_results_changed_in_place_and_the_limit(mesh: dict[str, int]) -> None:
    pair = OnGrid("gcn", (5, 4), mesh)
    weight = pair.data.edge_weight
    assert [pair.aggregates(None, None, weight) for _ in range(2)] == [True, False]
    weight.mul_(2.0)  # another operator
    assert [pair.aggregates(None, None, weight) for _ in range(2)] == [True, False]
    learning = weight.detach().clone().requires_grad_()
    assert all(pair.aggregates(None, None, learning) for _ in range(2))

    # An intermediate that is used again is kept from the second time, with the place of its root.
    pair = OnGrid("sage", (4, 5), mesh)
    hidden, want = pair.data.x.tanh(), pair.graph.x.tanh()
    assert [pair.aggregates(hidden, want, grad=False) for _ in range(3)] == [True, True, False]
    pair.data.x.requires_grad_()
    assert all(pair.aggregates() for _ in range(2))

    # A change of what was returned is not handed out again.
    pair = OnGrid("sage", (5, 4), mesh)
    conv = pair.ours
    conv.lin_l, conv.root_weight, pair.stock.lin_l, pair.stock.root_weight = (torch.nn.Identity(), False) * 2
    expected = pair.stock(pair.graph.x, pair.graph.edge_index)
    for _ in range(3):
        out = conv(pair.data.x, pair.data.edge_index)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-11)
        out.mul_(2.0)

    os.environ["PYG_DIST_REMEMBER_MIB"] = "0"
    pair = OnGrid("sage", (5, 8), mesh)
    assert all(pair.aggregates() for _ in range(3))
