"""Files of graphs with types: read as they were written, as OGB reads them, and from folders of arrays."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_graphs import typed_graph
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToSparseTensor

from pyg_dist import save_graph
from pyg_dist.errors import DataError
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.graph_input import HeteroInput, read_hetero
from pyg_dist.store.source import Attribute, EdgeChunk, Source
from pyg_dist.store.sources import open_types
from pyg_dist.store.typed_source import TypedSource


def content_of(source: Source, num_bytes: int = 64) -> dict[str, Tensor]:
    """What a source of one type holds, read in pieces."""
    chunks = list(source.chunks(7))
    ends = [np.concatenate([getattr(chunk, end) for chunk in chunks] or [[]]) for end in ("source", "target")]
    found = {"edge_index": torch.from_numpy(np.stack(ends).astype(np.int64))}
    for a in source.edges:
        rows = [chunk.attributes[a.name] for chunk in chunks] or [np.empty((0, *a.shape), storage_dtype(a.dtype))]
        found[a.name] = as_torch(np.array(np.concatenate(rows)), a.dtype)
    for a in source.nodes:
        found[a.name] = as_torch(np.array(np.concatenate(list(a.rows(num_bytes)))), a.dtype)
    for name, (spec, read) in source.other_tensors.items():
        found[name] = as_torch(np.array(read()), spec.dtype)
    return found


def assert_equal(found: TypedSource, expected: HeteroInput) -> None:
    assert found.num_nodes == expected.num_nodes
    assert list(found.relations) == list(expected.relations)
    sources = {"whole": found.whole, **found.nodes, **found.relations}
    keys = dict(zip(expected.pieces(), sources, strict=True))
    for key, graph in expected.pieces().items():
        others = {k: v for k, v in graph.other_attributes.items() if isinstance(v, Tensor)}
        wanted = {"edge_index": graph.edge_index, **graph.node_attributes, **graph.edge_columns, **others}
        tensors = content_of(sources[keys[key]])
        assert tensors.keys() == wanted.keys()
        for name, value in wanted.items():
            assert tensors[name].dtype == value.dtype, name
            assert torch.equal(tensors[name].nan_to_num(), value.nan_to_num()), name
        assert sources[keys[key]].other == {k: v for k, v in graph.other_attributes.items() if k not in others}
    for relation, graph in expected.relations.items():
        assert found.relations[relation].graph == graph.form
        assert torch.equal(found.edge_index(relation), graph.edge_index)


@pytest.mark.parametrize(
    ("form", "is_sparse"),
    [(".safetensors", False), (".safetensors", True), (".pt", False), ("to_dict.pt", True), ("dataset", True)],
)
def test_files(tmp_path: Path, form: str, is_sparse: bool) -> None:
    """What was saved is read again: tensors, types, names, and what a script calls the edges."""
    data = typed_graph()
    if is_sparse:
        data = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)
    path = tmp_path / f"graph{'' if form == 'dataset' else form}"
    if form == ".safetensors":
        save_graph(data, path)
    elif form == "dataset":
        (path / "processed").mkdir(parents=True)
        torch.save((data.to_dict(), None, HeteroData), path / "processed" / "data.pt")
    else:
        torch.save(data if form == ".pt" else data.to_dict(), path)
    found = open_types(str(path))
    assert found is not None
    assert_equal(found, read_hetero(data, allow_nan=True, warn=False))


def test_what_is_no_graph_with_types(tmp_path: Path) -> None:
    from torch_geometric.data import Data

    plain = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    torch.save(plain, tmp_path / "one.pt")
    save_graph(plain, tmp_path / "one.safetensors")
    assert all(open_types(str(tmp_path / name)) is None for name in ("one.pt", "one.safetensors", "none.pt", ""))
    data = typed_graph()
    data["paper"].thing = object()
    with pytest.raises(DataError, match="Expected 'thing' to be a tensor or what JSON has"):
        save_graph(data, tmp_path / "wrong.safetensors")
    wrong = typed_graph()
    wrong["author", "writes", "paper"].edge_index[0, 0] = 99
    with pytest.raises(DataError, match="below num_nodes=25"):
        save_graph(wrong, tmp_path / "wrong.safetensors")


def table(path: Path, rows: Any, head: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(head)
        file.writelines(",".join(map(str, row)) + "\n" for row in np.asarray(rows).tolist())


@pytest.fixture
def mag(tmp_path: Path) -> Path:
    """The files of ogbn-mag's folder, of a small graph."""
    rng, folder = np.random.default_rng(0), tmp_path / "ogbn_mag"
    sizes = {"author": 30, "field_of_study": 7, "institution": 4, "paper": 25}
    raw = folder / "raw"
    table(raw / "num-node-dict.csv.gz", [list(sizes.values())], ",".join(sizes) + "\n")
    for kind in ("label", "split"):
        place = (
            raw / "nodetype-has-label.csv.gz" if kind == "label" else folder / "split/time/nodetype-has-split.csv.gz"
        )
        table(place, [["False", "False", "False", "True"]], ",".join(sizes) + "\n")
    triplets = [
        ("author", "affiliated_with", "institution"), ("author", "writes", "paper"), ("paper", "cites", "paper"),
        ("paper", "has_topic", "field_of_study"),
    ]  # fmt: skip
    table(raw / "triplet-type-list.csv.gz", triplets)
    for k, triplet in enumerate(triplets):
        below = raw / "relations" / "___".join(triplet)
        table(below / "edge.csv.gz", np.stack([rng.integers(0, sizes[kind], 60) for kind in triplet[::2]], 1))
        table(below / "num-edge-list.csv.gz", [[60]])
        table(below / "edge_reltype.csv.gz", np.full((60, 1), k))
    table(raw / "node-feat/paper/node-feat.csv.gz", rng.standard_normal((25, 3)).astype(np.float32).round(4))
    table(raw / "node-feat/paper/node_year.csv.gz", rng.integers(2000, 2020, (25, 1)))
    table(raw / "node-label/paper/node-label.csv.gz", rng.integers(0, 4, (25, 1)))
    for name, part in zip(("train", "valid", "test"), np.array_split(rng.permutation(25), 3), strict=True):
        table(folder / f"split/time/paper/{name}.csv.gz", part[:, None])
    return folder


def test_ogbn_mag_as_ogb_reads_it(mag: Path) -> None:
    raw = pytest.importorskip("ogb.io.read_graph_raw")
    (expected,) = raw.read_csv_heterograph_raw(
        str(mag / "raw"), additional_node_files=["node_year"], additional_edge_files=["edge_reltype"]
    )
    found = open_types(str(mag))
    assert found is not None
    assert found.num_nodes == expected["num_nodes_dict"]
    assert list(found.relations) == list(expected["edge_index_dict"])
    for relation, edges in expected["edge_index_dict"].items():
        content = content_of(found.relations[relation])
        assert np.array_equal(content["edge_index"].numpy(), edges)
        assert np.array_equal(content["edge_reltype"].numpy(), expected["edge_reltype"][relation])
    paper = content_of(found.nodes["paper"])
    assert np.array_equal(paper["x"].numpy(), expected["node_feat_dict"]["paper"])
    assert np.array_equal(paper["node_year"].numpy(), expected["node_year"]["paper"])
    assert np.array_equal(paper["y"].numpy(), raw.read_node_label_hetero(str(mag / "raw"))["paper"])
    split = raw.read_nodesplitidx_split_hetero(str(mag / "split/time"))
    for mask, nodes in zip(("train_mask", "val_mask", "test_mask"), split, strict=True):
        assert paper[mask].nonzero().view(-1).tolist() == sorted(nodes["paper"])
    table(mag / "raw/triplet-type-list.csv.gz", [["author", "writes"]])
    with pytest.raises(DataError, match="Expected source,relation,target"):
        open_types(str(mag))


def arrays(graph: HeteroData, folder: Path, join: str) -> Path:
    """A folder of ``.npy`` files of what it holds with rows, as MAG240M (``___``) and IGB (``__``) have them."""
    names = {"x": "node_feat", "y": "node_label", "edge_attr": "edge_feat"}
    for key, store in zip([*graph.node_types, *graph.edge_types], graph.stores[1:], strict=True):
        below = folder / (key if isinstance(key, str) else join.join(key))
        below.mkdir(parents=True)
        for name, value in store.items():
            if name == "edge_index":
                value = value.T if join == "__" else value
            elif not isinstance(value, Tensor) or name in ("half", "index_of"):
                continue
            np.save(below / f"{names.get(name, name)}.npy", np.asfortranarray(value.numpy()))
    return folder


@pytest.mark.parametrize("form", ["mag240m", "igb"])
def test_folders_of_arrays(tmp_path: Path, form: str) -> None:
    data = typed_graph()
    for kind in ("paper", "venue"):
        for name in ("half", "index_of", "note"):
            data[kind].pop(name, None)
    for name in ("scale", "name", "of_papers"):
        delattr(data, name)
    folder = arrays(data, tmp_path / "graph" / "processed", "___" if form == "mag240m" else "__")
    if form == "mag240m":
        torch.save({"author": 25, "paper": 40, "num_classes": 4}, tmp_path / "graph" / "meta.pt")
        (folder / "author" / "node_label.npy").unlink()
        (folder / "author" / "train_mask.npy").unlink()
        data["author"].pop("y"), data["author"].pop("train_mask")
        split = {
            "train": np.array([3, 5]),
            "valid": np.arange(7),
            "test-dev": np.array([9]),
            "test-challenge": np.array([9], np.int32),
        }
        torch.save(split, tmp_path / "graph" / "split_dict.pt")
        with pytest.raises(DataError, match=r"Expected node_label.npy of one type .* .got lonely, paper, venue"):
            open_types(str(tmp_path / "graph"))
        for kind in ("lonely", "venue"):
            (folder / kind / "node_label.npy").unlink()
            data[kind].pop("y")
        (folder / "paper" / "train_mask.npy").unlink()
        torch.save({"paper": split}, tmp_path / "graph" / "split_dict.pt")
        with pytest.raises(DataError, match=r"Expected 'train', 'valid' and 'test' in .*split_dict.pt .got 'paper'"):
            open_types(str(tmp_path / "graph"))
        torch.save(split, tmp_path / "graph" / "split_dict.pt")
        for name, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test-dev", "test_mask")):
            data["paper"][mask] = torch.zeros(40, dtype=torch.bool)
            data["paper"][mask][split[name]] = True
    expected = HeteroData({kind: data[kind].to_dict() for kind in sorted(data.node_types)})
    for relation in sorted(data.edge_types, key="__".join):
        expected[relation].update(data[relation].to_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.save(folder / "paper" / "names.npy", np.array([None] * 40))
    (folder / ".ipynb_checkpoints").mkdir()
    np.save(folder / ".ipynb_checkpoints" / "node_feat.npy", np.zeros((3, 2)))
    (folder / "notes").mkdir()
    with pytest.warns(UserWarning, match=r"names\.npy is left out"):
        found = open_types(str(tmp_path / "graph"))
    assert found is not None
    assert_equal(found, read_hetero(expected, allow_nan=True, warn=False))
    (folder / "paper" / "names.npy").unlink()
    for name, wrong, match in (
        ("lonely/node_feat.npy", np.zeros((5, 2)), "Expected .* rows in .*npy"),
        ("lonely/num_nodes.npy", np.zeros(2), "Expected one number of nodes in"),
        (f"{next(folder.glob('venue_*')).name}/edge_weight.npy", np.zeros(3), "Expected 50 rows in"),
        ("lonely/odd.npy", None, "Expected a NumPy array in"),
    ):
        path = folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(b"no array") if wrong is None else np.save(path, wrong)
        with pytest.raises(DataError, match=match):
            open_types(str(tmp_path / "graph"))
        path.unlink() if before is None else path.write_bytes(before)
    edges = next(folder.glob("author_*writes*")) / "edge_index.npy"
    np.save(edges, np.where(np.arange(90) == 7, 25, np.load(edges) if form == "mag240m" else np.load(edges).T))
    found = open_types(str(tmp_path / "graph"))
    assert found is not None
    with pytest.raises(DataError, match=r"Expected nodes of type 'author' in \[0, 25\) in .*edge 7 .got 25"):
        found.edge_index(("author", "writes", "paper"))
    for path in [*(folder / "author").iterdir(), *tmp_path.glob("graph/meta.pt")]:
        path.unlink()
    with pytest.raises(DataError, match="Expected the number of nodes of type 'author'"):
        open_types(str(tmp_path / "graph"))


def test_partitioning_reads_no_edge_attributes(tmp_path: Path) -> None:
    def unwanted(num_bytes: int) -> Iterator[np.ndarray]:
        raise AssertionError

    ends = [EdgeChunk(np.array([0, 2]), np.array([1, 0]), {}, str)]
    columns = (Attribute("edge_attr", "F32", (), unwanted),)
    edges = Source(tmp_path, edges=columns, read_ends=lambda size: iter(ends))
    typed = TypedSource(tmp_path, Source(tmp_path), {"a": Source(tmp_path, num_nodes=3)}, {("a", "to", "a"): edges})
    (chunk,) = typed.homogeneous().chunks(10)
    assert chunk.source.tolist() == [0, 2]
    assert typed.edge_index(("a", "to", "a")).tolist() == [[0, 2], [1, 0]]
    with pytest.raises(AssertionError):
        list(typed.pieces()["edges-0"].chunks(10))
