"""The examples run alone and on two ranks, with the same numbers; one of them under each launcher."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from launching import run_script
from random_graphs import random_graph

from pyg_dist.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def _printed(launcher: str, num_ranks: int, name: str, *args: str) -> str:
    """What an example prints, which must end well and complain of nothing."""
    script = EXAMPLES / f"{name}.py"
    ended = run_script(launcher, num_ranks, script, "--epochs", "20", *args, ends_whole=True)
    assert set(ended.codes) == {0}, ended.stdout + ended.stderr
    assert "Error" not in ended.stderr
    return ended.stdout


@functools.cache
def _printed_alone(name: str) -> str:
    return _printed("ranks", 1, name)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_digits(tmp_path: Path) -> None:
    """Under torchrun they run as the README's demo, in tests/docs; on one rank in two parts, below."""
    picture = tmp_path / "curves.png"
    printed = _printed("mpirun", 2, "digits", "--picture", str(picture))
    losses = _numbers("\n".join(line for line in printed.splitlines() if line.startswith("epoch")))
    assert losses[:2] == losses[2:]  # ours at epochs 10 and 20, then stock PyG's
    assert losses[1] < 0.1
    accuracy, stock_accuracy = re.findall(r"(?:accuracy|with PyG)  (.*)", printed)
    assert accuracy == stock_accuracy
    assert _numbers(accuracy)[-1] > 0.95
    assert "within the bound for fp32" in printed
    assert int(re.findall(r"rank 0 sent ([\d,]+) bytes", printed)[0].replace(",", "")) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_difference_is_noticed() -> None:
    compare = _module("compare")
    gradient = torch.linspace(-1, 1, 50)

    def history(loss: float, first: torch.Tensor, last: torch.Tensor) -> object:
        return compare.History([1.0, loss], [{"weight": first}, {"weight": last}])

    stock = history(0.5, gradient, gradient)
    assert compare.compare(history(0.5, gradient, gradient), stock).share_of_bound == 0
    assert compare.compare(history(0.5, gradient, gradient * (1 + 1e-6)), stock).is_rounding
    for wrong in (
        history(0.5001, gradient, gradient),
        history(0.5, gradient * 1.001, gradient),
        history(0.5, gradient, gradient * 1.001),
        history(float("nan"), gradient, gradient),
        history(0.5, gradient, gradient * torch.nan),
    ):
        assert not compare.compare(wrong, stock).is_rounding
    with pytest.raises(ValueError, match="Expected gradients of"):
        compare.compare(compare.History([1.0, 0.5], [{}, {}]), stock)


@pytest.mark.slow
def test_full_batch_gcn_alone() -> None:
    printed = _numbers(_printed_alone("full_batch_gcn"))
    assert len(printed) == 8  # loss and three accuracies, at epochs 10 and 20
    assert printed[-1] > 0.9


@pytest.mark.slow
def test_edge_weights_alone() -> None:
    accuracy, true_edges, noise = _numbers(_printed_alone("edge_weights"))[-3:]
    assert accuracy > 0.7
    assert true_edges > noise + 0.1


def test_minibatches_alone() -> None:
    assert _numbers(_printed_alone("minibatch_4d"))[-1] > 0.85


def test_minibatches_of_two_data_groups() -> None:
    assert _numbers(_printed("ranks", 2, "minibatch_4d", "--mesh", "data=2"))[-1] > 0.85


@pytest.mark.parametrize(
    "name",
    [
        "minibatch_4d",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("neighbor_sampling", "edge_weights", "gat", "hetero")),
    ],
)
def test_two_ranks_go_on_where_one_has_ended(name: str, tmp_path: Path) -> None:
    """All that is printed then is what one rank prints, once: the other rank is silent."""
    known = _printed("ranks", 1, name, "--epochs", "10", "--resume", str(tmp_path)).splitlines()
    again = _printed("ranks", 2, name, "--resume", str(tmp_path))
    whole = _printed_alone(name).splitlines()
    (first,) = (number for number, line in enumerate(whole) if line.startswith("epoch 20:"))
    assert [line for line in known if line.startswith("epoch")] == whole[:first]
    assert again.startswith("epoch 20:")
    np.testing.assert_allclose(_numbers(again), _numbers("\n".join(whole[first:])), atol=2e-3)


@pytest.mark.slow
def test_the_comparison_is_of_a_run_in_two_parts(tmp_path: Path) -> None:
    options = "--resume", str(tmp_path / "run"), "--picture", str(tmp_path / "curves.png")
    _printed("ranks", 1, "digits", "--epochs", "10", *options)
    printed = _printed("ranks", 1, "digits", *options)  # the status says that they are alike
    assert "within the bound for fp32" in printed
    assert "rank 0 sent 0 bytes" in printed
    assert printed.startswith("epoch 20:")


@pytest.mark.slow
def test_gat_alone() -> None:
    assert _numbers(_printed_alone("gat"))[-1] > 0.85


@pytest.mark.slow
def test_full_batch_gcn_on_two_ranks() -> None:
    """It drops out: equal losses mean equal masks."""
    alone = _numbers(_printed_alone("full_batch_gcn"))
    np.testing.assert_allclose(_numbers(_printed("ranks", 2, "full_batch_gcn")), alone, atol=2e-3)


@pytest.mark.parametrize("has_labels", [False, True])
def test_int2_normalises_what_it_sends(has_labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's input, but for constant features, whose sums are sent once."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module, entered = _module("full_batch_int2"), []

    class Conv(module.SAGEConv):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            entered.append(x.detach())
            return super().forward(x, edge_index)

    monkeypatch.setattr(module, "SAGEConv", Conv)
    graph = random_graph(40, 200, num_features=7, seed=3)
    graph.x, graph.y = 5 + graph.x.float(), torch.arange(40) % 3
    graph.train_mask = graph.test_mask = torch.arange(40) % 2 == 0
    module.train(graph, 3, has_labels, Namespace(hidden=8, dropout=0.5, rate=0.5, lr=0.01, epochs=1))
    is_normal = [float(x.mean(1).abs().max()) < 1e-5 for x in entered[:3]]
    assert is_normal == [has_labels, True, True]
    assert has_labels or torch.equal(entered[0], graph.x)


@pytest.mark.slow
def test_full_batch_int2(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    printed = _printed("ranks", 2, "full_batch_int2", "--picture", str(picture))
    lines = re.findall(r"(.*): accuracy (\S+), rank 0 sent ([\d,]+) bytes", printed)
    assert [name for name, _, _ in lines] == ["fp32", "int2", "int2 + labels"]
    assert min(float(accuracy) for _, accuracy, _ in lines) > 0.85
    sent = [int(num_bytes.replace(",", "")) for _, _, num_bytes in lines]
    assert 0 < sent[1] < sent[0]  # evaluation, every epoch here, goes in full precision
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_read_npz(tmp_path: Path) -> None:
    read_npz = _module("example_graphs").read_npz
    links, y = np.array([[0, 1], [1, 2]], np.int32), np.array([0, 1, 0, -1, 1, 1], np.int8)
    x = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 0], [3, 0, 4], [0, 0, 0], [0, 5, 0]], np.float32)
    masks = {name: np.arange(6) == k for k, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    np.savez(tmp_path / "dense.npz", edge_index=links, x=x, y=y, **masks)
    data = read_npz(str(tmp_path / "dense.npz"))
    assert torch.equal(data.edge_index, torch.from_numpy(links).long())
    assert torch.equal(data.x, torch.from_numpy(x))
    assert torch.equal(data.val_mask, torch.arange(6) == 1)

    sparse = {"x_indptr": [0, 1, 2, 2, 4, 4, 5], "x_indices": [0, 1, 0, 2, 1], "x_data": [1.0, 2, 3, 4, 5]}
    arrays = {name: np.asarray(values) for name, values in sparse.items()}
    np.savez(tmp_path / "sparse.npz", edge_index=links, undirected=True, y=y, x_shape=np.array([6, 3]), **arrays)
    data = read_npz(str(tmp_path / "sparse.npz"))
    assert sorted(data.edge_index.t().tolist()) == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert torch.equal(data.x, torch.from_numpy(x))
    assert [int(data[name].sum()) for name in masks] == [3, 1, 1]
    assert not (data.train_mask | data.val_mask | data.test_mask)[3]  # it has no label


@pytest.mark.slow
def test_ogbn_products_from_a_store(tmp_path: Path) -> None:
    pytest.importorskip("ogb")
    store = str(tmp_path / "store")
    graph = "rmat:scale=9,edges=5000,features=8,classes=4"
    assert main(["partition", graph, store, "--parts", "2", "--model", "random"]) == 0
    options = ("--hidden", "16", "--layers", "2", "--dropout", "0", store)
    alone, together = (_numbers(_printed("ranks", ranks, "ogbn_products", *options)) for ranks in (1, 2))
    assert np.allclose(alone, together, atol=0.01)  # the loss, and the accuracies of training, validation and test
    assert len(alone) == 4
    assert min(alone[1:]) > 0.5
