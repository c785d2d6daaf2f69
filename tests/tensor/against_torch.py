"""One expression on plain tensors and on distributed ones: values, shapes and every gradient must be the same.

An expression is a function of :class:`Operands`, whose attributes are tensors made on demand. Legend: N nodes, F columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, NodeTensor, world_size
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.rows import Rows

Expression = Callable[["Operands"], Any]
WORLD_SIZES = [1, 2, 3]


class Layout(NamedTuple):
    """Shape of the operands, and the owner of each node by world size."""

    num_nodes: int
    num_columns: int
    parts: dict[int, list[int]]


LAYOUTS = {
    # A rank without rows, and at three ranks one that has as many rows as there are columns.
    "tall": Layout(7, 3, {1: [0] * 7, 2: [1] * 7, 3: [2, 0, 2, 0, 0, 2, 2]}),
    # As many nodes as columns: only the number of dimensions tells rows from columns.
    "square": Layout(4, 4, {1: [0] * 4, 2: [1, 0, 0, 1], 3: [0, 2, 2, 2]}),
}


@lru_cache(maxsize=None)
def graph(layout: str) -> DistributedData:
    """A graph over the nodes of ``layout``, so connected that local order differs from the input's."""
    num_nodes, _, parts = LAYOUTS[layout]
    node = torch.arange(num_nodes)
    edge_index = torch.stack([torch.cat([node[:-1], node[1:2]]), torch.cat([node[1:], node[:1]])])
    data = Data(edge_index=edge_index, num_nodes=num_nodes, node_id=node, edge_id=torch.arange(num_nodes))
    return DistributedData(data, partition=torch.tensor(parts[world_size()]))


def row_tensor(full: Tensor, rows: Rows) -> RowTensor:
    """``full`` distributed, made without any function of the table."""
    return RowTensor.from_local(full.detach().index_select(0, rows.position), rows)


class Operands:
    """Tensors by name, equal for both kinds; those in :attr:`ROWS` have a row per node, the others are row-free."""

    ROWS = ("x", "y", "p", "v", "u", "c", "i", "j", "m", "n", "mask", "other_mask", "label", "column", "ties", "holes")

    def __init__(self, layout: str, distributed: bool) -> None:
        self._layout = layout
        self._distributed = distributed
        self._made: dict[str, Tensor] = {}

    @property
    def N(self) -> int:
        return LAYOUTS[self._layout].num_nodes

    @property
    def F(self) -> int:
        return LAYOUTS[self._layout].num_columns

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._made:
            value = self._value(name)
            if self._distributed and name in self.ROWS:
                value = row_tensor(value, graph(self._layout).graph.node_rows)
            self._made[name] = value.requires_grad_(value.is_floating_point())
        return self._made[name]

    def _value(self, name: str) -> Tensor:
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        N, F = self.N, self.F

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng, dtype=torch.float64)

        def integer(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high, size, generator=rng)

        makers: dict[str, Callable[[], Tensor]] = {
            "x": lambda: normal(N, F),
            "y": lambda: normal(N, F),
            "p": lambda: torch.rand(N, F, generator=rng, dtype=torch.float64) * 0.8 + 0.1,  # probabilities
            "v": lambda: normal(N),
            "u": lambda: normal(N),
            "c": lambda: normal(N, 2, F),  # cubes
            "i": lambda: integer(1, 6, N, F),
            "j": lambda: integer(1, 4, N, F),
            "m": lambda: normal(N, F) > 0,
            "n": lambda: normal(N, F) > 0.5,
            "mask": lambda: torch.arange(N) % 3 != 1,
            "other_mask": lambda: torch.arange(N) > 1,
            "label": lambda: integer(0, F, N),
            "column": lambda: normal(N, 1),
            "ties": lambda: integer(-1, 2, N, F).double(),
            "holes": lambda: normal(N, F).masked_fill(torch.arange(N * F).view(N, F) % 5 == 1, torch.nan),
            # Row-free from here on.
            "weight": lambda: normal(4, F),
            "matrix": lambda: normal(F, 4),
            "vector": lambda: normal(F),
            "row": lambda: normal(1, F),
            "scalar": lambda: normal(),
            "full": lambda: normal(N, F),  # plain, but with a row per node
            "full_v": lambda: normal(N),
            "full_i": lambda: integer(1, 6, N, F),
            "class_weight": lambda: torch.rand(F, generator=rng, dtype=torch.float64) + 0.5,
        }
        return makers[name]()


def leaves(result: Any) -> Iterator[Any]:
    """The tensors and values in a result, in order."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        for item in result:
            yield from leaves(item)
    else:
        yield result


def assert_same(got: Any, want: Any, what: str) -> None:
    """Equal up to 1e-10 in float64 and to torch's own tolerances below; NaN equals NaN."""
    if isinstance(got, RowTensor):
        assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
        assert got.to_local().shape[0] == got._rows.num_local, what
        got = got.full_tensor()
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{what}: {got!r}"
        assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
        tolerance = {"rtol": 1e-10, "atol": 1e-10} if want.dtype == torch.float64 else {}
        torch.testing.assert_close(
            got.detach(), want.detach(), equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance
        )
    elif isinstance(want, np.ndarray):
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=what)
    else:
        assert got == want, f"{what}: {got!r}, expected {want!r}"


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, RowTensor) else tensor


def _back_propagate(results: list[Any]) -> None:
    """Weight all that is differentiable with fixed numbers, and run one backward pass."""
    losses = []
    for result in results:
        if isinstance(result, Tensor) and result.requires_grad:
            every = full(result)
            weight = torch.linspace(0.5, 1.5, every.numel(), dtype=torch.float64).view(every.shape)
            losses.append((every * weight).sum())
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()


def check(expression: Expression, layout: str, what: str = "result") -> None:
    """Compare values, global shapes and the gradients of all operands that were used."""
    plain, distributed = Operands(layout, False), Operands(layout, True)
    want, got = list(leaves(expression(plain))), list(leaves(expression(distributed)))
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, f"{what}[{k}] ({layout})")
    try:
        _back_propagate(want)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        return  # torch has none
    _back_propagate(got)
    for name, operand in plain._made.items():
        mine = distributed._made[name]
        assert (mine.grad is None) == (operand.grad is None), f"{what}: gradient of {name} is {mine.grad}"
        if operand.grad is not None:
            assert isinstance(mine.grad, NodeTensor) == isinstance(mine, NodeTensor), f"{what}: gradient of {name}"
            assert_same(mine.grad, operand.grad, f"{what}: gradient of {name} ({layout})")


def works_in_torch(expression: Expression, layout: str) -> bool:
    """Whether torch itself takes this form of the call."""
    try:
        expression(Operands(layout, False))
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True
