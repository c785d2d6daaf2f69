"""Inputs with several types of nodes, in memory: files of ``save_graph`` and ``torch.save``, folders of OGB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch_geometric.data import HeteroData

from pyg_dist.errors import DataError
from pyg_dist.store.hetero_input import HeteroInput, read_hetero
from pyg_dist.store.saved import read_saved_types
from pyg_dist.store.sources import ogb
from pyg_dist.store.sources.saved_graph import PROCESSED, torch_file_types
from pyg_dist.store.sources.text import first_lines


def open_types(graph: str) -> HeteroInput | None:
    """The graph with types that commands are given a name of; ``None``: it has one type of nodes, or there is none.

    Raises:
        DataError: Something is wrong in it; the message names file and line.
    """
    path = Path(graph)
    if path.is_dir():
        if ogb.is_ogb_typed(path):
            return _ogb(path)
        path = path / PROCESSED
    if not path.is_file():
        return None
    read = {".safetensors": read_saved_types, ".pt": torch_file_types}.get(path.suffix)
    return None if read is None else read(path)


def _ogb(path: Path) -> HeteroInput:
    """A dataset of OGB, as ``ogb`` reads it: types and relations in alphabetical order, the split as masks."""
    raw, options, data = path / "raw", ogb.master_options(path.name.replace("_", "-")), HeteroData()
    split, has_label = path / "split" / options["split"], _row_of(raw / "nodetype-has-label.csv.gz")
    has_split = _row_of(split / "nodetype-has-split.csv.gz")
    for kind, count in sorted(_row_of(raw / "num-node-dict.csv.gz").items()):
        store, folder = data[kind], raw / "node-feat" / kind
        store.num_nodes = _whole(raw, count)
        for key in ["node_feat", *ogb.more_files(options, "node")]:
            _add(store, key, folder)
        if has_label.get(kind) == "True":
            labels = ogb.numbers(raw / "node-label" / kind / "node-label.csv.gz", "F64")
            store.y = torch.from_numpy(ogb.as_labels(labels, options))
        if has_split.get(kind) == "True":
            for name, mask in ogb.split_masks(split / kind, store.num_nodes).items():
                store[name] = torch.from_numpy(mask)
    for line in sorted(first_lines(raw / ogb.TRIPLETS)):
        words = line.split(",")
        if len(words) != 3:
            raise DataError(f"Expected source,relation,target in {raw / ogb.TRIPLETS} (got {line!r}): fetch it again")
        store, folder = data[tuple(words)], raw / "relations" / "___".join(words)
        ends = ogb.numbers(folder / "edge.csv.gz", "I64")
        if ends.shape[1] != 2:
            raise DataError(f"Expected 2 columns in {folder / 'edge.csv.gz'} (got {ends.shape[1]}): fetch it again")
        store.edge_index = torch.from_numpy(ends).T.contiguous()
        for key in ["edge_feat", *ogb.more_files(options, "edge")]:
            _add(store, key, folder)
    return read_hetero(data, allow_nan=True, warn=False)


def _row_of(path: Path) -> Mapping[str, str]:
    """A table of one line below the names of its columns, by these."""
    lines = first_lines(path)
    if len(lines) != 2:
        raise DataError(f"Expected names, and a line for one graph, in {path} (got {len(lines)} lines): fetch it again")
    return dict(zip(*(line.split(",") for line in lines), strict=False))


def _whole(raw: Path, count: str) -> int:
    if not count.isdecimal():
        raise DataError(f"Expected numbers of nodes in {raw / 'num-node-dict.csv.gz'} (got {count!r}): fetch it again")
    return int(count)


def _add(store: object, key: str, folder: Path) -> None:
    """An attribute, where this type has it."""
    path = folder / f"{key.replace('_feat', '-feat')}.csv.gz"
    if path.exists():
        setattr(store, ogb.NAMES.get(key, key), torch.from_numpy(ogb.numbers(path)))
