"""Sources of graphs, a module for each kind of file or folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyg_dist.errors import DataError, OptionError
from pyg_dist.store.source import AS_IT_IS, Reading, Source
from pyg_dist.store.sources.arrays import array_edges, array_types, relations_in
from pyg_dist.store.sources.edge_list import Parquet, TextEdges
from pyg_dist.store.sources.headed_text import BANNER, Dimacs, MatrixMarket, Metis, is_dimacs
from pyg_dist.store.sources.npz import Npz
from pyg_dist.store.sources.ogb import OGB, is_ogb_folder, is_ogb_typed, ogb_types
from pyg_dist.store.sources.rmat import PREFIX, RMat
from pyg_dist.store.sources.saved_graph import PROCESSED, saved_graph, saved_types, torch_file, torch_file_types
from pyg_dist.store.sources.text import first_lines, unpacked
from pyg_dist.store.typed_source import TypedSource

__all__ = ["KINDS", "Reading", "Source", "open_source", "open_types"]

KINDS = (
    ".npz; .pt of torch.save; .safetensors of pyg_dist.save_graph; the folder of a dataset of PyG or of an OGB node "
    "dataset, or of .npy files by type and relation; edges in .txt .csv .tsv .edges .edgelist .el, KONECT's out.*, "
    "Matrix Market .mtx, METIS' .graph, DIMACS' .col .gr (these packed as .gz .bz2 .xz .zst, too), .parquet or .npy; "
    "rmat:scale=22,edges=100000000,seed=0"
)
_Open = Callable[[Path, Reading], Source]

_TEXT: dict[str, _Open] = {
    ".mtx": MatrixMarket,
    **dict.fromkeys((".graph", ".metis"), Metis),
    **dict.fromkeys((".col", ".gr", ".dimacs"), Dimacs),
    **dict.fromkeys((".txt", ".csv", ".tsv", ".edges", ".edgelist", ".el"), TextEdges),
}
_BY_SUFFIX: dict[str, _Open] = {
    ".npz": Npz,
    ".pt": torch_file,
    ".safetensors": saved_graph,
    ".npy": array_edges,
    ".parquet": Parquet,
}


def open_source(graph: str, reading: Reading = AS_IT_IS) -> Source:
    """The graph in a file or folder, given as to commands: one of :data:`KINDS`."""
    kind, path = _kind_of(graph)
    takes_columns = kind in (TextEdges, Parquet)
    for option, value, is_taken in (
        ("--columns", reading.columns, takes_columns),
        ("--first-id", reading.first_id, takes_columns or kind is array_edges),
    ):
        if value is not None and not is_taken:
            raise OptionError(f"Expected no {option} for {graph}, whose format has it (got {value}): leave it out")
    return kind(path, reading)


def open_types(graph: str) -> TypedSource | None:
    """The graph with types in a file or folder; ``None``: it has one type of nodes, or there is no graph."""
    path = Path(graph)
    if path.is_dir():
        if is_ogb_typed(path):
            return ogb_types(path)
        if relations_in(path):
            return array_types(path)
        path = path / PROCESSED
    read = {".safetensors": saved_types, ".pt": torch_file_types}.get(path.suffix)
    return None if read is None or not path.is_file() else read(path)


def _kind_of(graph: str) -> tuple[_Open, Path]:
    """The format of an input, and its file or folder."""
    path = Path(graph)
    if graph.startswith(PREFIX):
        return RMat, path
    if path.is_dir():
        if is_ogb_folder(path):
            return OGB, path
        if (path / PROCESSED).is_file():
            return torch_file, path / PROCESSED
        raise DataError(
            f"Expected {PROCESSED}, raw/edge.csv.gz or raw/data.npz in {path} (got none of them): name the folder of a "
            f"dataset of PyG or of OGB"
        )
    if not path.exists():
        raise DataError(f"Expected a graph in {path} (there is nothing): check the name")
    name = unpacked(path)
    kind = _TEXT.get(name.suffix, TextEdges if name.name.startswith("out.") else None)
    if kind is TextEdges:
        lines = first_lines(path)
        kind = Dimacs if is_dimacs(lines) else MatrixMarket if lines[0].lower().startswith(BANNER) else TextEdges
    elif kind is None and name is path:
        kind = _BY_SUFFIX.get(path.suffix)
    if kind is None:
        raise DataError(f"Expected {KINDS} (got {path}): convert or rename it")
    return kind, path
