"""Trainers, metrics and models of other libraries compute what they do on stock PyG; runs go on with other ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launching import run_script
from random_graphs import random_graph
from torch import nn
from torch.utils import _pytree as pytree
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import LINKX, CorrectAndSmooth, RGCNConv
from torch_geometric.nn.models import GCN
from workers import Pools, on_ranks

ROOT = Path(__file__).resolve().parents[2]


def stock_losses(optimizer: Callable[..., torch.optim.Optimizer], epochs: int) -> list[float]:
    """Those of the model that all scripts here train."""
    torch.manual_seed(0)
    data = KarateClub()[0]
    model = GCN(34, 16, num_layers=2, out_channels=4)
    updates, losses = optimizer(model.parameters()), []
    for _ in range(epochs):
        updates.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        updates.step()
        losses.append(loss.item())
    return losses


def losses_of(printed: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"^epoch (\d+) loss (\S+)$", printed, re.M)}


@pytest.mark.parametrize(
    ("script", "package", "launcher", "num_ranks"),
    [
        ("with_accelerate", "accelerate", "ranks", 2),
        pytest.param("with_fabric", "lightning", "ranks", 2, marks=pytest.mark.slow),
        ("with_lightning", "lightning", "ranks", 1),
        pytest.param("with_lightning", "lightning", "torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_trainers(
    script: str, package: str, launcher: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(package) is None:  # an import would patch torch in this process
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    ended = run_script(launcher, num_ranks, ROOT / "examples" / f"{script}.py", "--epochs", "6")
    assert set(ended.codes) == {0}, ended.stderr
    assert len(re.findall("^epoch", ended.stdout, re.M)) == 6, "one rank prints"
    expected = stock_losses(lambda p: torch.optim.SGD(p, lr=0.1), 6)
    np.testing.assert_allclose(list(losses_of(ended.stdout).values()), expected, atol=2e-6)
    if script == "with_lightning":
        assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["best.ckpt"]
        (metrics,) = tmp_path.rglob("metrics.csv")
        assert len(metrics.read_text().splitlines()) == 7


@pytest.mark.slow
def test_lightning_goes_on_from_its_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    monkeypatch.chdir(tmp_path)
    losses = dict[int, float]()
    for num_ranks, epochs in ((1, "3"), (2, "6")):
        script = ROOT / "examples" / "with_lightning.py"
        ended = run_script("ranks", num_ranks, script, "--epochs", epochs, "--resume", str(tmp_path / "run"))
        assert set(ended.codes) == {0}, ended.stderr
        found = losses_of(ended.stdout)
        assert not losses.keys() & found.keys()
        losses |= found
    expected = stock_losses(lambda p: torch.optim.SGD(p, lr=0.1), 6)
    np.testing.assert_allclose(list(losses.values()), expected, atol=2e-6)


@pytest.mark.slow
def test_resuming_on_other_numbers_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 1 and 3 ranks go on where the last ones stopped, the optimizer's moments included."""
    page = (ROOT / "docs/how-to/save-and-resume.md").read_text()
    script = tmp_path / "train.py"
    (text,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert "epochs(1, 6)" in text
    monkeypatch.chdir(tmp_path)
    found: dict[int, float] = {}
    for end, num_ranks in ((4, 2), (7, 1), (10, 3)):
        script.write_text(text.replace("epochs(1, 6)", f"epochs(1, {end})"))
        ended = run_script("ranks", num_ranks, script)
        assert set(ended.codes) == {0}, ended.stderr
        found |= losses_of(ended.stdout)
    assert list(found) == list(range(1, 10))
    np.testing.assert_allclose(list(found.values()), stock_losses(lambda p: torch.optim.Adam(p, lr=0.01), 9), atol=2e-6)


# ---- Models and metrics, each on stock PyG and on ours --------------------------------------------------------------


def trained(make: Callable[[], nn.Module], data: Any, inputs: Callable[[Any], tuple[Any, ...]], wrap: Any) -> list[Any]:
    """Outputs, loss and gradients of three epochs."""
    torch.manual_seed(0)
    model = wrap(make().double())
    updates = torch.optim.Adam(model.parameters(), lr=0.01)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        updates.zero_grad()
        out = model(*inputs(data))
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        updates.step()
        averaged.update_parameters(model)
    return [out.detach(), loss.detach(), *(p.detach() for p in averaged.parameters()), averaged(*inputs(data)).detach()]


def linkx() -> nn.Module:
    return LINKX(60, 5, 8, 4, num_layers=2)


def rgcn() -> nn.Module:
    return RGCNConv(5, 4, num_relations=3)


def with_edges(data: Any) -> tuple[Any, ...]:
    return data.x, data.edge_index


def with_relations(data: Any) -> tuple[Any, ...]:
    return data.x, data.edge_index, data.edge_type


def smoothed(data: Any, wrap: Any) -> list[Any]:
    steps = wrap(CorrectAndSmooth(3, 0.8, 3, 0.8))
    soft = data.x[:, :4].softmax(dim=-1)
    known = data.y[data.train_mask]
    corrected = steps.correct(soft, known, data.train_mask, data.edge_index)
    return [corrected, steps.smooth(corrected, known, data.train_mask, data.edge_index)]


def in_bfloat16(data: Any, wrap: Any) -> list[Any]:
    torch.manual_seed(0)
    model = wrap(GCN(5, 8, num_layers=2, out_channels=4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(data.x.float(), data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def metrics(data: Any, wrap: Any) -> list[Any]:
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    predicted, truth = data.x[:, :4].argmax(dim=-1), data.y
    if wrap is not whole:
        predicted, truth = predicted.full_tensor(), truth.full_tensor()
    found = [sklearn_metrics.f1_score(truth.numpy(), predicted.numpy(), average="macro")]
    try:
        from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
    except ImportError:
        return [torch.tensor(found)]
    scores = data.x[:, :4] if wrap is whole else data.x[:, :4].full_tensor()
    for alone in (True, False):
        found.append(MulticlassF1Score(num_classes=4, average="macro", sync_on_compute=alone)(predicted, truth).item())
    found.append(MulticlassAUROC(num_classes=4)(scores.softmax(-1), truth).item())
    return [torch.tensor(found)]


def whole(model: Any) -> Any:
    return model


def linkx_script(data: Any, wrap: Any) -> list[Any]:
    return trained(linkx, data, with_edges, wrap)


def rgcn_script(data: Any, wrap: Any) -> list[Any]:
    return trained(rgcn, data, with_relations, wrap)


@pytest.mark.slow
@on_ranks(3)
@pytest.mark.parametrize(
    ("script", "tolerance"),
    # Adam divides by the root of moments that are near 0 in LINKX.
    [(linkx_script, 1e-8), (rgcn_script, 1e-10), (smoothed, 1e-10), (in_bfloat16, 3e-2), (metrics, 1e-6)],
    ids=["LINKX and EMA", "RGCN and EMA", "correct and smooth", "autocast", "metrics"],
)
def test_models_and_metrics(script: Callable[[Any, Any], list[Any]], tolerance: float) -> None:
    """On every rank: the same numbers as stock PyG's."""
    from pyg_dist import DistributedData, distribute

    graph = random_graph(60, 600, seed=1)
    graph.edge_type = torch.arange(600) % 3
    graph.y = torch.arange(60) % 4
    expected = script(graph, whole)
    found = script(DistributedData(graph), distribute)
    assert len(found) == len(expected) > 0
    for ours, stock in zip(found, expected, strict=True):
        value = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(value, stock, rtol=tolerance, atol=tolerance)


def metrics_of_rows(data: Any) -> dict[str, Any]:
    """What torchmetrics computes of rows, by metric: of two updates, and of a call and of what calls add up to."""
    import torchmetrics

    by_class, binary = {"task": "multiclass", "num_classes": 4}, {"task": "binary"}
    scores, truth = data.x[:, :4].softmax(dim=-1), data.y % 4
    classes = (scores, truth)
    inputs: list[tuple[Any, tuple[Any, ...]]] = [
        (torchmetrics.ConfusionMatrix(**by_class), classes),
        (torchmetrics.ConfusionMatrix(**by_class, dist_sync_on_step=True), classes),
        (torchmetrics.StatScores(**by_class), (scores[data.train_mask].argmax(-1), truth[data.train_mask])),
        (torchmetrics.AUROC(**by_class), classes),
        (torchmetrics.AUROC(**binary, thresholds=20), (scores[:, 0], (truth == 0).long())),
        (torchmetrics.AveragePrecision(**binary), (scores[:, 0], (truth == 0).long())),
        (torchmetrics.ROC(**by_class), classes),
        (torchmetrics.HingeLoss(**by_class), classes),
        (torchmetrics.R2Score(), (data.x[:, 0], data.x[:, 1])),
        (torchmetrics.SumMetric(), (data.x[:, 0],)),
        (torchmetrics.MinMaxMetric(torchmetrics.HammingDistance(**by_class)), classes),
        (torchmetrics.MetricCollection([torchmetrics.F1Score(**by_class), torchmetrics.ROC(**by_class)]), classes),
    ]  # fmt: skip
    found = {}
    for number, (metric, given) in enumerate(inputs):
        name = f"{number} {type(metric).__name__}"
        metric.update(*given)
        metric.update(*given)
        found[f"{name}, updates"] = metric.compute()
        metric.reset()
        found[f"{name}, call"] = metric(*given)
        found[f"{name}, calls"] = metric.compute()
    return found


def metrics_here(layout: str) -> dict[str, Any]:
    import torchmetrics

    from pyg_dist import DistributedData
    from pyg_dist.errors import MixedRowsError

    others = torchmetrics.SumMetric()  # of this rank's numbers, which torchmetrics adds up
    others.update(1.0)
    data = DistributedData(random_graph(60, 600, seed=1), layout=layout)
    found = metrics_of_rows(data)
    found["ranks"] = others.compute()
    kept = torchmetrics.KendallRankCorrCoef(sync_on_compute=False)
    kept.update(data.x[:, 0], data.x[:, 1])
    with pytest.raises(MixedRowsError, match="or is given all of them, needs sync_on_compute=False"):
        kept.compute()
    return pytree.tree_map(lambda value: getattr(value, "full_tensor", value.clone)(), found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_metrics_count_each_row_once(workers: Pools, layout: str, world_size: int) -> None:
    pytest.importorskip("torchmetrics")
    expected = {**metrics_of_rows(random_graph(60, 600, seed=1)), "ranks": torch.tensor(float(world_size))}
    for found in workers(world_size).run(metrics_here, layout):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
