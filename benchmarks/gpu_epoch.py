"""A training epoch on a GPU: pyg_dist on one rank against PyG on ``edge_index``, on ``adj_t`` and on ``EdgeIndex``.

python benchmarks/epoch.py --device cuda
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from epoch_models import MODELS
from gpu_measure import Drawn, Log, Place, Size, draw, geometric_mean, sizes
from torch_geometric.data import Data
from torch_geometric.edge_index import EdgeIndex
from torch_geometric.transforms import ToSparseTensor

from pyg_dist import DistributedData
from pyg_dist.backend.session.settings import REMEMBER_MIB

STOCK = ("edge_index", "adj_t", "EdgeIndex")
OURS = ("pyg_dist", "pyg_dist, nothing remembered")
FORMS = STOCK + OURS
FAST = ("adj_t", "EdgeIndex")
"""What a script of PyG's may use where it wants to be fast."""


def on_host(graph: Drawn) -> Data:
    """The graph with random features, labels and a mask, on the host: what a script would have read."""
    size, device = graph.size, graph.col.device
    generator = torch.Generator(device).manual_seed(1)
    return Data(
        x=torch.randn(size.num_nodes, size.num_features, generator=generator, device=device),
        edge_index=graph.edge_index(),
        y=torch.randint(size.num_classes, (size.num_nodes,), generator=generator, device=device),
        train_mask=torch.rand(size.num_nodes, generator=generator, device=device) < 0.5,
    ).cpu()


def epoch_of(host: Data, laid_out: Any, model_name: str, form: str, size: Size, place: Place) -> Callable[[], None]:
    """A function that trains for one epoch; ``laid_out`` is the ``DistributedData``, on the host."""
    device = place.device
    is_stock = not form.startswith("pyg_dist")
    os.environ[REMEMBER_MIB.name] = "0" if form.endswith("remembered") else "inf"
    torch.manual_seed(0)
    data: Any = copy.copy(host if is_stock else laid_out).to(device)
    if form == "adj_t":
        data = ToSparseTensor(layout=torch.sparse_csr)(data)
    elif form == "EdgeIndex":
        shape = (size.num_nodes, size.num_nodes)
        data.edge_index = EdgeIndex(data.edge_index, sparse_size=shape, sort_order="col").fill_cache_()
    make, stock_conv, ours = MODELS[model_name]
    model = make(size.num_features, size.num_classes, stock_conv if is_stock else ours).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    edges = data.adj_t if form == "adj_t" else data.edge_index
    picked = data.train_mask.nonzero().view(-1) if is_stock else data.train_mask

    def epoch() -> None:
        optimizer.zero_grad()
        out = model(data.x, edges)
        F.cross_entropy(out[picked], data.y[picked]).backward()
        optimizer.step()

    return epoch


def measured(host: Data, laid_out: Any, model_name: str, form: str, size: Size, place: Place) -> dict[str, float]:
    """Seconds of an epoch, the host's gaps included, and torch's peak memory, graph and model included."""
    place.clear()
    epoch = epoch_of(host, laid_out, model_name, form, size, place)
    for _ in range(2):
        epoch()
    seconds = place.seconds(epoch, target=0.5, most=10, is_queued=False)
    return {"seconds": seconds, "peak_mib": place.peak_mib(epoch)}


Found = dict[tuple[str, str, str], dict[str, Any]]
"""Seconds and peak memory, or an error, by graph, model and form."""


def ratios(found: Found, graph: str, model: str, forms: Sequence[str]) -> dict[str, float] | None:
    """How much faster ours is than the fastest of ``forms``, and what of its memory it takes; None: not known."""
    ours = found.get((graph, model, "pyg_dist"), {})
    others = [found.get((graph, model, form), {}) for form in forms]
    fastest = min((other for other in others if "seconds" in other), key=lambda other: other["seconds"], default=None)
    if fastest is None or "seconds" not in ours:
        return None
    speed_up = {"speed-up": fastest["seconds"] / ours["seconds"]}
    if not fastest["peak_mib"]:  # in a trial
        return speed_up
    return speed_up | {"of its peak": ours["peak_mib"] / fastest["peak_mib"]}


def summary(found: Found) -> dict[str, Any]:
    """By goal, what is known so far."""
    pairs = list(dict.fromkeys((graph, model) for graph, model, _ in found))
    known = [ratio for pair in pairs if (ratio := ratios(found, *pair, FAST))]
    names = ("speed-up", "of its peak")
    means = {name: geometric_mean(values) for name in names if (values := [r[name] for r in known if name in r])}
    return {
        "3x edge_index at 0.4 of its peak on arxiv-like": {
            model: ratios(found, "arxiv-like", model, ["edge_index"]) for model in MODELS
        },
        "1.5x the fastest of adj_t and EdgeIndex at 0.8 of its peak, geometric mean": means | {"of": len(known)},
    }


def measure_graph(name: str, size: Size, place: Place, log: Log, found: Found) -> dict[str, float]:
    """All models and forms on a graph; seconds of our set-up.

    Stock forms come first: what ours keeps on the device for a graph, as long as that is there, counts for ours alone.
    """
    host = on_host(draw(size, place))
    laid_out: Any = None
    set_up = 0.0
    for forms in (STOCK, OURS):
        if forms is OURS:
            begin = time.perf_counter()
            laid_out = DistributedData(host.clone())
            set_up = time.perf_counter() - begin
        for model in MODELS:
            for form in forms:
                run_it = partial(measured, host, laid_out, model, form, size, place)
                found[name, model, form] = log.attempt(f"{name}, {model}, {form}", run_it)
                log.add("summary", summary(found))
    return {"seconds on the host": set_up}


def run(place: Place, log: Log) -> None:
    """SAGE with 256 columns, GCN with 128, GAT with four heads of 32, on each graph; the largest one comes last."""
    found: Found = {}
    for name, size in sorted(sizes(place).items(), key=lambda item: item[1].num_edges):
        log.attempt(f"{name}, set-up", partial(measure_graph, name, size, place, log, found))
        place.clear()
