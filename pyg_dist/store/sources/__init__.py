"""Input graphs, one file for each format: what they hold, in chunks."""

from __future__ import annotations

from pathlib import Path

from pyg_dist.errors import DataError
from pyg_dist.store.sources.edge_list import ArrayEdges, TextEdges
from pyg_dist.store.sources.matrix_market import MatrixMarket
from pyg_dist.store.sources.npz import Npz
from pyg_dist.store.sources.ogb import OGB, is_ogb_folder
from pyg_dist.store.sources.rmat import PREFIX, RMat
from pyg_dist.store.sources.saved_graph import SavedGraph
from pyg_dist.store.sources.source import Reading, Source
from pyg_dist.store.sources.torch_file import PROCESSED, TorchFile

__all__ = ["KINDS", "Reading", "Source", "open_source"]

KINDS = (
    ".npz; .pt of torch.save; .safetensors of pyg_dist.save_graph; the folder of a dataset of PyG or of an OGB node "
    "dataset; Matrix Market .mtx; edges in "
    ".txt .csv .tsv .edges .el (.gz too) or .npy; rmat:scale=22,edges=100000000,seed=0"
)
_BY_SUFFIX: dict[str, type[Source]] = {
    ".npz": Npz,
    ".pt": TorchFile,
    ".safetensors": SavedGraph,
    ".npy": ArrayEdges,
    ".mtx": MatrixMarket,
    **dict.fromkeys((".txt", ".csv", ".tsv", ".edges", ".el"), TextEdges),
}


def open_source(graph: str, reading: Reading = Reading()) -> Source:  # noqa: B008
    """The input graph of a name, as commands take it: :data:`KINDS`.

    Raises:
        DataError: There is no such file, or it is of none of these kinds; the message names file and line.
    """
    if graph.startswith(PREFIX):
        return RMat(graph)
    path = Path(graph)
    if path.is_dir():
        if is_ogb_folder(path):
            return OGB(path, reading)
        if (path / PROCESSED).is_file():
            return TorchFile(path / PROCESSED, reading)
        raise DataError(
            f"Expected {PROCESSED}, raw/edge.csv.gz or raw/data.npz in {path} (got none of them): name the folder of a "
            f"dataset of PyG or of OGB"
        )
    if not path.exists():
        raise DataError(f"Expected a graph in {path} (there is nothing): check the name")
    kind = _BY_SUFFIX.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)
    if kind is None or (path.suffix == ".gz" and kind not in (TextEdges, MatrixMarket)):
        raise DataError(f"Expected {KINDS} (got {path}): convert or rename it")
    return kind(path, reading)  # type: ignore[call-arg]
