"""Sparse products on a GPU beside torch's, cuSPARSE's and the memory's; extremes beside PyG's scatter; tiles of a mesh.

python benchmarks/spmm.py --device cuda
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import cusparse
import torch
from gpu_measure import Drawn, Log, Place, Size, draw, geometric_mean, in_a_line, sizes
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_dist.backend import ops
from pyg_dist.backend.calibration import fit_spmm, spmm_samples
from pyg_dist.backend.sparse.csr import CSR

WIDTHS = (16, 47, 100, 128, 256, 602)
TORCH = "torch CSR, int32"


def products(graph: Drawn, width: int, place: Place) -> dict[str, Callable[[], Any]]:
    """The ways to multiply by the pattern, and two figures of the memory."""
    csr = CSR(graph.rowptr, graph.col, None, graph.size.num_nodes)
    x = torch.randn(graph.size.num_nodes, width, device=place.device)
    out, narrow = torch.empty_like(x), x.bfloat16()
    ones = torch.ones(graph.num_edges, device=place.device)
    rowptr, shape = graph.rowptr.int(), (graph.size.num_nodes, graph.size.num_nodes)
    sparse = torch.sparse_csr_tensor(rowptr, graph.col, ones, shape)
    ways: dict[str, Callable[[], Any]] = {
        "pyg_dist float32": lambda: csr.multiply(x),
        "pyg_dist bfloat16": lambda: csr.multiply(narrow),
        TORCH: lambda: sparse @ x,
        "copy": lambda: out.copy_(x),
    }
    if graph.num_edges * width * 4 <= 40 << 30:
        index = graph.col.long()
        gathered = torch.empty(graph.num_edges, width, device=place.device)
        ways["gather"] = lambda: torch.index_select(x, 0, index, out=gathered)
    ours = csr.multiply(x)
    expect(ours, sparse.double() @ x.double() if graph.num_edges < 10_000_000 else sparse @ x)
    if place.device.type == "cuda":
        for name, number in cusparse.ALGORITHMS.items():
            prepare = partial(cusparse.product, rowptr, graph.col, ones, x, out, number)
            ways[f"cuSPARSE {name}"] = Later(prepare, lambda: expect(out, ours))
    return ways


def expect(product: Tensor, other: Tensor) -> None:
    """Raise unless two products are equal but for rounding: what is wrong may well be fast."""
    worst = float((product - other).abs().max() / other.abs().max())
    if not worst < 1e-4:
        raise RuntimeError(f"expected equal products, got some that differ by {worst:.1e}")


class Later:
    """A way that is prepared, and whose result is looked at, when it is first called."""

    def __init__(self, prepare: Callable[[], Callable[[], None]], check: Callable[[], None]) -> None:
        self._prepare, self._check = prepare, check
        self._run: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._run is None:
            self._run = self._prepare()
            self._run()
            self._check()
        self._run()


def measure_width(graph: Drawn, width: int, place: Place) -> dict[str, float | str]:
    """Seconds by way, and rates of the memory; a way that fails says why and counts for nothing."""
    found: dict[str, Any] = {}
    for way, run in products(graph, width, place).items():
        try:
            found[way] = place.seconds(run)
        except Exception as error:
            found[way] = in_a_line(error)
    moved = {"copy": 8 * graph.size.num_nodes * width, "gather": 8 * graph.num_edges * width}
    rates = {f"{k} GB/s": moved[k] / found[k] / 1e9 for k in moved if isinstance(found.get(k), float)}
    return found | rates


def tiles(graph: Drawn, place: Place) -> dict[str, Any]:
    """A tile of the mesh (64, 1, 1) and one of (1, 64, 1): Plexus, Table 2, and what the model says of them."""
    n = graph.size.num_nodes
    small = ((2_000, 8),) if place.is_trial else ((500_000, 16),)
    fit = fit_spmm(spmm_samples(sizes=small, device=place.device), num_splits=20)
    cut = n // 64
    first = int(graph.rowptr[cut])
    flat = CSR(graph.rowptr[: cut + 1].clone(), graph.col[:first], None, n)  # a 64th of the rows
    here = graph.col < cut  # a 64th of the columns
    before = torch.zeros(graph.num_edges + 1, dtype=torch.int64, device=place.device)
    torch.cumsum(here, 0, out=before[1:])
    tall = CSR(before[graph.rowptr], graph.col[here], None, cut)
    found: dict[str, Any] = {"r2": fit.r2, "coefficients": fit.coefficients}
    for name, csr in (("64 x 1 x 1", tall), ("1 x 64 x 1", flat)):
        x = torch.randn(csr.num_cols, 128, device=place.device)
        a, b, c = fit.coefficients
        found[name] = {
            "entries": csr.num_entries,
            "seconds": place.seconds(lambda m=csr, v=x: m.multiply(v)),
            "predicted": a * csr.num_entries * 128 + b * csr.num_entries + c * csr.num_rows * 128,
        }
    return found


def extremes(graph: Drawn, place: Place) -> dict[str, float]:
    """The largest row of neighbours, forward: ours, and PyG's scatter of a row per edge."""
    x = torch.randn(graph.size.num_nodes, 128, device=place.device)
    source, target = graph.edge_index()
    seconds = {
        "pyg_dist": place.seconds(lambda: ops.extreme_csr(graph.rowptr, graph.col, x, "max")),
        "PyG scatter": place.seconds(
            lambda: scatter(x.index_select(0, source), target, dim_size=graph.size.num_nodes, reduce="max")
        ),
    }
    return seconds | {"speed-up": seconds["PyG scatter"] / seconds["pyg_dist"]}


class Ratios:
    """What is summed up over graphs and widths: seconds of others by ours."""

    def __init__(self) -> None:
        self._by_torch: list[float] = []
        self._by_best: list[float] = []
        self._narrow: list[float] = []

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Of one graph and width; ways that failed count for nothing."""
        seconds = {way: value for way, value in found.items() if isinstance(value, float)}
        if "pyg_dist float32" not in seconds:
            return
        ours = seconds["pyg_dist float32"]
        if TORCH in seconds:
            self._by_torch.append(seconds[TORCH] / ours)
        best = [taken for way, taken in seconds.items() if way.startswith("cuSPARSE")]
        self._by_best += [min(best) / ours] if best else []
        if name == "reddit-like" and "pyg_dist bfloat16" in seconds:
            self._narrow.append(ours / seconds["pyg_dist bfloat16"])

    def summary(self) -> dict[str, Any]:
        """So far."""
        by_best, narrow = self._by_best, self._narrow
        return {
            "over torch, geometric mean": geometric_mean(self._by_torch),
            "over torch, least": min(self._by_torch, default=None),
            "over the best cuSPARSE, geometric mean": geometric_mean(by_best) if by_best else None,
            "bfloat16 over float32, reddit-like, median": statistics.median(narrow) if narrow else None,
        }


def measure_graph(name: str, size: Size, place: Place, log: Log, ratios: Ratios) -> dict[str, int]:
    """All widths, and what else is measured on that graph; its numbers of nodes and edges."""
    graph = draw(size, place)
    for width in WIDTHS[:2] if place.is_trial else WIDTHS:
        ratios.add(name, log.attempt(f"{name}, {width} columns", partial(measure_width, graph, width, place)))
        place.clear()
        log.add("summary", ratios.summary())
    if name == "arxiv-like":
        log.attempt("extremes", partial(extremes, graph, place))
    if name == "products-like":
        log.attempt("tiles of products", partial(tiles, graph, place))
    return {"nodes": size.num_nodes, "edges": graph.num_edges}


def run(place: Place, log: Log) -> None:
    """All of it; an error ends no other graph, width or way."""
    ratios = Ratios()
    for name, size in sizes(place).items():
        log.attempt(f"{name}, graph", partial(measure_graph, name, size, place, log, ratios))
        place.clear()
