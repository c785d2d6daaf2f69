"""The other benchmarks run to their end on small graphs and write results. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import power_law
import pytest
from launching import run_script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ONE_TURN = "--rounds 1 --epochs 1 --retakes 0"
RUNS = {
    "hetero": ("ranks", 1, f"--edges 20000 --models sage {ONE_TURN} --output OUT"),
    "mesh": ("ranks", 1, f"--degrees 20 --batches 2 {ONE_TURN} --output OUT"),
    "sampling": ("ranks", 1, "--graphs small --cover GRAPH --rounds 1 --results OUT"),
    "quantize": ("ranks", 1, "--epoch --graph tiny --rounds 2 --results OUT"),
    "store": ("ranks", 1, "--edges 20000 --models stream --folder FOLDER --out OUT"),
    "crossing": ("ranks", 1, "tiny --machines 4 2 --output OUT"),
    "partition": ("ranks", 1, "GRAPH --parts 3 --methods metis metis-cover --output OUT"),
    "setup_memory": ("ranks", 1, "--nodes 2000 --edges 20000 --features 8 --output OUT"),
    "shared_memory": ("torchrun", 2, "--kib 512 --turns 2 --output OUT"),
    "checks": ("torchrun", 2, "--data GRAPH --pairs 2 --layouts halo --out OUT"),
    "network": ("mpirun", 2, "--rounds 1 --sizes 1024 --graph GRAPH --model small --epochs 1 --out OUT"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_run(name: str, tmp_path: Path) -> None:
    launcher, num_ranks, options = RUNS[name]
    fields = {key: value.numpy() for key, value in power_law.load("tiny").to_dict().items()}
    np.savez(tmp_path / "graph.npz", **fields, val_mask=~fields["train_mask"], test_mask=~fields["train_mask"])
    files = {"OUT": tmp_path / "out.json", "GRAPH": tmp_path / "graph.npz", "FOLDER": tmp_path / "folder"}
    arguments = [str(files.get(word, word)) for word in options.split()]
    ended = run_script(launcher, num_ranks, BENCHMARKS / f"{name}.py", *arguments)
    assert set(ended.codes) == {0}, ended.stderr
    assert json.loads(files["OUT"].read_text())
