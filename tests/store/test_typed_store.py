"""Stores of graphs with types: opened as ``DistributedData`` makes them, planned, damaged, interrupted."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from against_stock import assert_same
from stored_graphs import typed_graph
from torch import Tensor
from torch_geometric.nn import HeteroConv, SAGEConv
from workers import Pools

from pyg_dist import DistributedData, distribute, save_graph
from pyg_dist.backend.session import session
from pyg_dist.cli import conversion, main
from pyg_dist.data.stored_graph import rank_of_part
from pyg_dist.data.stored_types import stored_types_plan
from pyg_dist.errors import PygDistError
from pyg_dist.store.folder import lock
from pyg_dist.store.source import Source
from pyg_dist.store.typed_store import TypesManifest

PARTS = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that the command has written."""
    folder = tmp_path_factory.mktemp("typed")
    save_graph(typed_graph(), folder / "graph.safetensors")
    assert main(["partition", str(folder / "graph.safetensors"), str(folder / "store"), "--parts", str(PARTS)]) == 0
    return folder / "store"


def owners_in(path: str, num_ranks: int) -> dict[str, Tensor]:
    """The rank of each node, by type, read from the store."""
    manifest = TypesManifest.load(Path(path))
    stores = manifest.halo_stores(Path(path))
    ranks, found = rank_of_part(Path(path), list(stores.edges.values()), num_ranks), {}
    for kind, own in stores.nodes.items():
        found[kind] = torch.empty(manifest.types[kind], dtype=torch.int64)
        for part in range(PARTS):
            found[kind][own.node_id([part])] = ranks[part]
    return found


def opened(num_ranks: int, path: str, hierarchy: Any = "off") -> None:
    """Rows, edges, messages and plan are those of the graph in memory with the same owners, and so is training."""
    graph = typed_graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"allow_nan": True, "hierarchy": hierarchy}
        found: Any = DistributedData.open(path, **options)
        made: Any = DistributedData(copy.copy(graph), partition=owners_in(path, num_ranks), **options)
    assert found.metadata() == made.metadata()
    assert (found.name, float(found.scale), found["venue"].note) == ("typed", 2.5, "three")
    for kind in graph.node_types:
        assert torch.equal(found.node_shardings[kind].global_id, made.node_shardings[kind].global_id)
        for name, value in made[kind].items():
            if name == "num_nodes":
                continue
            stored = found[kind][name]
            local = (stored.to_local(), value.to_local()) if hasattr(value, "to_local") else (stored, value)
            assert torch.equal(*(rows.nan_to_num() for rows in local)) if isinstance(value, Tensor) else stored == value
    for relation in graph.edge_types:
        shares = [data[relation].edge_index.graph.share for data in (found, made)]
        assert torch.equal(shares[0].edge_id, shares[1].edge_id)
        assert shares[0].sum_transfer.sent == shares[1].sum_transfer.sent
        assert torch.equal(found[relation].edge_weight.to_local(), made[relation].edge_weight.to_local())
        assert torch.equal(found[relation].edge_index.full_tensor(), graph[relation].edge_index)
    assert found.plan.to_dict()["relations"].keys() == made.plan.to_dict()["relations"].keys()
    assert {plan.two_levels for plan in found.plan.relations.values()} == {hierarchy == "on"}
    alone = stored_types_plan(Path(path), num_ranks, "hybrid", 2 if hierarchy == "on" else None, hierarchy)
    assert (alone.nodes, alone.hash) == (found.plan.nodes, found.plan.hash)
    for relation, plan in alone.relations.items():
        for other in (found.plan.relations[relation], made.plan.relations[relation]):
            assert plan.pairs == other.pairs
            for one, two in zip(plan.sizes, other.sizes, strict=True):
                assert replace(one, inner=two.inner) == two  # rows have an order for all relations together
    torch.manual_seed(0)
    kinds = ("venue", "paper")
    relations = [r for r in graph.edge_types if {r[0], r[-1]} <= set(kinds)]
    stock = HeteroConv({relation: SAGEConv((5, 5), 3) for relation in relations}).double()
    ours, results = distribute(copy.deepcopy(stock)), []
    for model, data in ((ours, found), (stock, graph)):
        out = model(
            {kind: data[kind].x for kind in kinds}, {relation: data[relation].edge_index for relation in relations}
        )
        sum(rows[data[kind].train_mask].square().mean() for kind, rows in out.items()).backward()
        results.append(out | {name: p.grad for name, p in model.named_parameters()})
    assert_same(*results)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_opened_by_ranks(workers: Pools, store: Path, num_ranks: int) -> None:
    workers(num_ranks).run(opened, num_ranks, str(store))


def opened_on_machines(num_ranks: int, path: str) -> None:
    session.shutdown()
    os.environ["PYG_DIST_MACHINES"] = "0,0,1,1"[: 2 * num_ranks - 1]
    session.init()
    try:
        opened(num_ranks, path, "on")
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        session.shutdown()
        session.init()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4])
def test_opened_in_two_levels(workers: Pools, store: Path, num_ranks: int) -> None:
    workers(num_ranks).run(opened_on_machines, num_ranks, str(store))


def test_commands(store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``plan`` has a row for each relation, of the file and of the store alike; ``doctor`` reads all files."""
    graph = str(store.parent / "graph.safetensors")
    plans = []
    for name in (graph, str(store)):
        for levels in ([], ["--ranks-per-node", "2", "--hierarchy", "on"]):
            assert main(["plan", name, "--ranks", str(PARTS), "--json", "--widths", "8", *levels]) == 0
            plans.append(json.loads(capsys.readouterr().out))
    assert (plans[0], plans[1]["relations"].keys()) == (plans[2], plans[3]["relations"].keys())
    assert {relation["levels"] for relation in plans[1]["relations"].values()} == {2}
    assert main(["plan", str(store), "--ranks", "4", "--ranks-per-node", "2", "--hierarchy", "on"]) == 0
    assert "levels  rows that leave a machine" in capsys.readouterr().out
    assert main(["plan", str(store), "--ranks", "2", "4"]) == 0
    text = capsys.readouterr().out
    assert all(text.count(" ".join(relation)) == 2 for relation in typed_graph().edge_types)
    assert main(["doctor", "--store", str(store)]) == 0
    assert "all as the manifest says" in capsys.readouterr().out
    for command in (
        ["partition", graph, str(store), "--parts", "2"],
        ["partition", graph, str(tmp_path / "grid"), "--parts", "2", "--layout", "grid"],
        ["partition", graph, str(tmp_path / "many"), "--parts", "1000"],
        ["partition", graph, "--parts", "2"],
        ["partition", graph, str(tmp_path / "many"), "--parts", "2", "--columns", "source,target"],
        ["plan", graph, "--ranks", "2", "--save", str(tmp_path / "plan")],
        ["plan", graph, "--ranks", "2", "--widths", "0"],
        ["plan", graph, "--ranks", "2", "--ranks-per-node", "0"],
        ["plan", graph, "--ranks", "2", "--data-groups", "2"],
        ["plan", str(store), "--ranks", "2", "--partition", "random"],
        ["plan", str(store), "--ranks", "5"],
    ):
        assert main(command) != 0, command
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with lock(tmp_path / "second.new" / "parts" / ".partial" / "lock"):  # of another writer
        for options in ([], ["--force"], ["--resume"]):
            assert main(["partition", graph, str(tmp_path / "second"), "--parts", str(PARTS), *options]) == 1
            assert "Expected no other writer" in capsys.readouterr().err
    assert main(["partition", graph, str(store), "--parts", str(PARTS), "--force"]) == 0
    assert not any(store.with_name(f"{store.name}.{kind}").exists() for kind in ("new", "old"))


def test_a_refused_attribute_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, out = typed_graph(), tmp_path / "store"
    graph["paper"].node_id = torch.arange(graph["paper"].num_nodes)
    save_graph(graph, tmp_path / "graph.safetensors")
    assert main(["partition", str(tmp_path / "graph.safetensors"), str(out), "--parts", "2"]) == 1
    assert "Expected no node attribute 'node_id'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["graph.safetensors"]


def test_damaged_stores(store: Path, tmp_path: Path) -> None:
    """A piece that is missing, damaged or another store's is found."""
    for number, (name, damage) in enumerate({
        "types.json": lambda file: file.write_text(file.read_text().replace('"paper"', '"papers"')),
        "edges-0/manifest.json": lambda file: file.unlink(),
        "nodes-1": lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.parent / "nodes-0", folder)),
    }.items()):  # fmt: skip
        folder = shutil.copytree(store, tmp_path / str(number))
        damage(folder / name)
        with pytest.raises(PygDistError, match=r"Expected (the manifest|a store in|the store that)"):
            DistributedData.open(folder)


def test_interrupted_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work goes on with the parts and the pieces that are there, and gives the same store; not with other options."""
    save_graph(typed_graph(), tmp_path / "graph.safetensors")
    command = ["partition", str(tmp_path / "graph.safetensors"), "", "--parts", "2", "--model", "stream"]
    command[2] = str(tmp_path / "whole")
    assert main(command) == 0
    command[2], written, write = str(tmp_path / "store"), list[str](), conversion.write_halo_store

    def stops(source: Source, out: Path, *args: Any) -> Any:
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(out.name)
        return write(source, out, *args)

    monkeypatch.setattr(conversion, "write_halo_store", stops)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert not (tmp_path / "store").exists()
    capsys.readouterr()
    for options, match in (
        ([], "Expected no interrupted work"),
        (["--resume", "--seed", "1"], "to be of this input and these options"),
    ):
        assert main([*command, *options]) == 1
        assert match in capsys.readouterr().err
    first = written.copy()
    written.clear()
    assert main([*command, "--resume"]) == 0
    assert not set(first) & set(written)
    manifests = [TypesManifest.load(tmp_path / name) for name in ("whole", "store")]
    assert manifests[0] == manifests[1]
    monkeypatch.undo()
    os.replace(tmp_path / "store", tmp_path / "store.new")  # as of a run that was killed before it renamed what it had
    assert main(command) == 0
    assert TypesManifest.load(tmp_path / "store") == manifests[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.safetensors", "store", "whole"]
