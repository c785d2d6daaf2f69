"""Batches of neighbours in scripts as they are written for PyG's loaders."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_cases import laid_out
from neighbor_cases import N
from random_graphs import random_graph
from torch_geometric.data import Data
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.errors import OptionError
from pyg_dist.loader import LinkNeighborLoader, NeighborLoader


@on_ranks()
@pytest.mark.parametrize(("world_size", "mesh"), [(1, None), (2, None), (2, {"x": 2})])
def test_layer_wise_inference(mesh: dict[str, int] | None) -> None:
    """Layer-wise inference over subgraph loaders, as PyG's examples do it, and `model(data)`: equal."""
    from torch_geometric.nn import GraphSAGE

    graph = random_graph(N, 150)
    torch.manual_seed(0)
    twin = GraphSAGE(5, 8, 2, 4).double().eval()
    model, data = pyg_dist.distribute(copy.deepcopy(twin)).eval(), laid_out(graph, mesh)
    with torch.no_grad():
        whole = twin(graph.x, graph.edge_index)
        torch.testing.assert_close(model(data.x, data.edge_index).full_tensor(), whole, rtol=0, atol=1e-10)
        loader = NeighborLoader(copy.copy(data), [-1], batch_size=16)
        del loader.data.x
        x = data.x
        for k, conv in enumerate(model.convs):
            found = []
            for batch in loader:
                h = conv(x[batch.n_id], batch.edge_index)
                found.append((h.relu() if k == 0 else h)[: batch.batch_size])
            x = torch.cat(found)
        assert torch.equal(x.argmax(1)[data.train_mask].full_tensor(), whole.argmax(1)[graph.train_mask])
        x = x.full_tensor()
        torch.testing.assert_close(x, whole, rtol=0, atol=1e-10)


def trimmed_on_ranks() -> str:
    from torch_geometric.nn import GraphSAGE

    model = pyg_dist.distribute(GraphSAGE(5, 8, 2, 4).double())
    batch = next(iter(NeighborLoader(laid_out(random_graph(N, 150), None), [3, 2], batch_size=6)))
    try:
        model(
            batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_trimming_on_ranks(workers: Pools) -> None:
    for message in workers(2).run(trimmed_on_ranks):
        assert "leave out num_sampled" in message, message
        assert "\n" not in message


def test_arguments_stand_where_those_of_pyg_do() -> None:
    graph, transform = random_graph(N, 150), lambda batch: batch.num_nodes
    graph.weight = graph.edge_weight.abs()
    more = (None, True, "induced", True, "uniform", None, "weight", transform)
    loader = NeighborLoader(graph, [3, 2], graph.train_mask, *more)
    assert (loader.sampler.replace, loader.sampler.subgraph_type, loader.sampler.disjoint) == (True, "induced", True)
    assert all(edges.weight is not None for edges in loader.sampler.in_edges.values())
    assert loader.transform is transform
    links = LinkNeighborLoader(
        graph, [2], graph.edge_index, None, None, True, "directional", False, "uniform", "triplet"
    )
    assert links.sampler.seeds.negatives.mode == "triplet"  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"at most 16 positional arguments \(got 43\)"):
        NeighborLoader(graph, [2], *range(41))


def test_batches_of_mapped_features_and_of_edges_in_32_bits(tmp_path: Path) -> None:
    """As PyG's tests have them."""
    x = np.random.default_rng(0).standard_normal((N, 3))
    np.save(tmp_path / "x.npy", x)
    graph = Data(x=np.load(tmp_path / "x.npy", mmap_mode="r"), edge_index=random_graph(N, 150).edge_index.int())
    for batch in NeighborLoader(graph, [3, 2], batch_size=7):
        assert torch.equal(batch.x, torch.from_numpy(x)[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
