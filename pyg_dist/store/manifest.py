"""The manifest of a store: what is in which file, with digests; checked. A store is what its manifest names.

Legend: *part* p or q, one file each; *block* (p, q), the edges from part p into part q. Digests guard the content of a
file. What :func:`_require_consistent` checks are the numbers by which slices of files are read: those that a writer of
this graph would have left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np

from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import FileLayout, TensorSpec, of_rows, storage_dtype
from pyg_dist.store.signed_json import Kind, Signed

LoopRule = Literal["remaining", "add", "replace"]
"""What adding self loops means for loops that exist: kept in place of the new one (PyG on ``edge_index``), kept
beside it (PyG on sparse tensors), or replaced by it (``SparseTensor``)."""

Rows = Mapping[str, tuple[str, tuple[int, ...]]]
"""Attributes by name: the type and the shape of a row."""

ADJ_VALUES = "adj_t values"
"""The edge attribute that holds the values of a sparse ``adj_t``."""


@dataclass(frozen=True)
class Shard:
    """One file of a store."""

    file: str  # its name, which ends in its digest
    num_bytes: int  # its size
    tensors: dict[str, TensorSpec]  # type and shape by name
    digests: dict[str, str]  # XXH3-128 of each tensor's bytes, by name
    # numbers and digests by block, for shards that are read in slices
    blocks: dict[str, list[Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        tensors = {
            name: {"dtype": spec.dtype, "shape": list(spec.shape), "digest": self.digests[name]}
            for name, spec in self.tensors.items()
        }
        return {"file": self.file, "bytes": self.num_bytes, "tensors": tensors, "blocks": self.blocks}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Shard:
        """The reverse of :meth:`to_dict`."""
        tensors = content["tensors"]
        return Shard(
            str(content["file"]),
            int(content["bytes"]),
            {name: TensorSpec(entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()},
            {name: str(entry["digest"]) for name, entry in tensors.items()},
            dict(content["blocks"]),
        )


def shards_of(content: Mapping[str, Any]) -> dict[str, Shard]:
    """The shards of a manifest's JSON, by key; each in a file of its folder, as large as its tensors."""
    shards = {key: Shard.from_dict(entry) for key, entry in content.items()}
    for key, shard in shards.items():
        for name, spec in shard.tensors.items():
            _require_spec(f"{name!r} in {key!r}", spec)
        _require(shard.file.rpartition("-")[0] == key and "/" not in key, f"{key!r} in the file {shard.file!r}")
        size = FileLayout.of(shard.tensors).num_bytes
        _require(shard.num_bytes == size, f"{shard.num_bytes} bytes of {key!r}, whose tensors take {size}")
    return shards


@dataclass(frozen=True)
class Manifest(Signed):
    """See the module."""

    kind: ClassVar[Kind] = Kind(
        "store", 2, "write one with python -m pyg_dist partition", "write the store again", 1 << 26
    )  # one of 512 parts has 30 MB

    layout: Literal["halo", "grid"]  # ``"halo"``: files by part; ``"grid"``: files by tile
    num_nodes: int  # N
    num_edges: int  # E
    num_parts: int  # parts of a halo store; ranks that a grid store was written for
    graph: dict[str, Any]  # how a script sees the edges: ``key``, ``loop_rule`` and whether they have ``values``
    node_attributes: Rows  # type and shape of a row, by name: ``(dtype, row shape)``
    edge_attributes: Rows  # the same for rows of edges
    other: dict[str, object]  # attributes that are neither, as JSON; tensors among them are in the shard ``other``
    plan: dict[str, Any]  # what was decided when the store was written, as plain values
    shards: dict[str, Shard]  # files by key, such as ``edges-00003``
    digest: str = ""  # of all of the above

    def content(self) -> dict[str, object]:
        content = super().content()
        for kind in _ATTRIBUTES:
            rows: Rows = getattr(self, kind)
            content[kind] = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in rows.items()}
        content["shards"] = {key: shard.to_dict() for key, shard in sorted(self.shards.items())}
        return content

    @classmethod
    def of(cls, content: dict[str, Any], digest: str) -> Manifest:
        for kind in _ATTRIBUTES:
            content[kind] = {name: (row["dtype"], tuple(row["shape"])) for name, row in content[kind].items()}
        manifest = cls(**content | {"shards": shards_of(content["shards"])}, digest=digest)
        _require_consistent(manifest)
        return manifest


_ATTRIBUTES = ("node_attributes", "edge_attributes")
_MOST = 1 << 48
"""More nodes or edges than any store has; products with them fit into 64 bits."""
_NUMBERS = ("edges", "rows", "sums", "post_edges", "post_rows", "pre_sums")
"""Of each block of a halo store, see :class:`~pyg_dist.halo.plan.sizes.BlockNumbers`."""


def _require_consistent(manifest: Manifest) -> None:
    """Check everything that a reader takes from a manifest without looking at a shard. O(shards + P^2) time."""
    for name in ("num_nodes", "num_edges", "num_parts"):
        _require(_is_count(getattr(manifest, name)), f"{name} {getattr(manifest, name)!r}")
    _require(manifest.num_parts >= 1, f"{manifest.num_parts} parts")
    for name in ("graph", "other", "plan"):
        _require(isinstance(getattr(manifest, name), dict), f"{name!r} is no object")
    nan = manifest.plan.get("nan", {})
    _require(isinstance(nan, dict) and all(map(_are_three_counts, nan.values())), f"NaN counts {nan!r}")
    for name, spec in row_specs({**manifest.node_attributes, **manifest.edge_attributes}, 0).items():
        _require_spec(f"attribute {name!r}", spec)
    for key, shard in manifest.shards.items():
        has_blocks = manifest.layout == "halo" and key.startswith("edges-")
        _require(has_blocks or not shard.blocks, f"blocks of {key!r}")
    layouts = {"halo": _require_halo, "grid": _require_grid}
    _require(manifest.layout in layouts, f"layout {manifest.layout!r}")
    layouts[manifest.layout](manifest)


def _require_halo(manifest: Manifest) -> None:
    num_parts, shards = manifest.num_parts, manifest.shards
    _require(num_parts <= len(shards), f"{num_parts} parts in {len(shards)} files")
    for name in ("partition", "edges", "parts"):
        _require(isinstance(manifest.plan.get(name), str), f"no {name!r} in the plan")
    columns = [_columns(manifest, q) for q in range(num_parts)]
    edges, rows, sums, post_edges, post_rows, pre_sums = (np.stack(c, 1) for c in zip(*columns, strict=True))
    node_id = [shards[f"nodes-{q:05d}"].tensors.get("node_id", TensorSpec("I64", ())) for q in range(num_parts)]
    nodes = np.array([spec.num_rows for spec in node_id])
    _require(nodes.sum() == manifest.num_nodes, f"{nodes.sum()} nodes of all parts, not {manifest.num_nodes}")
    _require(edges.sum() == manifest.num_edges, f"{edges.sum()} edges of all blocks, not {manifest.num_edges}")
    crossing = edges * (1 - np.eye(num_parts, dtype=np.int64))
    for name, number, least, most in (
        ("rows", rows, crossing > 0, np.minimum(crossing, nodes[:, None])),
        ("sums", sums, crossing > 0, np.minimum(crossing, nodes)),
        ("post_edges", post_edges, crossing < 0, crossing),
        ("post_rows", post_rows, post_edges > 0, np.minimum(rows, post_edges)),
        ("pre_sums", pre_sums, crossing > post_edges, np.minimum(sums, crossing - post_edges)),
    ):
        wrong = (number < least) | (number > most)
        if wrong.any():
            p, q = (int(ends[0]) for ends in wrong.nonzero())
            raise ValueError(f"{number[p, q]} {name!r} from part {p} to {q}, not {int(least[p, q])} to {most[p, q]}")
    expected = {}
    for q in range(num_parts):
        count, across = int(edges[:, q].sum()), int(crossing[:, q].sum())
        expected[f"edges-{q:05d}"] = edge_specs(count, across, manifest.edge_attributes)
        expected[f"nodes-{q:05d}"] = node_specs(int(nodes[q]), manifest.node_attributes)
        expected[f"halo-{q:05d}"] = halo_specs(int(rows[:, q].sum()), int(sums[:, q].sum()))
        (boundary,) = shards[f"edges-{q:05d}"].blocks["boundary"]
        low, high = int(sums[:, q].max()), min(int(sums[:, q].sum()), int(nodes[q]))
        _require(low <= boundary <= high, f"{boundary} boundary nodes of part {q}, not {low} to {high}")
    _require_files(shards, expected)


def _columns(manifest: Manifest, part: int) -> list[Array]:
    """The numbers of the blocks into a part, int64 ``[P]`` each."""
    blocks, num_parts = manifest.shards[f"edges-{part:05d}"].blocks, manifest.num_parts
    lengths = dict.fromkeys(_NUMBERS, num_parts) | {"digest": num_parts, "boundary": 1}
    _require(blocks.keys() == lengths.keys(), f"blocks of part {part} with {', '.join(blocks)}")
    for name, length in lengths.items():
        values = blocks[name]
        _require(isinstance(values, list) and len(values) == length, f"{name!r} of part {part} of other parts")
        is_one = (lambda value: isinstance(value, str)) if name == "digest" else _is_count
        _require(all(map(is_one, values)), f"{name!r} of part {part} is no list of {name}")
    return [np.array(blocks[name], np.int64) for name in _NUMBERS]


def _require_grid(manifest: Manifest) -> None:
    shards, num_nodes = manifest.shards, manifest.num_nodes
    tiles: Any = manifest.plan.get("tiles")
    is_pair = isinstance(tiles, list) and len(tiles) == 2 and all(map(_is_count, tiles)) and min(tiles) > 0
    if not is_pair or tiles[0] * tiles[1] > len(shards):
        raise ValueError(f"tiles {tiles!r} in {len(shards)} files")
    num_orders = min(max(len(shards["orders"].tensors) // 2, 1), 2)
    expected, counts = {"orders": order_specs(num_nodes, num_orders)}, dict.fromkeys(range(num_orders), 0)
    sizes = (np.diff(bounds(size, tiles[0])).tolist() for size in (num_nodes, manifest.num_edges))
    for r, (nodes, edges) in enumerate(zip(*sizes, strict=True)):
        expected[f"edges-{r:05d}"] = range_specs(edges, manifest.edge_attributes)
        if manifest.node_attributes:
            expected[f"rows-{r:05d}"] = row_specs(manifest.node_attributes, nodes)
    for number, r, c in product(range(num_orders), range(tiles[0]), range(tiles[1])):
        key = f"tile-{number}-{r:05d}-{c:05d}"
        count = shards[key].tensors["edge_id"].num_rows
        counts[number] += count
        expected[key] = tile_specs(count)
    _require_files(shards, expected)
    for number, count in counts.items():
        _require(count == manifest.num_edges, f"{count} edges in the tiles of order {number}, not {manifest.num_edges}")


def row_specs(attributes: Rows, count: int) -> dict[str, TensorSpec]:
    """The tensors of ``count`` rows of each attribute."""
    return {name: of_rows(dtype, count, shape) for name, (dtype, shape) in attributes.items()}


def node_specs(count: int, attributes: Rows) -> dict[str, TensorSpec]:
    """The content of a halo store's ``nodes``: a part's global ids, and attributes."""
    return {"node_id": of_rows("I64", count)} | row_specs(attributes, count)


def edge_specs(count: int, crossing: int, attributes: Rows) -> dict[str, TensorSpec]:
    """The content of a halo store's ``edges``: those into a part, of which ``crossing`` come from others."""
    ends = {"source": of_rows("I32", count), "target": of_rows("I32", count), "edge_id": of_rows("I64", count)}
    return ends | {"is_post": of_rows("BOOL", crossing)} | row_specs(attributes, count)


def halo_specs(rows: int, sums: int) -> dict[str, TensorSpec]:
    """The content of a halo store's ``halo``: by sender, the distinct sources and targets of edges into a part."""
    return {"row_id": of_rows("I64", rows), "sum_id": of_rows("I64", sums)}


def range_specs(count: int, attributes: Rows) -> dict[str, TensorSpec]:
    """The content of a grid store's ``edges``: some in input order, with attributes."""
    return {"source": of_rows("I64", count), "target": of_rows("I64", count)} | row_specs(attributes, count)


def tile_specs(count: int) -> dict[str, TensorSpec]:
    """The content of a grid store's ``tile``."""
    return {"edge_id": of_rows("I64", count), "row": of_rows("I32", count), "column": of_rows("I32", count)}


def order_specs(num_nodes: int, num_orders: int) -> dict[str, TensorSpec]:
    """The content of the shard of the node orders: global ids by position, positions by global id."""
    dtype = "I32" if num_nodes <= np.iinfo(np.int32).max else "I64"
    names = [f"{kind}{number}" for kind in ("order", "position") for number in range(num_orders)]
    return {name: of_rows(dtype, num_nodes) for name in names}


def bounds(size: int, count: int) -> Array:
    """The bounds of ``count`` near-equal ranges, int64 ``[count + 1]``."""
    return np.array([size * k // count for k in range(count + 1)], np.int64)


def _require_files(shards: Mapping[str, Shard], expected: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    """Raise unless there is a shard with these tensors for each key, and no other but for what has no rows."""
    for key in sorted(expected.keys() ^ (shards.keys() - {"other"})):
        raise ValueError(f"{'no' if key in expected else 'a foreign'} file {key!r}")
    for key, specs in expected.items():
        for name, spec in {**shards[key].tensors, **specs}.items():
            found, wanted = shards[key].tensors.get(name), specs.get(name)
            _require(found == wanted, f"{key!r} with {found} as {name!r}, not {wanted} ({spec.dtype})")


def _require_spec(what: str, spec: TensorSpec) -> None:
    _require(all(map(_is_count, spec.shape)), f"{what} of shape {list(spec.shape)}")
    storage_dtype(spec.dtype)  # raises


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST  # not bool


def _are_three_counts(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _require(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise ValueError(what)
