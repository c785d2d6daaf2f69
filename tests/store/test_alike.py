"""One graph in every form: a store of each file has what ``DistributedData(data)`` has, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, save_graph
from pyg_dist.cli import main
from pyg_dist.tensor import RowTensor

RNG = torch.Generator().manual_seed(0)
RING = torch.stack([torch.arange(50), torch.randint(0, 50, (50,), generator=RNG)])
SOME = torch.randint(0, 40, (2, 100), generator=RNG)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG)


GRAPHS: dict[str, dict[str, Any]] = {
    "as many edges as nodes": {
        "x": rand(50, 4), "edge_index": RING, "edge_weight": rand(50), "edge_attr": rand(50, 2), "time": rand(50),
        "my_edge_kind": torch.arange(50), "y": torch.arange(50) % 3,
    },
    "pos, no x, isolated last nodes": {"pos": rand(50, 3), "edge_index": SOME},
    "y per edge": {"edge_index": SOME, "edge_attr": rand(100, 2), "y": torch.arange(100) % 2},
    "y per edge, no num_nodes": {"edge_index": SOME, "y": torch.arange(100) % 2},
    "y per graph": {"x": rand(50, 3), "edge_index": SOME, "y": torch.tensor([1])},
    "several y per graph": {"x": rand(50, 3), "edge_index": SOME, "y": rand(1, 12)},
    "neither": {
        "x": rand(50, 3), "edge_index": SOME, "edge_label_index": SOME[:, :9], "edge_label": rand(9), "u": rand(1, 5),
        "neg_edge_index": SOME.flip(0), "scale": torch.tensor(3.0), "table": torch.arange(7), "empty": rand(0, 4),
    },
    "types": {
        "x": rand(50, 3).double(), "edge_index": SOME.int(), "half": rand(50, 2).half(), "flag": rand(50) > 0,
        "node_type": torch.arange(50, dtype=torch.int32), "small": torch.arange(50, dtype=torch.int8),
        "edge_type": torch.arange(100, dtype=torch.uint8), "edge_weight": rand(100).double(),
    },
    "masks of ten splits": {"x": rand(50, 3), "edge_index": SOME, "train_mask": rand(50, 10) > 0},
    "as many splits as nodes": {"x": rand(10, 3), "edge_index": SOME % 10, "train_mask": rand(10, 10) > 0},
    "node in a name": {"node_feature": rand(60, 2), "edge_index": SOME},
    "num_nodes": {"edge_index": SOME, "num_nodes": 70, "z": rand(70)},
    "edges alone": {"edge_index": SOME},
    "no columns": {"x": rand(50, 2), "z": rand(50, 0), "edge_index": SOME, "edge_attr": rand(100, 0)},
    "text": {"x": rand(50, 3), "edge_index": SOME, "name": "a name", "classes": ["one", "two"]},
}  # fmt: skip


def content(data: Any) -> dict[str, Any]:
    """Kinds and values of all that it has."""
    found: dict[str, Any] = {"N": data.num_nodes, "E": data.num_edges}
    for name, value in data.to_dict().items():
        rows = value.full_tensor() if isinstance(value, RowTensor) else value
        if name == "edge_index":
            rows = data.graph.full_edge_index()
        if isinstance(rows, Tensor):
            rows = (str(rows.dtype), tuple(rows.shape), rows.double().tolist())
        found[name] = (type(value).__name__, rows)
    return found


def write(data: Data, folder: Path, form: str) -> Path:
    path = folder / f"g.{form}"
    if form == "npz":
        np.savez(path, **{name: value.numpy() if isinstance(value, Tensor) else value for name, value in data})
    elif form == "pt":
        torch.save(data, path)
    else:
        save_graph(data, path)
    return path


def stored(path: Path, *options: str) -> dict[str, Any]:
    store = path.parent / "store"
    assert main(["partition", str(path), str(store), "--parts", "3", *options]) == 0
    return content(DistributedData.open(store))


FORMS = [(name, form) for k, name in enumerate(GRAPHS) for form in ("npz", ("pt", "safetensors")[k % 2])]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_store_has_what_the_graph_has(tmp_path: Path, name: str, form: str) -> None:
    data = Data(**GRAPHS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write(data, tmp_path, form)
        assert stored(path) == content(DistributedData(data))
        if form == "npz":
            grid = stored(path, "--layout", "grid", "--tiles", "2", "2", "--force")
            assert grid == content(DistributedData(data, layout="grid"))


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_sparse_matrix(tmp_path: Path, form: str) -> None:
    entries = SOME.unique(dim=1)
    matrix = torch.sparse_coo_tensor(entries, rand(entries.shape[1]), (50, 50)).to_sparse_csr()
    data = Data(adj_t=matrix, x=rand(50, 2))
    made, found = DistributedData(data), tmp_path / "store"
    assert main(["partition", str(write(data, tmp_path, form)), str(found), "--parts", "2"]) == 0
    opened = DistributedData.open(found)
    assert torch.equal(opened.graph.full_edge_index(), made.graph.full_edge_index())
    assert opened.graph.loop_rule == made.graph.loop_rule
    values = [data.adj_t.weight.full_tensor() for data in (made, opened)]
    assert torch.equal(*values)


WRONG = {
    "edge_weight": rand(7), "edge_attr": rand(7, 2), "train_mask": rand(7) > 0, "plan": rand(2), "x": rand(7, 2),
}  # fmt: skip


@pytest.mark.parametrize("form", ["npz", "pt"])
@pytest.mark.parametrize("name", WRONG)
def test_what_fits_nothing(tmp_path: Path, name: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error as in memory; a plan needs edges only."""
    data = Data(edge_index=SOME, num_nodes=50, **{name: WRONG[name]})
    with pytest.raises(ValueError, match=f"'{name}'"):
        DistributedData(data)
    path = str(write(data, tmp_path, form))
    assert main(["partition", path, str(tmp_path / "store"), "--parts", "2"]) == 1
    assert f"'{name}'" in capsys.readouterr().err
    assert main(["plan", path, "--ranks", "2", "--json"]) == 0
    assert f"'{name}' is left out" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["npz", "pt"])
def test_a_plan_needs_no_node_to_train_on(tmp_path: Path, form: str) -> None:
    data = Data(x=rand(50, 2), edge_index=SOME, train_mask=torch.zeros(50, dtype=torch.bool))
    path = str(write(data, tmp_path, form))
    assert main(["partition", path, str(tmp_path / "store"), "--parts", "2"]) == 1
    assert main(["plan", path, "--ranks", "2", "--json"]) == 0


@pytest.mark.parametrize("form", ["npz", "pt"])
def test_what_a_store_cannot_hold_is_named(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    wave = torch.ones(50, dtype=torch.complex64)
    data = Data(x=rand(50, 2), edge_index=SOME, wave=wave)
    if form == "pt":
        data.pair = (1, 2)
    found = stored(write(data, tmp_path, form))
    said = capsys.readouterr().err
    for name in {"wave", "pair"} & set(data.keys()):
        assert f"'{name}' of" in said
        del data[name]
    assert found == content(DistributedData(data))
