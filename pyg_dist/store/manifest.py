"""The manifest of a store: what is in which file, with digests. A store is what its manifest names.

Legend: *part* p or q, one file each; *block* (p, q), the edges from part p into part q.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from pyg_dist.errors import StoreError
from pyg_dist.store.consistency import require_consistent
from pyg_dist.store.format import TensorSpec

FORMAT, VERSION = "pyg_dist store", 2
FILE = "manifest.json"

LoopRule = Literal["remaining", "add", "replace"]
"""What adding self loops means for loops that exist: kept in place of the new one (PyG on ``edge_index``), kept
beside it (PyG on sparse tensors), or replaced by it (``SparseTensor``)."""

ADJ_VALUES = "adj_t values"
"""The edge attribute that holds the values of a sparse ``adj_t``."""


@dataclass(frozen=True)
class Shard:
    """One file of a store.

    Attributes:
        file: its name, which ends in its digest.
        num_bytes: its size.
        tensors: type and shape by name.
        digests: XXH3-128 of each tensor's bytes, by name.
        blocks: numbers and digests by block, for shards that are read in slices.
    """

    file: str
    num_bytes: int
    tensors: dict[str, TensorSpec]
    digests: dict[str, str]
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


@dataclass(frozen=True)
class Manifest:
    """See the module.

    Attributes:
        layout: ``"halo"``: files by part; ``"grid"``: files by tile.
        num_nodes: N.
        num_edges: E.
        num_parts: parts of a halo store; ranks that a grid store was written for.
        graph: how a script sees the edges: ``key``, ``loop_rule`` and whether they have ``values``.
        node_attributes: type and shape of a row, by name: ``(dtype, row shape)``.
        edge_attributes: the same for rows of edges.
        other: attributes that are neither, as JSON; tensors among them are in the shard ``other``.
        plan: what was decided when the store was written, plain values; this room does not read them.
        shards: files by key, such as ``edges-00003``.
        digest: of all of the above.
    """

    layout: Literal["halo", "grid"]
    num_nodes: int
    num_edges: int
    num_parts: int
    graph: dict[str, Any]
    node_attributes: dict[str, tuple[str, tuple[int, ...]]]
    edge_attributes: dict[str, tuple[str, tuple[int, ...]]]
    other: dict[str, Any]
    plan: dict[str, Any]
    shards: dict[str, Shard]
    digest: str = ""

    def to_json(self) -> str:
        """The content of the file; the last entry is the digest of all others."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "layout": self.layout,
            "num_nodes": self.num_nodes,
            "num_edges": self.num_edges,
            "num_parts": self.num_parts,
            "graph": self.graph,
            "node_attributes": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in self.node_attributes.items()},
            "edge_attributes": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in self.edge_attributes.items()},
            "other": self.other,
            "plan": self.plan,
            "shards": {key: shard.to_dict() for key, shard in sorted(self.shards.items())},
        }
        return json.dumps(content | {"digest": digest_of(content)}, indent=1, sort_keys=False)

    @staticmethod
    def load(path: Path) -> Manifest:
        """Read the manifest of the store in the folder ``path``, check it by its own digest and for contradictions.

        Raises:
            StoreError: There is none, it is of another version, it was altered, or contradicts itself.
        """
        file = path / FILE
        try:
            text = file.read_text()
            content = json.loads(text)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(
                f"Expected a store in {path} (got no {FILE}): write one with python -m pyg_dist partition"
            ) from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"Expected JSON in {file} (got: {error}): restore it, or write the store again") from error
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
            if content["version"] != VERSION:
                raise StoreError(
                    f"Expected a store of version {VERSION} in {path} (got {content['version']!r}): write it again"
                )
            found = content.pop("digest")
            if found != digest_of(content):
                raise ValueError("its digest does not hold: it was altered")
            manifest = Manifest(
                content["layout"],
                content["num_nodes"],
                content["num_edges"],
                content["num_parts"],
                content["graph"],
                {n: (entry["dtype"], tuple(entry["shape"])) for n, entry in content["node_attributes"].items()},
                {n: (entry["dtype"], tuple(entry["shape"])) for n, entry in content["edge_attributes"].items()},
                content["other"],
                content["plan"],
                {key: Shard.from_dict(entry) for key, entry in content["shards"].items()},
                found,
            )
            if manifest.to_json() != text:
                raise ValueError("it is not as it was written")
            require_consistent(manifest)
            return manifest
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"Expected the manifest of a store in {file} (got {type(error).__name__}: {error}): restore it, or "
                f"write the store again"
            ) from error


def digest_of(content: Mapping[str, Any]) -> str:
    """Of a manifest's JSON, but for its last entry, which this is."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()))
