"""Wrong calls and solvers that fail: one line on every rank, and never the parts of another model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from random_graphs import random_graph
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition import kahypar

NUM_NODES = 40


def messages(folder: str) -> dict[str, str]:
    """What each call ends with on this rank."""
    graph = random_graph(NUM_NODES, 300)
    world_size = pyg_dist.world_size()

    def ends(**options: Any) -> str:
        try:
            found = DistributedData(graph, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"no error: {found.plan.partition}"

    def fails(error: Exception, module: Any, name: str, **options: Any) -> str:
        with mock.patch.object(module, name, side_effect=error):
            return ends(**options)

    def without(package: str, **options: Any) -> str:
        with mock.patch.dict(sys.modules, {package: None}):
            return ends(**options)

    def stored(name: str) -> str:
        try:
            return ends(partition=Plan.load(Path(folder) / name))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    import pymetis

    mtkahypar = kahypar._mtkahypar()
    other = random_graph(NUM_NODES, 300, seed=5)
    stale = Plan.of(other.edge_index, torch.arange(NUM_NODES) % world_size, world_size)
    more = Plan.of(graph.edge_index, torch.arange(NUM_NODES) % (world_size + 1), world_size + 1)
    return {
        "epsilon below 0": ends(epsilon=-0.01),
        "epsilon 0": ends(epsilon=0),
        "epsilon 1": ends(epsilon=1.0),
        "epsilon nan": ends(epsilon=float("nan")),
        "epsilon in words": ends(epsilon="0.1"),
        "unknown model": ends(partition="covers"),
        "no model": ends(partition=None),
        "a number": ends(partition=4),
        "cover and post": ends(partition="cover", exchange="post"),
        "cover and pre": ends(partition="cover", exchange="pre"),
        "too short": ends(partition=torch.zeros(NUM_NODES - 1, dtype=torch.long)),
        "a part too many": ends(partition=torch.full((NUM_NODES,), world_size)),
        "a part below 0": ends(partition=np.full(NUM_NODES, -1)),
        "parts as floats": ends(partition=torch.zeros(NUM_NODES)),
        "seed": ends(partition="hypergraph", seed=0.5),
        "stale plan": ends(partition=stale),
        "plan of more ranks": ends(partition=more),
        "broken plan": stored("broken"),
        "no mtkahypar": without("mtkahypar", partition="hypergraph"),
        "cover without mtkahypar": without("mtkahypar", partition="cover"),
        "no pymetis": without("pymetis", partition="metis"),
        "METIS fails": fails(RuntimeError("METIS_ERROR"), pymetis, "part_graph", partition="metis"),
        "METIS lacks memory": fails(MemoryError(), pymetis, "part_graph", partition="metis-cut"),
        "Mt-KaHyPar fails": fails(
            mtkahypar.InvalidInputError("bad\nmodel"), kahypar, "_initializer", partition="hypergraph"
        ),
        "cover lacks memory": fails(MemoryError(), kahypar, "_initializer", partition="cover"),
    }


EXPECTED = {
    "epsilon below 0": "OptionError: Expected 0 < epsilon < 1",
    "epsilon 0": "OptionError: Expected 0 < epsilon < 1",
    "epsilon 1": "OptionError: Expected 0 < epsilon < 1",
    "epsilon nan": "OptionError: Expected 0 < epsilon < 1",
    "epsilon in words": "OptionError: Expected 0 < epsilon < 1",
    "unknown model": "OptionError: Expected partition to be 'metis'",
    "no model": "OptionError: Expected partition to be 'metis'",
    "a number": "OptionError: Expected partition to be 'metis'",
    "cover and post": "OptionError: Expected exchange='hybrid' with partition='cover' (got 'post'",
    "cover and pre": "OptionError: Expected exchange='hybrid' with partition='cover' (got 'pre'",
    "too short": "DataError: Expected 'partition' to have one part for each of 40 nodes",
    "a part too many": "DataError: Expected parts in [0, ",
    "a part below 0": "DataError: Expected parts in [0, ",
    "parts as floats": "DataError: Expected 'partition' to hold integers",
    "seed": "OptionError: Expected seed to be an integer",
    "stale plan": "AgreementError: Expected",
    "plan of more ranks": "AgreementError: Expected",
    "broken plan": "DataError: Expected",
    "no mtkahypar": "MissingPackageError: Expected mtkahypar",
    "cover without mtkahypar": "MissingPackageError: Expected mtkahypar",
    "no pymetis": "MissingPackageError: Expected pymetis",
    "METIS fails": "OptionError: Expected METIS to find parts (got: METIS_ERROR; it gives up at SIGTERM, too)",
    "METIS lacks memory": "OptionError: Expected METIS to find parts (got: MemoryError)",
    "Mt-KaHyPar fails": "OptionError: Expected Mt-KaHyPar to find parts (got: bad model)",
    "cover lacks memory": "OptionError: Expected Mt-KaHyPar to find parts (got: MemoryError)",
}
NAMED = {"no mtkahypar": "pip install mtkahypar", "no pymetis": "pip install pymetis", "cover and post": "'hypergraph'"}


@pytest.mark.parametrize("world_size", [3])
def test_one_line_on_every_rank(workers: Pools, tmp_path: Path, world_size: int) -> None:
    (tmp_path / "broken").write_bytes(b"\x00 no plan")
    for rank, found in enumerate(workers(world_size).run(messages, str(tmp_path))):
        assert set(found) == set(EXPECTED)
        for name, message in found.items():
            assert message.startswith(EXPECTED[name]), (rank, name, message)
            assert "\n" not in message, (rank, name)
            assert NAMED.get(name, "") in message, (rank, name, message)
