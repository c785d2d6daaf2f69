"""Text files as people have them: each is read right, and said how, or refused in one line with its place."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_dist import DistributedData
from pyg_dist.cli import main
from pyg_dist.cli.inputs import read_planned_graph
from pyg_dist.errors import PygDistError
from pyg_dist.store.sources import Reading, open_source

LINE = [[0, 1], [1, 2]]
RING = [[0, 1, 2], [1, 2, 0]]
BOTH = [[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]]

READ = {
    "snap.txt": ("# Nodes: 5 Edges: 4\n# FromNodeId\tToNodeId\n30\t1412\n3\t28\n", [[30, 3], [1412, 28]], "1,409 wi"),
    "crlf.txt": ("0 1\r\n1 2\r\n2 0\r\n", RING, "white space"),
    "bom.csv": ("\ufeff0,1\n1,2\n2,0\n", RING, "commas"),
    "header.csv": ("source,target\n0,1\n1,2\n", LINE, "columns source, target by"),
    "swapped.csv": ("dst,src\n1,0\n2,1\n", LINE, "target, source"),
    "names.tsv": ("Node A\tNode B\n0\t1\n1\t2\n", LINE, "tabs"),
    "index.csv": (",source,target\n0,0,1\n1,1,2\n", LINE, "1 left out"),
    "pandas.csv": (",0,1\n0,0,1\n1,1,2\n", LINE, "left out"),
    "quoted.csv": ('"from", "to"\n"0", "1"\n"1","2"\n', LINE, "commas"),
    "text.csv": ('source,kind,target\n0,"a, b",1\n1,c,2\n', LINE, "kind left out"),
    "quotes.csv": ('source,name,target\n0,"x ""y"", z",1\n1,"# no comment",2\n', LINE, "name left out"),
    "semi.csv": ("0;1\n1;2\n", LINE, "semicolons"),
    "trail.csv": ("0,1,\n1,2,\n", LINE, "3 left out"),
    "bars.edges": ("0|1\n1|2\n", LINE, "bars"),
    "nx.edgelist": ("#/usr/bin/nx\n# GMT Mon\n0 1 {}\n1 2 {}\n", LINE, "no weights"),
    "nxw.edgelist": ("0 1 {'color': 'a', 'weight': 3}\n1 2 {'weight': .5}\n", (*LINE, [3, 0.5]), ", weight by"),
    "nx_other.edgelist": ("0 1 {'capacity': 3}\n1 2 {'capacity': 1}\n", LINE, "no weights"),
    "out.konect": ("% sym unweighted\n% 3 3 3\n1 2\n2 3\n3 1\n", BOTH, "ids from 1; each edge stands for both"),
    "konect.txt": ("% asym posweighted\n1 2 7 1082040961\n2 3 9 1082155839\n", (*LINE, [7, 9]), "4 left out"),
    "times.txt": ("0 1 1254192988\n1 2 1254194656\n2 0 1254202612\n", RING, "times"),
    "sign.txt": ("# FromNodeId\tToNodeId\tSign\n0\t1\t-1\n1\t2\t1\n", (*LINE, [-1, 1]), "weight"),
    "named.csv": ("source,target,time\n0,1,5\n1,2,6\n", LINE, "time left out"),
    "weight.csv": ("weight,u,v\n.5,0,1\n2,1,2\n", (*LINE, [0.5, 2]), "weight"),
    "signs.txt": ("0 1 -1\n1 2 1\n", (*LINE, [-1, 1]), "weights"),
    "floats.txt": ("0 1 1.0\n1 2 2.0\n", (*LINE, [1, 2]), "weights"),
    "float_times.txt": ("0 1 1289241911.7\n1 2 1289241941.5\n", LINE, "times"),
    "ones.txt": ("0 1 1\n1 2 1\n", (*LINE, [1, 1]), "weights"),
    "same.txt": ("0 1 1\n0 2 4\n1 2 2\n", ([0, 0, 1], [1, 2, 2], [1, 4, 2]), "weights"),
    "long_comments.txt": ("# " + "c " * 40000 + "\n" + "% c\n" * 20000 + "0 1\n1 2\n", LINE, "2 edges"),
    "comments.txt": ("// c\n0 1 # first\n% c\n\n1 2\t// second\n", LINE, "2 edges"),
    "latin.txt": ("# caf\xe9\n0 1\n1 2\n", LINE, "2 edges"),
    "plus.el": ("+0 +1\n1 2", LINE, "2 edges"),
    "tab_space.tsv": ("0\t 1\n 1\t2\n", LINE, "tabs"),
    "metis.graph": ("% c\n3 3\n2 3\n% c\n1 3\n1 2\n", [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]], "METIS"),
    "isolated.graph": ("4 1 001\n\n3 5\n2 5\n\n", ([1, 2], [2, 1], [5, 5]), "METIS"),
    "sizes.graph": ("2 1 111 2\n9 8 7 2 4\n9 8 7 1 4\n", ([0, 1], [1, 0], [4, 4]), "METIS"),
    "dimacs.txt": ("c a\np edge 3 2\nn 1 5\ne 1 2\ne 2 3\ne 3 2\n", [[0, 1, 1, 2], [1, 0, 2, 1]], "DIMACS"),
    "roads.gr": ("c a\np sp 3 2\na 1 2 7\nc b\na 2 3 9\n", (*LINE, [7, 9]), "arcs"),
    "single.csv": ("'0','1'\n'1','2'\n", LINE, "by commas"),
    "counts.txt": ("# c\n4 6\n" + "0 1\n1 2\n" * 3, ([0, 1] * 3, [1, 2] * 3), "line 2 counts nodes and edges; 4 n"),
    "counts_1.txt": ("3 6\n" + "1 2\n2 3\n" * 3, ([0, 1] * 3, [1, 2] * 3), "ids from 1; line 1 counts nodes and"),
    "counts.csv": ("4 2\n0,1\n1,2\n", LINE, "line 1 counts nodes and edges; 4 n"),
    "counts_w.txt": ("4 2\n0 1 .5\n1 2 2\n", (*LINE, [0.5, 2]), "line 1 counts nodes and edges; 4 n"),
    "counts_3.txt": ("4 2 0\n0 1\n1 2\n", LINE, "line 1 counts nodes and edges; 4 n"),
    "matrix.txt": ("3 3 2\n1 2 .5\n2 3 2\n", (*LINE, [0.5, 2]), "ids from 1; line 1 counts nodes and edges; 3 n"),
    "path.txt": ("4 3\n3 2\n2 1\n1 0\n", [[4, 3, 2, 1], [3, 2, 1, 0]], "ids from 0; 5 nodes"),
    "one_less.txt": ("3 5\n0 1\n1 2\n2 0\n1 0\n", [[3, 0, 1, 2, 1], [5, 1, 2, 0, 0]], "ids from 0; 6 nodes"),
    "banner.txt": ("%%MatrixMarket matrix coordinate pattern general\n3 3 2\n1 2\n2 3\n", LINE, "Matrix Market"),
}  # fmt: skip


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_bytes(text.encode("latin-1" if name == "latin.txt" else "utf-8"))
    return str(folder / name)


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_said(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, edges, said = READ[name]
    path = write(tmp_path, name, text)
    assert read_planned_graph(path).edge_index.tolist() == list(edges[:2])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert f"{len(edges[0])} edges" in line
    weights = [w for chunk in open_source(path).chunks(9) for w in chunk.attributes.get("edge_weight", [])]
    assert weights == (edges[2] if len(edges) == 3 else [])


REFUSED = {
    "float_ids.txt": ("0.0 1.0\n", "a whole number below 2^63 as source", "line 1"),
    "over.txt": ("0 1\n1 99999999999999999999\n", "as target", "line 2"),
    "words.txt": ("alice bob\nbob carol\n", "a whole number below 2^63 as source", "line 2"),
    "adjacency.txt": ("0 1 2 3\n1 2\n2 3\n", "4 columns", "line 2", "adjacency list"),
    "adjacency3.txt": ("0 1 2\n1 2 3\n2 3 0\n", "neighbours", "--columns"),
    "counts_or_edge.txt": ("3 2\n0 1\n1 2\n", "line 1", "'3 2', which is an edge, or counts", "--columns"),
    "counts_or_weighted_loop.txt": ("2 2 3\n0 1 5\n1 0 2\n1 1 4\n", "line 1", "'2 2 3', which is", "target,weight"),
    "counts_or_loop.txt": ("3 3\n0 1\n1 2\n2 0\n", "line 1", "counts the nodes and edges below"),
    "metis.txt": ("3 3\n2 3\n1 3\n1 2\n", "METIS", ".graph"),
    "metis4.txt": ("4 5\n2 3\n1 3 4\n1 2 4\n2 3\n", "2 columns", "line 3", ".graph"),
    "metis3.txt": ("4 6 0\n2 3 4\n1 3 4\n1 2 4\n1 2 3\n", "METIS", ".graph"),
    "sorted.txt": ("".join(f"{k % 7} {k % 5} {k * 3}\n" for k in range(120)), "times", "--columns"),
    "four.txt": ("6 2 4 1289241911.7\n6 5 2 1289241941.5\n", "4 columns", "--columns"),
    "users.csv": ("user,item,rating\n0,1,5\n", "3 columns named user, item, rating", "--columns"),
    "words.csv": ("0,1,friend\n1,2,foe\n", "a number as weight", "friend", "line 1", "--columns"),
    "one_word.csv": ("0,1,0.5\n1,2,foe\n", "a number as weight", "foe", "line 2"),
    "gap.csv": ("0,,1\n1,,2\n", "as target", "line 1"),
    "exponent.txt": ("0 1e0\n1 2\n", "as target", "line 1"),
    "hex.txt": ("0x0 0x1\n", "as source", "line 1"),
    "under.txt": ("1_0 2\n", "as source", "line 1"),
    "infinite.txt": ("0 1 1e400\n0 2 1\n", "float32", "line 1"),
    "large.txt": ("0 1 1.5\n0 2 1e300\n", "float32", "line 2"),
    "late.txt": ("0 1\n" * 400_000 + "0 1 2\n" + "0 1\n" * 9, "2 columns", "line 400001"),
    "only_header.csv": ("source,target\n", "a header alone"),
    "space.txt": ("   \n\n  ", "empty"),
    "no_weight.txt": ("0 1 {'weight': 2}\n1 2 {}\n", "3 columns", "line 2"),
    "two_sets.txt": ("% bip unweighted\n1 2\n", "one set of nodes"),
    "short.graph": ("3 2\n2 3\n1\n", "line 1 says"),
    "count.graph": ("3 3\n2\n1\n\n", "two of each edge"),
    "long.graph": ("1 0\n\n2\n", "one per node"),
    "words.graph": ("graph [ ]\n", "METIS", "line 1"),
    "letters.graph": ("2 1\nx\n1\n", "neighbours"),
    "mixed.col": ("p edge 3 2\ne 1 2\na 2 3\n", "one kind", "line 3"),
    "none.col": ("e 1 2\n", "p edge"),
    "bad.col": ("p edge 3 2\ne 1 2\nq 2 3\n", "line 3"),
    "g.parquet": ("PAR1", "Parquet"),
    "utf16.txt": ("0 1\n".encode("utf-16").decode("latin-1"), "UTF-8"),
    "g.gml": ("graph [ ]", ".txt"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_with_its_place(tmp_path: Path, name: str) -> None:
    text, *words = REFUSED[name]
    if name == "g.parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(PygDistError) as caught:
        read_planned_graph(write(tmp_path, name, text))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in (name, *words)), str(caught.value)


def test_columns_that_the_user_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "four.csv", "to,from,rating,time\n2,1,4,1289241911.7\n3,2,-2,1289241941.5\n")
    assert main(["plan", path, "--ranks", "2", "--columns", "target,source,-,weight", "--first-id", "1"]) == 0
    assert "columns target, source, weight (rating left out) by commas; ids from 1; 3 nodes" in capsys.readouterr().err
    read = open_source(path, Reading(("target", "source", "weight"), 1))
    (chunk,) = read.chunks(9)
    assert [chunk.source.tolist(), chunk.target.tolist()] == LINE
    assert chunk.attributes["edge_weight"].tolist() == [4, -2]
    metis = write(tmp_path, "metis.txt", REFUSED["metis.txt"][0])
    assert read_planned_graph(metis, reading=Reading(("source", "target"))).edge_index.tolist()[0] == [3, 2, 1, 1]
    counts = write(tmp_path, "counts.txt", READ["counts.txt"][0])
    assert read_planned_graph(counts, reading=Reading(("source", "target"))).edge_index.tolist()[0][:2] == [4, 0]
    for columns in ("source", "source,source,target", "source,target,weight,x,y"):
        assert main(["plan", path, "--ranks", "2", "--columns", columns]) == 1
        assert "--columns with source and target" in capsys.readouterr().err
    matrix = write(tmp_path, "m.mtx", READ["banner.txt"][0])
    for option in (["--columns", "source,target"], ["--first-id", "0"]):
        assert main(["plan", matrix, "--ranks", "2", *option]) == 1
        assert f"Expected no {option[0]}" in capsys.readouterr().err


def test_ids_from_one_and_nan_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "one.txt", "1 2 nan\n2 3 .5\n")
    assert main(["partition", path, str(tmp_path / "store"), "--parts", "2"]) == 0
    said = capsys.readouterr().err
    assert "4 nodes (1 without an edge)" in said
    assert "begin at 1, so node 0 has no edge" in said
    assert "'edge_weight' is NaN at 1 of 2 edges" in said
    with pytest.warns(UserWarning, match="'edge_weight' is NaN at 1 of 2 edges"):
        DistributedData.open(tmp_path / "store")
    assert main(["plan", path, "--ranks", "2", "--first-id", "1", "--json"]) == 0
    said = capsys.readouterr().err
    assert "3 nodes, 2 edges" in said
    assert "begin at 1" not in said


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_packed_text(tmp_path: Path, suffix: str) -> None:
    path, text = tmp_path / f"e.csv{suffix}", b"".join(b"%d,%d\n" % (k, k + 1) for k in range(3000))
    if suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text)
    else:
        path.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(text))
    assert read_planned_graph(path).edge_index.tolist() == [list(range(3000)), list(range(1, 3001))]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PygDistError, match=rf"{suffix} .*breaks off after line") as caught:
        read_planned_graph(path)
    assert "\n" not in str(caught.value)


def test_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, rng = tmp_path / "e.parquet", np.random.default_rng(0)
    edges, weight = rng.integers(0, 90, (2, 5000)), rng.random(5000)
    table = {"weight": weight, "src_id": edges[0], "note": ["x"] * 5000, "dst_id": edges[1].astype(np.int32)}
    parquet.write_table(pyarrow.table(table), path)
    source = open_source(str(path))
    chunks = list(source.chunks(999))
    assert len(chunks) > 4
    assert np.array_equal(np.concatenate([chunk.source for chunk in chunks]), edges[0])
    assert np.array_equal(np.concatenate([chunk.target for chunk in chunks]), edges[1])
    assert np.array_equal(np.concatenate([chunk.attributes["edge_weight"] for chunk in chunks]), weight)
    assert (source.num_edges, source.edges[0].dtype) == (5000, "F64")
    assert read_planned_graph(path).num_nodes == edges.max() + 1
    assert "weight as weight, src_id as source, dst_id as target (note left out)" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"source": [0, None], "target": [1, 2]}), path)
    with pytest.raises(PygDistError, match="1 nulls in rows 0 to 1"):
        read_planned_graph(path)
    parquet.write_table(pyarrow.table({"source": ["a", "b"], "target": [1, 2]}), path)
    with pytest.raises(PygDistError, match=r"column 'source' of .* .got string"):
        read_planned_graph(path)
    parquet.write_table(pyarrow.table({"a": [0, 1], "mine": [1, 2], "__index_level_0__": [7, 8]}), path)
    assert read_planned_graph(path).edge_index.tolist() == LINE
    parquet.write_table(pyarrow.table({"x": [0, 1], "y": [1, 2], "z": [1, 2]}), path)
    with pytest.raises(PygDistError, match="got x, y, z"):
        read_planned_graph(path)
    assert read_planned_graph(path, reading=Reading(("source", "-", "target"))).edge_index.tolist() == LINE


@pytest.mark.parametrize("missing", ["e.parquet", "e.txt.zst"])
def test_without_pyarrow(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(PygDistError, match="pip install pyarrow"):
        read_planned_graph(write(tmp_path, missing, "0 1\n"))


def test_a_weighted_text_is_what_the_graph_is(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    data = Data(edge_index=torch.randint(0, 40, (2, 200), generator=rng), edge_weight=torch.rand(200, generator=rng))
    rows = zip(*data.edge_index.tolist(), data.edge_weight.tolist(), strict=True)
    path = write(tmp_path, "e.csv", "source,target,weight\n" + "".join(f"{s},{t},{w!r}\n" for s, t, w in rows))
    assert main(["partition", path, str(tmp_path / "store"), "--parts", "2"]) == 0
    made, opened = DistributedData(data), DistributedData.open(tmp_path / "store")
    assert (made.num_nodes, made.num_edges, set(made.keys())) == (opened.num_nodes, 200, set(opened.keys()))
    assert torch.equal(made.graph.full_edge_index(), opened.graph.full_edge_index())
    weights = [data.edge_weight.full_tensor() for data in (made, opened)]
    assert torch.equal(*weights)
    assert weights[0].dtype == weights[1].dtype == torch.float32
