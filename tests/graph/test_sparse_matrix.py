"""Matrices that a script makes of edges, and products with them, against torch on the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric.nn import GCNConv, LabelPropagation
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import degree
from workers import Pools

import pyg_dist
from pyg_dist.errors import DataError, MixedRowsError

N = 47
SIZE = (N, N)


def norm(edge_index: Any) -> Any:
    row, col = edge_index
    scale = (degree(row, N, torch.float64) + 1).rsqrt()
    return scale[row] * scale[col]


MATRICES: dict[str, Callable[[Any, Any], Any]] = {
    "edge_index": lambda e, w: torch.sparse_coo_tensor(e, w, SIZE),
    "by name": lambda e, w: torch.sparse_coo_tensor(indices=e, values=w, size=torch.Size(SIZE)).coalesce(),
    "stacked": lambda e, w: torch.sparse_coo_tensor(torch.stack([e[0], e[1]]), w, SIZE),
    "reversed": lambda e, w: torch.sparse_coo_tensor(torch.stack((e[1], e[0])), w, SIZE),
    "transposed": lambda e, w: torch.sparse_coo_tensor(e, w, SIZE).t(),
    "values of rows": lambda e, w: torch.sparse_coo_tensor(e, w * norm(e), SIZE).transpose(0, 1),
}
USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "@": lambda a, x, w: a @ x,
    "torch.sparse.mm": lambda a, x, w: torch.sparse.mm(a, x).relu(),
    "torch.spmm": lambda a, x, w: torch.spmm(a, a @ x),
    "plain": lambda a, x, w: (a @ w.t()) * x[:, :1],
    "detached": lambda a, x, w: a.detach() @ x,
    "linear": lambda a, x, w: F.linear(a, w, w[:, 0]) * x[:, :1],
    "sum": lambda a, x, w: torch.sparse.sum(a, dim=1).to_dense().view(-1, 1) * x,
    "columns": lambda a, x, w: torch.sparse.sum(a, dim=0).to_dense().view(-1, 1) * x,
}


def results(use: Any, edge_index: Any, x: Any, make: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(310, generator=generator, dtype=torch.float64).requires_grad_()
    plain = torch.randn(3, N, generator=generator, dtype=torch.float64).requires_grad_()
    x = x.detach().clone().requires_grad_()
    out = use(make(edge_index, values), x, plain)
    out.tanh().square().mean().backward()
    learned = {"x": x, "values": values, "plain": plain}
    return {"out": out.detach()} | {f"{name}.grad": t.grad for name, t in learned.items() if t.grad is not None}


def compare(layouts: list[dict[str, Any]]) -> None:
    stock = random_graph(N, 310, seed=1)
    for layout in layouts:
        data: Any = pyg_dist.DistributedData(random_graph(N, 310, seed=1), **layout)
        for name, make in MATRICES.items():
            for way, use in USES.items():
                expected = results(use, stock.edge_index, stock.x, make)
                assert_same(results(use, data.edge_index, data.x, make), expected, f"{name} {way} {layout}")
        for name in ("edge_index", "reversed"):  # made of the plain edges, and laid out when it meets rows
            for change in (lambda a: a, lambda a: a.to_sparse_csr()):
                make = lambda e, w, name=name, change=change: change(MATRICES[name](stock.edge_index, w))  # noqa: E731
                for way in ("@", "torch.sparse.mm"):
                    expected = results(USES[way], stock.edge_index, stock.x, make)
                    assert_same(results(USES[way], data.edge_index, data.x, make), expected, f"plain {name} {layout}")
        matrix = torch.sparse_coo_tensor(stock.edge_index, stock.edge_weight, SIZE).to_sparse_csr()
        conv = GCNConv(stock.num_features, 4).double()
        products = [{"out": torch.sparse.mm(matrix, x.detach(), "sum")} for x in (data.x, stock.x)]
        assert_same(*products, f"by name {layout}")
        with pytest.raises(MixedRowsError, match=r"expected the sum \(got 'amax'\): use a conv with this aggr"):
            torch.sparse.mm(matrix, data.x.detach(), "amax")
        want = {"out": conv(stock.x, matrix).detach()}
        assert_same({"out": pyg_dist.distribute(conv)(data.x, matrix).detach()}, want, f"conv {layout}")
        with pytest.raises(DataError, match=rf"all nodes by all nodes, \[{N}, {N}\] \(got \[{N}, 50\]\)"):
            torch.sparse_coo_tensor(data.edge_index, stock.edge_weight, (N, 50))


def changed_values(layouts: list[dict[str, Any]]) -> None:
    def sparse() -> Any:
        graph = random_graph(N, 310, seed=1).coalesce()
        del graph.edge_attr
        return ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(graph)

    stock = sparse()
    dense, y = stock.adj_t.to_dense(), stock.x.softmax(-1)
    scale = dense.sum(1).rsqrt().nan_to_num(0, 0, 0)
    source, target = stock.adj_t.to_sparse_coo().indices().flip(0)
    for layout in layouts:
        data: Any = pyg_dist.DistributedData(sparse(), **layout)
        adj_t = data.adj_t
        d = adj_t.sum(dim=1).rsqrt().nan_to_num(0, 0, 0)
        found = {
            "both": d.view(-1, 1) * adj_t * d.view(1, -1) @ data.x,
            "row": d.view(-1, 1) * d.view(-1, 1) * adj_t @ data.x,
            "column": torch.mul(d.view(1, -1), d[None] * adj_t) @ data.x,
            "plain": (adj_t * scale.view(1, -1) * 2.0).t() @ data.x,
            "ones": adj_t.set_value(None) @ data.x,
            "all": adj_t.sum(),
        }
        expected = {
            "both": scale.view(-1, 1) * dense * scale @ stock.x,
            "row": scale.view(-1, 1) ** 2 * dense @ stock.x,
            "column": dense * scale**2 @ stock.x,
            "plain": (dense * scale * 2).t() @ stock.x,
            "ones": (dense != 0).double() @ stock.x,
            "all": dense.sum(),
        }
        assert_same(found, expected, str(layout))
        # A SparseTensor's values are taken as they are, as PyG does, where torch's matrices are normalised.
        adj_t.graph.loop_rule = "replace"
        model = LabelPropagation(2, 0.9)
        want = {"out": model(y, torch.stack([source, target]), edge_weight=dense[target, source])}
        assert_same({"out": pyg_dist.distribute(model)(data.x.softmax(-1), adj_t)}, want, f"propagation {layout}")


CHANGES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "[N]": lambda a, w, d: a * d,
    "[1]": lambda a, w, d: a * d[:1],
    "[1, 1]": lambda a, w, d: torch.mul(input=a, other=d[:1].view(1, 1)),
    "[N, 1]": lambda a, w, d: torch.mul(a, other=d.view(-1, 1)),
    "[1, N]": lambda a, w, d: a * d.view(1, -1),
    "quotient": lambda a, w, d: -a.T / 3 / d[0],
    "cast": lambda a, w, d: a.to(dtype=a.dtype) * d.norm(),
    "sums": lambda a, w, d: a * a.sum(0) * a.sum(dim=[1, 0]),
}


def changed_by_plain(layouts: list[dict[str, Any]]) -> None:
    stock = random_graph(N, 310, seed=1)
    for layout in layouts:
        data: Any = pyg_dist.DistributedData(random_graph(N, 310, seed=1), **layout)
        for name, change in CHANGES.items():
            use = lambda a, x, w, change=change: change(a, w, w[0]) @ x  # noqa: E731
            dense = lambda e, w: torch.sparse_coo_tensor(e, w, SIZE).to_dense()  # noqa: E731
            found = results(use, data.edge_index, data.x, MATRICES["edge_index"])
            assert_same(found, results(use, stock.edge_index, stock.x, dense), f"{name} {layout}")
        matrix = torch.sparse_coo_tensor(data.edge_index, data.edge_weight, SIZE)
        assert matrix.dtype == torch.float64
        assert torch.sparse.sum(matrix, dim=-1, dtype=torch.float32).dtype == torch.float32
        assert tuple(matrix.sum(1, keepdim=True).shape) == (N, 1)
        wrong = [torch.ones(shape) for shape in ((N, N), (N - 1, 1), (1, N - 1), (N - 1,), (1, N, 1), (0,))]
        for factor in (*wrong, matrix, data.x, "2", None):
            with pytest.raises(DataError, match=rf"a number, \[{N}, 1\], \[1, {N}\] or \[{N}\] \(got"):
                matrix * factor
        with pytest.raises(DataError, match=r"a value for each edge, \[310\] \(got \[309\]\)"):
            torch.sparse_coo_tensor(data.edge_index, torch.ones(309), SIZE)
        with pytest.raises(DataError, match=r"each dimension once \(got dim=\(0, 0\)\)"):
            matrix.sum((0, 0))
        with pytest.raises(IndexError, match="out of range"):
            matrix.transpose(0, 2)
        with pytest.raises(IndexError, match="out of range"):
            torch.sparse.sum(matrix, dim=2)


def values_of_rows_at_plain_edges(layouts: list[dict[str, Any]]) -> None:
    stock, found = random_graph(N, 310, seed=1), []
    for layout in (None, *layouts):
        data: Any = stock if layout is None else pyg_dist.DistributedData(random_graph(N, 310, seed=1), **layout)
        w = data.edge_weight.detach().clone().requires_grad_()
        out = torch.sparse_coo_tensor(stock.edge_index, w * 2, SIZE) @ data.x
        out.tanh().square().mean().backward()
        found.append({"out": out.detach(), "values.grad": w.grad})
        assert torch.sparse_coo_tensor(size=SIZE)._nnz() == torch.sparse_coo_tensor(SIZE)._nnz() == 0
        assert_same(found[-1], found[0], str(layout))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("check", [compare, changed_values, changed_by_plain, values_of_rows_at_plain_edges])
def test_matrices(workers: Pools, num_ranks: int, check: Callable[..., None]) -> None:
    layouts: list[dict[str, Any]] = [{"partition": uneven_parts(N, num_ranks)}, {"layout": "grid"}]
    workers(num_ranks).run(check, layouts)
