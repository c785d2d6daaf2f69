"""The graph on which quantized messages are tried."""

from __future__ import annotations

from typing import Any

from random_graphs import random_graph


def distributed(bits: Any, exchange: str = "hybrid", **options: Any) -> Any:
    from pyg_dist import DistributedData

    graph = random_graph(61, 400, num_features=7, seed=3)
    return DistributedData(graph, partition="random", exchange=exchange, bits=bits, **options)
