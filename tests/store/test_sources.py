"""Inputs: what each holds equals what other libraries read, and what is wrong is said in one line with its place."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from graphs import load_npz
from torch_geometric.data import Data

from pyg_dist import save_graph
from pyg_dist.errors import DataError, PygDistError
from pyg_dist.store.manifest import GraphForm
from pyg_dist.store.source import Source
from pyg_dist.store.sources import open_source
from pyg_dist.store.spool import spool


def read(source: Source, size: int = 100) -> dict[str, np.ndarray[Any, Any]]:
    """All of a source."""
    chunks = list(source.chunks(size))
    found = {
        "edge_index": np.stack([np.concatenate([getattr(c, end) for c in chunks]) for end in ("source", "target")])
    }
    for name in chunks[0].attributes:
        found[name] = np.concatenate([c.attributes[name] for c in chunks])
    for attribute in source.nodes:
        found[attribute.name] = np.concatenate(list(attribute.rows(1000)))
        assert found[attribute.name].shape[1:] == attribute.shape
    return found


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, num_nodes, (2, num_edges))


@pytest.mark.parametrize("name", ["cora", "tolokers", "power_usa82k", "amazon_computers"])
def test_npz_as_pyg_has_it(shared_data: Path, tmp_path: Path, name: str) -> None:
    data, source = load_npz(shared_data / f"{name}.npz"), open_source(str(shared_data / f"{name}.npz"))
    edges = spool(source, tmp_path / "spool", False, 64 << 20, lambda count: None)
    assert torch.equal(edges.edge_index(), data.edge_index)
    rows = {a.name: np.concatenate(list(a.rows(1 << 16))) for a in source.nodes}
    assert np.array_equal(rows["x"], data.x.numpy())
    assert np.array_equal(rows["y"], data.y.numpy())
    if "train_mask" in rows:
        mask = rows["train_mask"]
        assert np.array_equal(mask if mask.ndim == 1 else mask[:, 0], data.train_mask.numpy())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_with_edge_attributes(tmp_path: Path, save: Any) -> None:
    edges, weight = random_edges(50, 333), np.random.default_rng(1).random(333)
    for order, index in (("C", np.ascontiguousarray(edges)), ("F", np.asfortranarray(edges))):
        path = tmp_path / f"{order}.npz"
        save(path, num_nodes=50, edge_index=index, edge_weight=weight, undirected=False, z=np.arange(50))
        found = read(open_source(str(path)))
        assert np.array_equal(found["edge_index"], edges)
        assert np.array_equal(found["edge_weight"], weight)
        assert np.array_equal(found["z"], np.arange(50))


@pytest.mark.parametrize("form", ["[2, E]", "[E, 2]", "F[2, E]", "F[E, 2]"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_arrays(tmp_path: Path, form: str, dtype: type) -> None:
    edges = random_edges(60, 250).astype(dtype)
    given = edges if "[2" in form else edges.T.copy()
    np.save(tmp_path / "a.npy", np.asfortranarray(given) if form[0] == "F" else given)
    assert np.array_equal(read(open_source(str(tmp_path / "a.npy")))["edge_index"], edges)


@pytest.mark.parametrize("separator", [" ", "\t", ",", " , "])
@pytest.mark.parametrize("suffix", [".txt", ".csv.gz"])
@pytest.mark.parametrize("weighted", [False, True])
def test_text(tmp_path: Path, separator: str, suffix: str, weighted: bool) -> None:
    edges, weight = random_edges(1000, 700), np.random.default_rng(1).random(700).astype(np.float32)
    rows = zip(*edges.tolist(), *([weight.tolist()] if weighted else []), strict=True)
    text = "# a comment\n\n" + "\n".join(separator.join(map(str, row)) for row in rows) + "\n  \n% the end"
    path = tmp_path / f"edges{suffix}"
    with gzip.open(path, "wt") if suffix.endswith("gz") else path.open("w") as file:
        file.write(text)
    found = read(open_source(str(path)))
    assert np.array_equal(found["edge_index"], edges)
    assert not weighted or np.array_equal(found["edge_weight"], weight)
    parts = list(open_source(str(path)).table.rows(64))  # type: ignore[attr-defined]  # blocks that cut lines
    ends = [np.concatenate([rows.values[name] for rows in parts]) for name in ("source", "target")]
    assert np.array_equal(ends, edges)
    assert [rows.line(k) for rows in parts for k in range(len(rows.values))] == list(range(3, 703))


@pytest.mark.parametrize("field", ["real", "pattern", "integer"])
@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
def test_matrix_market(tmp_path: Path, field: str, symmetry: str) -> None:
    if (field, symmetry) == ("pattern", "skew-symmetric"):
        pytest.skip("there is no such matrix")
    matrix = scipy.sparse.random(40, 40, 0.1, random_state=0, format="coo")
    matrix.data = np.ceil(matrix.data * 9)
    if symmetry != "general":
        lower = scipy.sparse.tril(matrix, k=-1 if "skew" in symmetry else 0)
        matrix = (lower + (-1 if "skew" in symmetry else 1) * scipy.sparse.tril(lower, k=-1).T).tocoo()
    scipy.io.mmwrite(tmp_path / "m.mtx", matrix, field=field, symmetry=symmetry)
    source = open_source(str(tmp_path / "m.mtx"))
    found, dense = read(source), np.zeros((40, 40))
    values = found.get("edge_weight", np.ones(found["edge_index"].shape[1]))
    np.add.at(dense, tuple(found["edge_index"]), values)
    assert np.allclose(dense, (matrix != 0).toarray() if field == "pattern" else matrix.toarray())
    assert source.num_nodes == 40


def test_rmat_is_the_same_whatever_the_chunk() -> None:
    name = "rmat:scale=12,edges=3000000,seed=3,features=4,classes=8"
    one, other = read(open_source(name), 100), read(open_source(name), 10**7)
    assert all(np.array_equal(one[key], other[key]) for key in one)
    assert one["edge_index"].shape == (2, 3_000_000)
    assert one["edge_index"].max() < 2**12
    degree = np.sort(np.bincount(one["edge_index"][1]))[::-1]
    assert degree[:41].sum() > 0.15 * 3_000_000  # one percent of the nodes
    centres = np.stack([one["x"][one["y"] == label].mean(0) for label in range(8)])
    nearest = ((one["x"][:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == one["y"]).mean() > 0.4
    assert (one["train_mask"].astype(int) + one["val_mask"] + one["test_mask"] == 1).all()


def bad_inputs(folder: Path) -> dict[str, tuple[str, str]]:
    """Files, and what their errors say."""
    (folder / "columns.txt").write_text("0 1\n1 2\n2 3 4\n")
    (folder / "words.txt").write_text("0 1\n1 2\n\nx 3\n")
    (folder / "one.txt").write_text("1\n2\n")
    (folder / "empty.txt").write_text("")
    (folder / "comments.txt").write_text("# nothing\n")
    (folder / "negative.txt").write_text("0 1\n1 2\n3 -4\n")
    (folder / "fraction.txt").write_text("0 1 0.5\n0.5 2 0.5\n")
    whole = gzip.compress(b"0 1\n" * 10000)
    (folder / "cut.txt.gz").write_bytes(whole[:-20])
    (folder / "no.txt.gz").write_bytes(b"0 1\n")
    banner = "%%MatrixMarket matrix coordinate pattern general\n"
    (folder / "range.mtx").write_text(f"{banner}% c\n3 3 2\n1 2\n4 1\n")
    (folder / "count.mtx").write_text(f"{banner}3 3 3\n1 2\n")
    (folder / "oblong.mtx").write_text(f"{banner}3 4 1\n1 2\n")
    (folder / "array.mtx").write_text("%%MatrixMarket matrix array real general\n3 3\n")
    (folder / "other.mtx").write_text("hello\n")
    np.save(folder / "floats.npy", np.zeros((2, 3)))
    np.save(folder / "shape.npy", np.zeros((3, 3), int))
    (folder / "cut.npy").write_bytes(
        (np.save(folder / "t.npy", np.zeros((2, 99), int)), (folder / "t.npy").read_bytes())[1][:-8]
    )
    np.save(folder / "objects.npy", np.array([[{}], [{}]]), allow_pickle=True)
    np.savez(folder / "range.npz", num_nodes=3, edge_index=np.array([[0, 1], [2, 3]]))
    np.savez(folder / "keys.npz", edges=3)
    edges, ones = np.array([[0, 1], [1, 0]]), np.arange(6)
    np.savez(folder / "counts.npz", num_nodes=[3, 4], edge_index=edges)
    np.savez(folder / "half.npz", num_nodes=2.5, edge_index=edges)
    np.savez(folder / "csr.npz", num_nodes=5, edge_index=edges, x_indptr=ones, x_shape=[5, 4])
    np.savez(folder / "short.npz", num_nodes=5, edge_index=edges, x_indptr=ones, x_indices=ones[:3], x_shape=[5, 4])
    below = ones[:5] - 1
    np.savez(folder / "below.npz", num_nodes=5, edge_index=edges, x_indptr=ones, x_indices=below, x_shape=[5, 4])
    (folder / "less.mtx").write_text(f"{banner}-3 -3 1\n1 2\n")
    (folder / "garbage.mtx.gz").write_bytes(gzip.compress(b"x" * 99)[:12] + b"\xff" * 40)
    np.savez(folder / "objects.npz", num_nodes=3, edge_index=np.array([[0], [1]]), a=np.array([{}, 1, 2]))
    (folder / "cut.npz").write_bytes((folder / "range.npz").read_bytes()[:-30])
    (folder / "foreign.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "folder").mkdir()
    (folder / "a.unknown").write_text("0 1\n")
    return {
        "columns.txt": ("2 columns", "line 3"), "words.txt": ("whole number", "line 4"),
        "one.txt": ("source target", "1 column"), "empty.txt": ("empty", ""), "comments.txt": ("empty", ""),
        "negative.txt": ("ids of 0 or more", "line 3"), "fraction.txt": ("whole number", "line 2"),
        "cut.txt.gz": ("gzip", "line"), "no.txt.gz": ("gzip", "no.txt.gz"),
        "range.mtx": ("[0, 3)", "line 5"), "count.mtx": ("3 entries", "line 2"), "oblong.mtx": ("square", "line 2"),
        "array.mtx": ("coordinate", "line 1"), "other.mtx": ("MatrixMarket", "line 1"),
        "floats.npy": ("integers", "float64"), "shape.npy": ("[2, E]", ""), "cut.npy": ("NumPy array", ""),
        "objects.npy": ("NumPy array", ""), "range.npz": ("[0, 3)", "edge 1"), "keys.npz": ("edge_index", ""),
        "objects.npz": ("Python objects", ""), "cut.npz": (".npz", ""), "foreign.safetensors": ("save_graph", ""),
        "counts.npz": ("num_nodes", ""), "half.npz": ("num_nodes", ""), "csr.npz": ("x_indices", ""),
        "short.npz": ("CSR", "x_indptr"), "below.npz": ("[0, 4)", ""), "less.mtx": ("entries", "line 2"),
        "garbage.mtx.gz": ("gzip", ""), "folder": ("raw/", ""),
        "a.unknown": (".mtx", ""), "missing.txt": ("nothing", ""),
    }  # fmt: skip


def test_what_is_wrong_is_said_with_its_place(tmp_path: Path) -> None:
    for name, words in bad_inputs(tmp_path).items():
        with pytest.raises(PygDistError) as caught:  # noqa: PT012
            source = open_source(str(tmp_path / name))
            spool(source, tmp_path / "spool", False, 1 << 30, lambda count: None)
            for attribute in source.nodes:
                list(attribute.rows(1000))
        message = str(caught.value)
        assert "\n" not in message, name
        assert all(word in message for word in (name, *words)), (name, message)


def test_undirected_as_pyg_makes_it(tmp_path: Path) -> None:
    from torch_geometric.utils import to_undirected

    edges = random_edges(300, 5000)
    np.save(tmp_path / "a.npy", edges)
    for memory in (1 << 30, 1 << 15):
        found = spool(open_source(str(tmp_path / "a.npy")), tmp_path / "spool", True, memory, lambda count: None)
        assert torch.equal(found.edge_index(), to_undirected(torch.from_numpy(edges), num_nodes=300))
        assert np.array_equal(found.in_degree, np.bincount(found.edge_index()[1], minlength=300))


def test_degrees_while_ids_grow(tmp_path: Path) -> None:
    edges = random_edges(300, 100_000) * np.linspace(0, 9, 100_000).astype(np.int64)
    np.save(tmp_path / "a.npy", edges)
    found = spool(open_source(str(tmp_path / "a.npy")), tmp_path / "spool", False, 1 << 20, lambda count: None)
    assert found.num_nodes == edges.max() + 1
    assert np.array_equal(found.in_degree, np.bincount(edges[1], minlength=found.num_nodes))


def test_saved_adjacency(tmp_path: Path) -> None:
    from torch_geometric.data import Data

    matrix = torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([1.0, 2, 3]), (4, 4)
    ).to_sparse_csr()
    save_graph(Data(adj_t=matrix, x=torch.ones(4, 2)), tmp_path / "g.safetensors")
    source = open_source(str(tmp_path / "g.safetensors"))
    assert source.graph == GraphForm("adj_t", "add")
    assert np.array_equal(read(source)["edge_index"], [[1, 2, 0], [0, 1, 2]])
    with pytest.raises(DataError, match=r"ends in \.safetensors"):
        save_graph(Data(adj_t=matrix, x=torch.ones(4, 2)), tmp_path / "g.pt")
    with pytest.raises(DataError, match="JSON"):
        save_graph(Data(edge_index=torch.zeros(2, 1).long(), num_nodes=1, thing=object()), tmp_path / "g.safetensors")


def ogb_folder(root: Path, name: str, form: str, num_nodes: int = 40, num_edges: int = 150) -> Path:
    """A dataset with random content, in one of the two raw forms."""
    rng = np.random.default_rng(0)
    folder = root / name
    split = {"ogbn_products": "sales_ranking", "ogbn_arxiv": "time", "ogbn_proteins": "species"}.get(name, "time")
    for below in ("raw", f"split/{split}"):
        (folder / below).mkdir(parents=True)
    edges, x = rng.integers(0, num_nodes, (2, num_edges)), rng.standard_normal((num_nodes, 5)).astype(np.float32)
    label, year = rng.integers(0, 4, (num_nodes, 1)), rng.integers(2000, 2020, (num_nodes, 1))
    feat = rng.standard_normal((num_edges, 8)).astype(np.float32)
    order = np.array_split(rng.permutation(num_nodes), 3)

    def table(path: Path, rows: np.ndarray[Any, Any]) -> None:
        with gzip.open(path, "wt") as file:
            file.writelines(",".join(map(repr, row)) + "\n" for row in rows.tolist())

    if form == "npz":
        more = {"node_year": year} if name != "ogbn_products" else {}
        np.savez(
            folder / "raw/data.npz", edge_index=edges, num_nodes_list=[num_nodes], num_edges_list=[num_edges],
            node_feat=x, edge_feat=feat, **more,
        )  # fmt: skip
        np.savez(
            folder / "raw/node-label.npz",
            node_label=np.where(np.arange(num_nodes) % 5 == 0, np.nan, label[:, 0])[:, None],
        )
    else:
        tables = {"edge": edges.T, "node-label": label, "num-node-list": np.array([[num_nodes]])}
        tables |= {"num-edge-list": np.array([[num_edges]])}
        if name == "ogbn_proteins":
            tables |= {"edge-feat": feat, "node_species": year}
        else:
            tables |= {"node-feat": x} | ({"node_year": year} if name == "ogbn_arxiv" else {})
        for key, rows in tables.items():
            table(folder / f"raw/{key}.csv.gz", rows)
    for key, nodes in zip(("train", "valid", "test"), order, strict=True):
        table(folder / f"split/{split}/{key}.csv.gz", nodes[:, None])
    return folder


@pytest.mark.parametrize(
    ("name", "form"),
    [("ogbn_arxiv", "csv"), ("ogbn_products", "csv"), ("ogbn_proteins", "csv"), ("ogbn_papers100M", "npz")],
)
def test_ogb_folders_as_ogb_reads_them(tmp_path: Path, name: str, form: str) -> None:
    read_graph = pytest.importorskip("ogb.io.read_graph_pyg").read_graph_pyg
    folder = ogb_folder(tmp_path, name, form)
    source = open_source(str(folder))
    found = read(source)
    options = source.options  # type: ignore[attr-defined]
    more = [] if options["additional node files"] == "None" else options["additional node files"].split(",")
    (data,) = read_graph(
        str(folder / "raw"), add_inverse_edge=options["add_inverse_edge"] == "True", additional_node_files=more,
        binary=form == "npz",
    )  # fmt: skip
    assert data.num_nodes == source.num_nodes == 40
    for key, value in data.to_dict().items():
        if key != "num_nodes":
            assert found[key].dtype == value.numpy().dtype, key
            assert np.array_equal(found[key], value.numpy()), key
    split = folder / "split" / options["split"]
    for key, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        with gzip.open(split / f"{key}.csv.gz", "rt") as file:
            assert sorted(map(int, file)) == found[mask].nonzero()[0].tolist()
    assert found["y"].shape == (40, 1)
    assert found["y"].dtype == (np.float32 if form == "npz" else np.int64)
    assert np.isnan(found["y"]).any() == (form == "npz")


def saved(data: Data, path: Path, form: str) -> Path:
    """The graph as scripts, PyG and its datasets save it; what names it."""
    if form == "dataset":
        (path / "processed").mkdir()
        torch.save((data.to_dict(), None, Data), path / "processed" / "data.pt")
        return path
    torch.save(data if form == "data" else data.to_dict(), path / "graph.pt")
    return path / "graph.pt"


@pytest.mark.parametrize("form", ["data", "dict", "dataset"])
def test_torch_files(tmp_path: Path, form: str) -> None:
    edges = torch.from_numpy(random_edges(50, 333))
    data = Data(x=torch.randn(50, 4), edge_index=edges, y=torch.arange(50) % 3, edge_attr=torch.randn(333, 2))
    data.train_mask, data.name, data.scale = torch.arange(50) % 2 == 0, "a name", torch.tensor(3.0)
    source = open_source(str(saved(data, tmp_path, form)))
    found = read(source)
    assert (source.num_nodes, source.num_edges) == (50, 333)
    assert found.keys() == {"edge_index", "edge_attr", "x", "y", "train_mask"}
    assert source.other == {"name": "a name"}
    assert source.other_tensors["scale"][1]() == 3.0
    for name, rows in found.items():
        assert np.array_equal(rows, data[name].numpy()), name


class Harmful:
    """Unpickled, it would end the process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"edge_index": torch.tensor([[0.5, 1.0], [1.0, 2.0]])}, "integer node ids .*torch.float32"),
        ({"x": torch.zeros(3)}, "edge_index.*got only"),
        ({"train_pos_edge_index": torch.zeros(2, 3)}, "set one, data.edge_index = data.train_pos_edge_index"),
        ([torch.zeros(3)], "Expected a Data, or a dict of tensors"),
        (({"edge_index": torch.zeros(2, 4).long()}, {"edge_index": torch.tensor([0, 2, 4])}), "Expected one graph"),
        ([{"edge_index": torch.zeros(2, 4).long()}] * 3, r"Expected one graph .*\(got 3\)"),
        ([Data(edge_index=torch.zeros(2, 4).long())] * 2, r"Expected one graph .*\(got 2\)"),
        ({"_global_store": {"x": torch.zeros(2)}}, "homogeneous"),
        (Harmful(), "weights_only=True .*_exit"),
    ],
)
def test_torch_files_that_are_no_graph(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "graph.pt")
    with pytest.raises(DataError, match=message) as caught:
        open_source(str(tmp_path / "graph.pt"))
    assert "\n" not in str(caught.value)


def test_float_ids_are_refused(tmp_path: Path) -> None:
    """Everywhere: cut off, 0.5 would be node 0."""
    ends = np.array([[0, 1], [0.5, 2]])
    np.save(tmp_path / "e.npy", ends)
    np.savez(tmp_path / "e.npz", num_nodes=3, edge_index=ends)
    (tmp_path / "e.txt").write_text("0 0.5\n1 2\n")
    (tmp_path / "e.csv").write_text("0,0.5,1\n1,2,1\n")
    for name in ("e.npy", "e.npz", "e.txt", "e.csv"):
        with pytest.raises(DataError, match=f"{name}"):
            read(open_source(str(tmp_path / name)))
