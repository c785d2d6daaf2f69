"""Exact resume: the same ranks go on bit for bit, others and another layout with the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import assert_all_same_bits
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Pools

import pyg_dist
from pyg_dist import checkpoint
from pyg_dist.checkpoint import snapshot
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.loader import NeighborLoader, UniformVertexLoader
from pyg_dist.nn import NodeEmbedding

HALO: dict[str, Any] = {"layout": "halo", "partition": "random"}
GRID: dict[str, Any] = {"layout": "grid"}
PLACES = [(2, GRID), (1, HALO), (2, HALO), (3, HALO), (4, {**GRID, "mesh": {"x": 2, "z": 2}})]
GROUPS = [(4, {**HALO, "mesh": {"data": 2, "part": 2}}), (4, {**GRID, "mesh": {"data": 2, "y": 2}})]
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
LOADERS = ("none", "uniform", "neighbors")


class Net(nn.Module):
    """Trained rows, batch norm and dropout between two convs."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.embedding = NodeEmbedding(data, 5)
        self.first, self.norm, self.second = DistributedSAGEConv(5, 8), nn.BatchNorm1d(8), DistributedSAGEConv(8, 4)

    def forward(self, graph: Any) -> Tensor:
        rows = self.embedding()
        x = rows[graph.n_id] if "n_id" in graph else rows
        x = F.dropout(self.norm(self.first(x, graph.edge_index)).relu(), 0.3, self.training)
        return self.second(x, graph.edge_index)


class Training:
    """A model with all that is saved, at its start."""

    def __init__(self, layout: dict[str, Any], optimizer: str, loader: str, seed: int) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(seed)
            self.data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), **layout)
            self.model = Net(self.data)
            self.model.train()
        finally:
            torch.set_default_dtype(torch.float32)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], 0.5)
        self.loader: Any = None
        if loader == "uniform":
            self.loader = UniformVertexLoader(self.data, 16, input_nodes=self.data.train_mask, seed=3)
        elif loader == "neighbors":
            self.loader = NeighborLoader(
                self.data, [3, 2], input_nodes=self.data.train_mask, batch_size=9, shuffle=True
            )

    def things(self) -> dict[str, Any]:
        loader = {} if self.loader is None else {"loader": self.loader}
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **loader}

    def epoch(self) -> list[float]:
        losses = []
        for graph in [self.data] if self.loader is None else self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(graph)[graph.train_mask], graph.y[graph.train_mask])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        self.scheduler.step()
        return losses

    def values(self) -> list[Tensor]:
        """All parameters, and the optimizer's state, whole."""
        tensors = [*self.model.state_dict().values()]
        for parameter in self.model.parameters():
            tensors += [v for v in self.optimizer.state[parameter].values() if isinstance(v, Tensor)]
        return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in tensors]


def interrupted(path: str, layout: dict[str, Any], optimizer: str, loader: str) -> tuple[list[Tensor], list[float]]:
    """Save in the middle; the values there and the losses from there on must be those of a run that loads."""
    run = Training(layout, optimizer, loader, seed=0)
    for _ in range(2):
        run.epoch()
    checkpoint.save(path, **run.things(), epoch=np.int64(2), history=[np.float32(0.5), (1, None)])
    values, losses = run.values(), [loss for _ in range(2) for loss in run.epoch()]
    resumed = Training(layout, optimizer, loader, seed=1)
    assert checkpoint.load(path, **resumed.things()) == {"epoch": 2, "history": [0.5, (1, None)]}
    assert_all_same_bits(resumed.values(), values)
    assert [loss for _ in range(2) for loss in resumed.epoch()] == losses
    assert_all_same_bits(resumed.values(), run.values())
    return values, losses


def elsewhere(path: str, layout: dict[str, Any], optimizer: str, loader: str) -> tuple[list[Tensor], list[float]]:
    run = Training(layout, optimizer, loader, seed=2)
    checkpoint.load(path, **run.things())
    return run.values(), [loss for _ in range(2) for loss in run.epoch()]


@pytest.mark.parametrize(
    ("optimizer", "loader", "places"),
    [
        ("SGD", "none", PLACES[:3]),
        ("Adam", "neighbors", PLACES[-2:]),
        *[pytest.param("SGD", of, PLACES[k : k + 3], marks=pytest.mark.slow) for k, of in enumerate(LOADERS)],
        *[pytest.param("Adam", of, PLACES[2 - k : 5 - k], marks=pytest.mark.slow) for k, of in enumerate(LOADERS)],
    ],
)
def test_the_same_ranks_go_on_bit_for_bit_and_others_with_the_same_values(
    workers: Pools, tmp_path: Path, optimizer: str, loader: str, places: list[tuple[int, dict[str, Any]]]
) -> None:
    for number, (ranks, layout) in enumerate(places):
        path = str(tmp_path / str(number))
        values, losses = workers(ranks).run(interrupted, path, layout, optimizer, loader)[0]
        for other in {(number - 1) % len(places), (number - 2) % len(places)} - {number}:
            found, after = workers(places[other][0]).run(elsewhere, path, places[other][1], optimizer, loader)[-1]
            assert_all_same_bits(found, values)
            torch.testing.assert_close(torch.tensor(after), torch.tensor(losses), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("ranks", "layout"), GROUPS, ids=["halo", "grid"])
def test_data_groups_go_on_bit_for_bit_and_ranks_without_groups_with_the_same_values(
    workers: Pools, tmp_path: Path, ranks: int, layout: dict[str, Any], loader: str
) -> None:
    """With several groups an epoch has fewer batches: ranks without groups refuse the position of a loader."""
    values, losses = workers(ranks).run(interrupted, str(tmp_path), layout, "Adam", loader)[0]
    if loader == "none":
        found, after = workers(2).run(elsewhere, str(tmp_path), HALO, "Adam", loader)[-1]
        assert_all_same_bits(found, values)
        torch.testing.assert_close(torch.tensor(after), torch.tensor(losses), rtol=1e-10, atol=1e-10)


def saved_by_all(path: str) -> list[Tensor]:
    run = Training(HALO, "Adam", "none", seed=0)
    run.epoch()
    with patch.object(snapshot, "LARGE_BYTES", 1000):
        checkpoint.save(path, **run.things())
    return run.values()


def test_large_states_are_written_by_all_ranks(workers: Pools, tmp_path: Path) -> None:
    values = workers(3).run(saved_by_all, str(tmp_path))[0]
    files = sorted(p.name.rpartition("-")[0] for p in tmp_path.glob("*/state*"))
    assert files == ["state", "state-00001", "state-00002"]
    found, _ = workers(2).run(elsewhere, str(tmp_path), HALO, "Adam", "none")[1]
    assert_all_same_bits(found, values)


def refused(path: str) -> list[str]:
    """What ``load`` says to a script that has changed, with everything as it was after each."""
    run = Training(HALO, "Adam", "uniform", seed=0)
    run.epoch()
    checkpoint.save(path, **run.things(), flag=True)
    run.epoch()
    before, said = run.values(), []
    wider = nn.Sequential(nn.Linear(3, 4))
    half = torch.optim.Adam(list(run.model.parameters())[1:])
    for things in (
        {"model": wider},
        {"model": run.model.first},
        {**run.things(), "optimizer": half},
        {**run.things(), "ema": run.model},
        {**run.things(), "flag": 3},
        {**run.things(), "loader": Training(HALO, "Adam", "neighbors", seed=0).loader},
    ):
        with pytest.raises(ValueError, match="Expected") as caught:
            checkpoint.load(path, **things)
        assert_all_same_bits(run.values(), before)
        said.append(str(caught.value))
    for state in (
        {"when": object()},
        {"z": torch.zeros(2, dtype=torch.complex64)},
        {"one of": {1, 2}},
        {"lazy": nn.LazyLinear(2)},
    ):
        with pytest.raises(ValueError, match="Expected") as caught:
            checkpoint.save(path, **run.things(), **state)
        said.append(str(caught.value))
    with pytest.raises(ValueError, match=r"Expected a checkpoint in .*none there"):
        checkpoint.load(path + " none there", **run.things())
    return said


def test_what_does_not_fit_is_refused_in_a_line_before_anything_is_loaded(workers: Pools, tmp_path: Path) -> None:
    (words, others) = workers(2).run(refused, str(tmp_path))
    assert all("\n" not in line for line in words + others)
    for line, part in zip(
        words,
        ("'model.embedding.weight'", "'model.embedding.weight'", "parameters by group", "'ema'", "'flag' to have",
         "a loader with the same options",
         "'when' (got object)", "'z' (got torch.complex64", "'one of' (got set)", "'lazy.weight' (got a lazy one)"),
        strict=True,
    ):  # fmt: skip
        assert part in line


def other_states(path: str) -> list[str]:
    said = []
    for width, number in ((2, pyg_dist.rank()), (2 + pyg_dist.rank(), 0)):
        with pytest.raises(pyg_dist.errors.AgreementError) as caught:
            checkpoint.save(path, nn.Linear(2, width), number=number)
        said.append(str(caught.value))
    return said


def test_ranks_with_other_states(workers: Pools, tmp_path: Path) -> None:
    for said in workers(2).run(other_states, str(tmp_path)):
        assert all("Expected the same on every rank: state" in line for line in said)


def parts(path: str) -> tuple[list[int], Any]:
    graph = random_graph(20, 60, dtype=torch.float32)
    given = torch.arange(20) // 5 % pyg_dist.world_size()
    data = pyg_dist.DistributedData(graph, partition=given)
    checkpoint.save(path, nn.Linear(2, 2), data=data)
    found = checkpoint.parts(path, "metis")
    assert torch.equal(found, given)
    checkpoint.load(path, nn.Linear(2, 2), data=data)
    checkpoint.save(path, nn.Linear(2, 2), data=pyg_dist.DistributedData(graph, layout="grid"))
    assert checkpoint.parts(path, "metis") == "metis"
    checkpoint.save(path, nn.Linear(2, 2), data=data)
    return given.tolist(), found.tolist()


def other_ranks(path: str) -> Any:
    return checkpoint.parts(path, "metis")


def test_parts_are_kept_for_as_many_ranks(workers: Pools, tmp_path: Path) -> None:
    workers(2).run(parts, str(tmp_path))
    assert workers(3).run(other_ranks, str(tmp_path)) == ["metis"] * 3
