"""Edges in an ``.npy`` file; folders of them, one for each type of nodes and each relation, as MAG240M and IGB have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.typing import EdgeType

from pyg_dist.errors import DataError, refusing
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import dtype_name, slices
from pyg_dist.store.source import AS_IT_IS, Attribute, EdgeChunk, Reading, Source, array_rows, edge_place
from pyg_dist.store.sources.ogb import NAMES, SPLITS
from pyg_dist.store.typed_source import TypedSource

_NAMES = NAMES | {"node_label": "y"}
_EDGES, _COUNT, _COUNTS, _SPLIT = "edge_index.npy", "num_nodes.npy", "meta.pt", "split_dict.pt"


def mapped(path: Path) -> Array:
    """The array of an ``.npy`` file, memory-mapped."""
    with refusing(DataError, f"a NumPy array in {path}", "write it with numpy.save", ValueError, EOFError, OSError):
        whole: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return whole


def array_edges(path: Path, reading: Reading = AS_IT_IS) -> Source:
    """An ``.npy`` file of integers, ``[2, E]`` or ``[E, 2]``; ``[2, 2]`` is read as ``[2, E]``."""
    whole, first_id = mapped(path), reading.first_id or 0
    if whole.ndim != 2 or 2 not in whole.shape or whole.dtype.kind not in "iu":
        raise DataError(
            f"Expected integers [2, E] or [E, 2] in {path} (got {whole.dtype} {list(whole.shape)}): one column per edge"
        )
    is_wide = whole.shape[0] == 2
    num_edges = whole.shape[1 if is_wide else 0]

    def ends(size: int) -> Iterator[EdgeChunk]:
        for low in range(0, num_edges, size):
            whole = mapped(path)  # anew for each piece, so that pages are dropped
            source, target = (whole if is_wide else whole.T)[:, low : low + size].astype(np.int64) - first_id
            yield EdgeChunk(source, target, {}, edge_place(path, low))

    understood = f"an array [{'2, E' if is_wide else 'E, 2'}]; ids from {first_id}"
    return Source(path, reading, (path,), num_edges=num_edges, read_ends=ends, understood=understood)


def relations_in(path: Path) -> dict[EdgeType, Path]:
    """The relations of a folder, each in its own: ``SOURCE___NAME___TARGET``, or ``SOURCE__NAME__TARGET``."""
    found = dict[EdgeType, Path]()
    for edges in sorted([*path.glob(f"*/{_EDGES}"), *path.glob(f"processed/*/{_EDGES}")]):
        name = edges.parent.name
        words = name.split("___" if "___" in name else "__")
        if len(words) == 3 and all(words):
            found[words[0], words[1], words[2]] = edges.parent
    return found


def array_types(path: Path) -> TypedSource:
    """Arrays by the names of their files, ``[N, ...]`` in a type's folder, ``[E, ...]`` in a relation's.

    ``node_feat``, ``node_label`` and ``edge_feat`` are ``x``, ``y`` and ``edge_attr``. How many nodes a type without
    arrays has is in ``num_nodes.npy`` in its folder, or in MAG240M's ``meta.pt``. MAG240M's ``split_dict.pt`` becomes
    masks of the type with labels.
    """
    folders = relations_in(path)
    top = next(iter(folders.values())).parent
    with_arrays = (folder for folder in sorted(top.glob("[!.]*")) if any(folder.glob("*.npy")))
    of_nodes = {folder.name: folder for folder in with_arrays if folder not in folders.values()}
    for relation in folders:
        for kind in (relation[0], relation[-1]):
            of_nodes.setdefault(kind, top / kind)
    meta = {kind: count for place in (path, top) for kind, count in _content(place / _COUNTS).items()}
    counts = {kind: count for kind, count in meta.items() if isinstance(count, int)}
    splits = [place / _SPLIT for place in (path, top) if (place / _SPLIT).exists()][:1]
    labelled = sorted(kind for kind, folder in of_nodes.items() if (folder / "node_label.npy").exists())
    if splits and len(labelled) != 1:
        raise DataError(
            f"Expected node_label.npy of one type beside {splits[0]} (got {', '.join(labelled) or 'none'}): remove the "
            f"file, and save train_mask.npy in a type's folder"
        )
    nodes = dict[str, Source]()
    for kind, folder in sorted(of_nodes.items()):
        size, found = counts.get(kind), _arrays(folder, (_COUNT,))
        if (folder / _COUNT).exists():
            size = _count(folder / _COUNT)
        if size is None:
            if not found:
                raise DataError(
                    f"Expected the number of nodes of type {kind!r} in {folder / _COUNT} (there is none, and no other "
                    f"array): save it"
                )
            size = len(next(iter(found.values())))
        attributes, files = _attributes(folder, found, size), sorted(folder.glob("*.npy"))
        if splits and kind in labelled:
            names = {attribute.name for attribute in attributes}
            attributes += [mask for mask in _split_masks(splits[0], size) if mask.name not in names]
            files += splits
        nodes[kind] = Source(folder, files=tuple(files), num_nodes=size, num_edges=0, nodes=tuple(attributes))
    relations = dict[EdgeType, Source]()
    for relation, folder in folders.items():
        found_edges = array_edges(folder / _EDGES)
        columns = _attributes(folder, _arrays(folder, (_EDGES,)), found_edges.num_edges or 0)
        files = sorted(folder.glob("*.npy"))
        relations[relation] = replace(found_edges, path=folder, files=tuple(files), edges=tuple(columns))
    return TypedSource(path, Source(path, num_nodes=0, num_edges=0), nodes, relations)


def _arrays(folder: Path, but: tuple[str, ...]) -> dict[str, Array]:
    """The arrays in a folder by name; Python objects are left out."""
    found = {}
    for path in sorted(folder.glob("*.npy")):
        if path.name not in but:
            try:
                found[path.stem] = mapped(path)
            except DataError as error:
                if "Python objects" not in str(error):
                    raise
                warnings.warn(f"{path} is left out: it has Python objects, which are not unpickled", stacklevel=4)
    return found


def _attributes(folder: Path, arrays: dict[str, Array], size: int) -> list[Attribute]:
    found = []
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        if array.shape[:1] != (size,):
            raise DataError(f"Expected {size} rows in {path} (got shape {list(array.shape)}): save it again")
        found.append(Attribute(_NAMES.get(name, name), dtype_name(array.dtype), array.shape[1:], partial(_rows, path)))
    return found


def _rows(path: Path, num_bytes: int) -> Iterator[Array]:
    whole = mapped(path)
    for rows in slices(len(whole), whole.itemsize * math.prod(whole.shape[1:]), num_bytes):
        piece = mapped(path)[rows]  # anew for each piece, so that pages are dropped
        yield np.array(piece, piece.dtype.newbyteorder("="), order="C")


def _count(path: Path) -> int:
    count = mapped(path)
    if count.size != 1 or count.dtype.kind not in "iu" or count.item() < 0:
        got = count.item() if count.size == 1 else f"{count.dtype} {list(count.shape)}"
        raise DataError(f"Expected one number of nodes in {path} (got {got}): save an integer, 0 or more")
    return int(count.item())


def _split_masks(path: Path, size: int) -> Iterator[Attribute]:
    """The nodes that train, validate and test; MAG240M has its test nodes in two pieces."""
    masks = dict[str, Array]()
    for key, nodes in _content(path).items():
        name = SPLITS.get(key.partition("-")[0])
        if name is None:
            raise DataError(
                f"Expected 'train', 'valid' and 'test' in {path} (got {key!r}): save their numbers of nodes"
            )
        nodes = np.asarray(nodes)
        if nodes.size and (nodes.dtype.kind not in "iu" or nodes.min() < 0 or nodes.max() >= size):
            raise DataError(f"Expected numbers of nodes in [0, {size}) as {key!r} in {path}: save them again")
        masks.setdefault(name, np.zeros(size, np.bool_))[nodes.astype(np.int64)] = True
    for name, mask in masks.items():
        yield Attribute(name, "BOOL", (), array_rows(mask))


def _content(path: Path) -> dict[str, object]:
    """Numbers and arrays by name, ``{}`` without a file; nothing in it runs."""
    if not path.exists():
        return {}
    rebuild: Any = np.empty(0).__reduce__()[0]
    arrays = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    dtypes = {type(np.dtype(code)) for code in "bhilqBHILQ"}
    try:
        with torch.serialization.safe_globals([*arrays, np.ndarray, np.dtype, *dtypes]):
            return {str(name): value for name, value in torch.load(path, weights_only=True).items()}
    except Exception as error:  # of a file by torch: any
        got = str(error).splitlines()[0][:100]
        raise DataError(f"Expected numbers or arrays by name in {path} (got: {got}): save them again") from error
