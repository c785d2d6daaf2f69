"""A training epoch on a GPU: pyg_dist on one rank against PyG on ``edge_index``, on ``adj_t`` and on ``EdgeIndex``.

python benchmarks/epoch.py --device cuda
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from epoch import MODELS
from gpu_measure import Drawn, Log, Place, Size, draw, sizes
from torch_geometric.data import Data
from torch_geometric.edge_index import EdgeIndex
from torch_geometric.transforms import ToSparseTensor

from pyg_dist import DistributedData
from pyg_dist.backend.session.settings import REMEMBER_MIB

FORMS = ("pyg_dist", "pyg_dist, nothing remembered", "edge_index", "adj_t", "EdgeIndex")


def on_host(graph: Drawn) -> Data:
    """The graph with random features, labels and a mask, on the host: what a script would have read."""
    size, generator = graph.size, torch.Generator().manual_seed(1)
    return Data(
        x=torch.randn(size.num_nodes, size.num_features, generator=generator),
        edge_index=graph.edge_index().cpu(),
        y=torch.randint(size.num_classes, (size.num_nodes,), generator=generator),
        train_mask=torch.rand(size.num_nodes, generator=generator) < 0.5,
    )


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
    """Seconds of an epoch and torch's peak memory, graph and model included."""
    epoch = epoch_of(host, laid_out, model_name, form, size, place)
    for _ in range(2):
        epoch()
    seconds = place.seconds(epoch, target=0.5, most=10)
    return {"seconds": seconds, "peak_mib": place.peak_mib(epoch)}


def run(place: Place, log: Log) -> None:
    """SAGE with 256 columns and GCN with 128, three layers, on each graph."""
    speed_ups: list[float] = []
    memory: list[float] = []
    for name, size in sizes(place).items():
        host = on_host(draw(size, place))
        begin = time.perf_counter()
        laid_out = DistributedData(host.clone())
        log.add(f"{name}, set-up", {"seconds on the host": time.perf_counter() - begin})
        for model_name in MODELS:
            found = {}
            for form in FORMS:
                run_it = partial(measured, host, laid_out, model_name, form, size, place)
                found[form] = log.attempt(f"{name}, {model_name}, {form}", run_it)
            ours = found["pyg_dist"]
            fastest = min((f for f in ("adj_t", "EdgeIndex") if "seconds" in found[f]), default=None,
                          key=lambda f: found[f]["seconds"])  # fmt: skip
            if fastest is None or "seconds" not in ours:
                continue
            speed_ups.append(found[fastest]["seconds"] / ours["seconds"])
            if found[fastest]["peak_mib"]:
                memory.append(ours["peak_mib"] / found[fastest]["peak_mib"])
            log.add(
                "summary",
                {
                    "over the fastest of adj_t and EdgeIndex, geometric mean": statistics.geometric_mean(speed_ups),
                    "of its peak memory, geometric mean": statistics.geometric_mean(memory) if memory else None,
                },
            )
