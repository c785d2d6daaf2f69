"""What every method promises: a part for each node, balance, determinism, and clear refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import load_npz
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_dist.errors import DataError, MissingPackageError, OptionError
from pyg_dist.partition import Batches, check_given, partition
from pyg_dist.partition.hypergraph import build_hypergraph_model
from pyg_dist.partition.stream import chunks_of, stream_parts

METHODS = ["metis", "metis-cut", "hypergraph", "stochastic", "stream", "random"]


def rows_sent(edge_index: Tensor, parts: Tensor, num_parts: int) -> int:
    """Pairs (node, other part that has an edge from it)."""
    source, target_part = edge_index[0], parts.long()[edge_index[1]]
    return torch.unique((source * num_parts + target_part)[parts[source] != target_part]).numel()


@settings(max_examples=40, deadline=None)
@given(
    num_nodes=st.integers(0, 40),
    num_edges=st.integers(0, 200),
    num_parts=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    method=st.sampled_from(METHODS),
)
def test_any_graph_gets_valid_parts(num_nodes: int, num_edges: int, num_parts: int, seed: int, method: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Loops, duplicates and, with few edges, isolated nodes.
    edge_index = torch.randint(max(1, num_nodes), (2, num_edges if num_nodes else 0), generator=generator)
    train_mask = torch.rand(num_nodes, generator=generator) < 0.3
    parts = partition(edge_index, num_nodes, num_parts, method, train_mask, seed=seed)
    assert parts.dtype == torch.int32
    assert parts.shape == (num_nodes,)
    assert set(parts.tolist()) <= set(range(num_parts))
    assert torch.equal(parts, partition(edge_index, num_nodes, num_parts, method, train_mask, seed=seed))


@pytest.mark.parametrize("method", METHODS)
def test_more_parts_than_nodes(method: str) -> None:
    parts = partition(torch.tensor([[0, 1], [1, 2]]), 3, 5, method)
    assert parts.unique().numel() == 3


@pytest.mark.parametrize("method", METHODS)
def test_without_edges_the_nodes_are_spread_evenly(method: str) -> None:
    parts = partition(torch.empty(2, 0, dtype=torch.long), 103, 4, method)
    assert sorted(torch.bincount(parts).tolist()) == [25, 26, 26, 26]


def test_seeds_of_metis_differ() -> None:
    """Its srand takes 0 and 1 for one seed."""
    edge_index = torch.randint(300, (2, 2000), generator=torch.Generator().manual_seed(0))
    parts = [partition(edge_index, 300, 4, "metis-cut", seed=seed) for seed in (0, 1, 2)]
    assert not any(torch.equal(parts[a], parts[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_memory_is_refused_with_the_methods_that_fit() -> None:
    edge_index = torch.randint(100_000, (2, 3_000_000), generator=torch.Generator().manual_seed(0))
    with pytest.raises(OptionError, match=r"'hypergraph', which takes about .* GiB.: choose .*stream, .*random|random"):
        partition(edge_index, 100_000, 8, "hypergraph", memory=1 << 29)


@pytest.mark.parametrize(("name", "num_parts"), [("cora", 8), ("pubmed", 2), ("power_usa82k", 8)])
def test_stream_sends_less_than_random(shared_data: Path, name: str, num_parts: int) -> None:
    """In any order of nodes and edges: the input's may be local."""
    data = load_npz(shared_data / f"{name}.npz")
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))
    shuffled = torch.randperm(data.edge_index.shape[1], generator=torch.Generator().manual_seed(1))
    edge_index = order[data.edge_index[:, shuffled]]
    stream, scattered = (partition(edge_index, data.num_nodes, num_parts, m) for m in ("stream", "random"))
    assert rows_sent(edge_index, stream, num_parts) < 0.7 * rows_sent(edge_index, scattered, num_parts)
    weight = torch.bincount(edge_index[1], minlength=data.num_nodes)
    weight += round(edge_index.shape[1] / data.num_nodes)
    total = torch.bincount(stream, weight)
    assert float(total.max() / total.mean()) <= 1.031


def test_stream_reads_chunks() -> None:
    """It knows no more of the edges than a chunk at a time."""
    edge_index = torch.randint(500, (2, 4000), generator=torch.Generator().manual_seed(0))
    sizes = []

    def chunks() -> Any:
        for chunk in chunks_of(edge_index, 64)():
            sizes.append(chunk.shape[1])
            yield chunk

    parts = stream_parts(chunks, np.ones(500, dtype=np.int64), 4, 0.03, seed=0)
    assert max(sizes) == 64
    assert torch.bincount(parts, minlength=4).max() <= 129


def test_random_is_balanced_and_depends_on_the_seed() -> None:
    edge_index = torch.tensor([[0], [1]])
    first, second = (partition(edge_index, 1001, 4, "random", seed=seed) for seed in (0, 1))
    assert sorted(torch.bincount(first).tolist()) == [250, 250, 250, 251]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", ["metis", "metis-cut", "hypergraph", "stochastic"])
def test_clusters_are_found(method: str) -> None:
    cluster = torch.arange(80) // 20
    row, column = torch.nonzero(cluster[:, None] == cluster, as_tuple=True)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    edge_index = torch.cat([order[torch.stack([row, column])], order[torch.tensor([[0, 20, 40], [20, 40, 60]])]], dim=1)
    parts = partition(edge_index, 80, 4, method)
    assert rows_sent(edge_index, parts, 4) == 3


@pytest.mark.parametrize("method", ["metis", "hypergraph"])
def test_the_order_of_edges_makes_no_difference(method: str) -> None:
    edge_index = torch.randint(50, (2, 300), generator=torch.Generator().manual_seed(1))
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(2))
    expected = partition(edge_index, 50, 3, method)
    assert torch.equal(partition(edge_index[:, order], 50, 3, method), expected)
    assert torch.equal(partition(edge_index.to(torch.int32), 50, 3, method), expected)


@pytest.mark.parametrize(("name", "num_parts"), [("cora", 8), ("amazon_computers", 4), ("power_usa82k", 2)])
def test_metis_on_real_graphs(shared_data: Path, name: str, num_parts: int) -> None:
    data = load_npz(shared_data / f"{name}.npz")
    size = data.num_nodes
    metis, scattered = (
        partition(data.edge_index, size, num_parts, method, data.train_mask) for method in ("metis", "random")
    )
    assert rows_sent(data.edge_index, metis, num_parts) < 0.7 * rows_sent(data.edge_index, scattered, num_parts)

    def imbalance(work: Tensor) -> float:
        total = torch.zeros(num_parts).index_add_(0, metis.long(), work.float())
        return float(total.max() / total.mean())

    in_degree = torch.bincount(data.edge_index[1], minlength=size)
    mean = round(float(in_degree.float().mean()))
    assert imbalance(in_degree + mean + mean * data.train_mask) < 1.05
    assert imbalance(torch.ones(size)) < 1.4
    assert imbalance(in_degree) < 1.6


def test_the_hypergraph_sends_fewer_rows_than_metis(shared_data: Path) -> None:
    data = load_npz(shared_data / "cora.npz")
    metis, hypergraph = (
        rows_sent(data.edge_index, partition(data.edge_index, data.num_nodes, 8, method, data.train_mask), 8)
        for method in ("metis", "hypergraph")
    )
    assert hypergraph < metis


@pytest.mark.parametrize("method", ["metis", "hypergraph"])
def test_epsilon_bounds_the_imbalance(method: str) -> None:
    edge_index = torch.randint(2000, (2, 8000), generator=torch.Generator().manual_seed(0))
    weight = torch.bincount(edge_index[1], minlength=2000) + 4
    for epsilon in (0.01, 0.3) if method == "metis" else (0.02,):
        parts = partition(edge_index, 2000, 4, method, epsilon=epsilon).long()
        total = torch.zeros(4).index_add_(0, parts, weight.float())
        assert float(total.max() / total.mean()) <= 1 + epsilon + 0.005


@pytest.mark.parametrize(
    "convert",
    [
        torch.tensor,
        np.array,
        list,
        lambda parts: torch.tensor(parts, dtype=torch.uint8),
        lambda parts: torch.tensor(parts, dtype=torch.uint16),
        lambda parts: np.array(parts[::-1])[::-1],
        lambda parts: np.array(parts, dtype=">i8"),
    ],
)
def test_given_parts(convert: Callable[[list[int]], Any]) -> None:
    parts = partition(torch.tensor([[0], [1]]), 4, 3, convert([2, 0, 0, 2]))
    assert parts.dtype == torch.int32
    assert parts.tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (torch.tensor([0, 1]), r"4 nodes \(got shape \[2\]\)"),
        (torch.zeros(4, 1, dtype=torch.long), r"got shape \[4, 1\]"),
        (torch.tensor([0, 1, 2, 3]), r"\[0, 3\).*from 0 to 3"),
        (torch.tensor([0, 1, 2, -1]), r"\[0, 3\).*from -1 to 2"),
        (torch.zeros(4), "float32.*long"),
        (torch.zeros(4, dtype=torch.bool), "bool"),
    ],
)
def test_wrong_given_parts(parts: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_given(parts, num_nodes=4, num_parts=3)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"num_parts": 0}, OptionError, "num_parts=0"),
        ({"method": "metiss"}, OptionError, "metis, metis-cut, .*random.*'metiss'"),
        ({"solver": "patoh"}, OptionError, "mt-kahypar, kahypar.*'patoh'"),
        ({"preset": "best"}, OptionError, "deterministic, .*'best'"),
        ({"preset": "default", "solver": "kahypar"}, OptionError, "no preset with solver='kahypar'"),
        ({"batches": Batches()}, OptionError, "batches with method='stochastic' .got 'metis'"),
        ({"memory": 10}, OptionError, "got 'metis', which takes.*none fits"),
        ({"epsilon": 0.0}, OptionError, "epsilon.*0.0"),
        ({"epsilon": float("nan")}, OptionError, "epsilon.*nan"),
        ({"edge_index": torch.tensor([[0, 1], [1, 9]])}, DataError, "below num_nodes=4 .got 9"),
        ({"edge_index": torch.tensor([[0, -1], [1, 3]])}, DataError, "from 0 .got -1"),
        ({"edge_index": torch.rand(2, 3)}, DataError, "float32"),
        ({"edge_index": torch.tensor([0, 1])}, DataError, r"\[2, num_edges\] \(got \[2\]\)"),
        ({"train_mask": torch.ones(3, dtype=torch.bool)}, DataError, r"4 rows \(got torch.bool, \[3\]\)"),
        ({"train_mask": torch.ones(4)}, DataError, "float32"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    valid = {"edge_index": torch.tensor([[0, 1], [1, 2]]), "num_nodes": 4, "num_parts": 2}
    with pytest.raises(kind, match=words) as caught:
        partition(**{**valid, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "package", "words"),
    [
        ({"method": "metis"}, "pymetis", "pip install pymetis.*'random'"),
        ({"method": "hypergraph"}, "mtkahypar", "pip install mtkahypar.*'metis'"),
        ({"method": "hypergraph", "solver": "kahypar"}, "kahypar", r"pip install 'pyg-dist\[kahypar\]'.*'mt-kahypar'"),
    ],
)
def test_without_its_package_there_is_a_way_out(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], package: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=words):
        partition(torch.tensor([[0, 1], [1, 2]]), 4, 2, **arguments)


@pytest.mark.slow
def test_kahypar(shared_data: Path) -> None:
    """The same goal by another library: connectivity near Mt-KaHyPar's, balance, and the seed decides."""
    pytest.importorskip("kahypar", exc_type=ImportError)
    data = load_npz(shared_data / "cora.npz")
    model = build_hypergraph_model(data.edge_index, data.num_nodes)
    parts = [partition(data.edge_index, data.num_nodes, 8, "hypergraph", solver="kahypar", seed=s) for s in (0, 0, 1)]
    assert torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])
    weight = torch.bincount(parts[0].long(), torch.from_numpy(model.weight).double(), 8)
    assert float(weight.max() / weight.mean()) <= 1.0301
    other = partition(data.edge_index, data.num_nodes, 8, "hypergraph")
    assert model.connectivity(parts[0].numpy()) < 1.1 * model.connectivity(other.numpy())
    with pytest.raises(OptionError, match="with edges"):
        partition(torch.empty(2, 0, dtype=torch.long), 9, 2, "hypergraph", solver="kahypar")
