"""PyG's explainers over distributed convs: the masks that they learn, or read, are those of stock convs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from workers import Pools

import pyg_dist

F, NUM_NODES = 4, 20
MODELS = {"GCN": gnn.GCN, "GAT": gnn.GAT, "GraphSAGE": gnn.GraphSAGE, "GIN": gnn.GIN}
TOP = {"threshold_type": "topk", "value": 5}
CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "of a node": (lambda: GNNExplainer(epochs=4), 3, {"node_mask_type": "attributes", "edge_mask_type": "object"}),
    "of all": (
        lambda: GNNExplainer(epochs=4),
        None,
        {"node_mask_type": "object", "edge_mask_type": "object", "threshold_config": TOP},
    ),
    "of features": (lambda: GNNExplainer(epochs=4), torch.tensor([3, 4]), {"node_mask_type": "common_attributes"}),
    "of attention": (AttentionExplainer, 3, {"edge_mask_type": "object"}),
}


def graph() -> Data:
    return random_graph(NUM_NODES, 60, F, seed=1, dtype=torch.float64)


def explained(data: Any, is_ours: bool) -> Results:
    found: Results = {}
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    for name, class_ in MODELS.items():
        for case, (algorithm, index, options) in CASES.items():
            if case == "of attention" and name != "GAT":
                continue
            torch.manual_seed(0)
            model = class_(F, 8, 2, 3, act="tanh").double()
            if is_ours:
                pyg_dist.distribute(model)
            explain = Explainer(model, algorithm(), explanation_type="model", model_config=config, **options)
            told = explain(data.x, data.edge_index, index=index)
            for key in ("node_mask", "edge_mask", "prediction"):
                value: Any = told.get(key)
                if isinstance(value, Tensor):
                    found[f"{name} {case} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def compare(layout: str, expected: Results) -> None:
    options: dict[str, Any] = {"layout": layout}
    if layout == "halo":
        options["partition"] = uneven_parts(NUM_NODES, pyg_dist.world_size())
    assert_same(explained(pyg_dist.DistributedData(graph(), **options), True), expected)


@pytest.mark.parametrize(("world_size", "layout"), [(1, "halo"), (3, "halo"), (2, "grid")])
def test_explanations(workers: Pools, world_size: int, layout: str) -> None:
    expected = explained(graph(), False)
    assert len(expected) > 30
    workers(world_size).run(compare, layout, expected)
