"""Manifests: JSON that lists the files of a store, their tensors and digests. Other files are not part of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import xxhash

from pyg_dist.backend.plain_json import typed
from pyg_dist.errors import DAMAGED, StoreError, refusing
from pyg_dist.store.attributes import NanCount
from pyg_dist.store.format import TensorSpec

LoopRule = Literal["remaining", "add", "replace"]
"""What adding self loops means for loops that exist: kept in place of the new one (PyG on ``edge_index``), kept
beside it (PyG on sparse tensors), or replaced by it (``SparseTensor``)."""

ADJ_VALUES = "adj_t values"
"""The edge attribute that holds the values of a sparse ``adj_t``."""

FILE = "manifest.json"
M = TypeVar("M", bound="Signed")
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A kind of manifest."""

    name: str  # such as "store"
    version: int  # of its format
    origin: str  # the command that writes one, for the error about a missing one
    remedy: str  # of the error about a damaged one
    max_bytes: int  # more than any has
    file: str = FILE  # its name


def to_json(content: object, indent: int | None = None) -> str:
    """The JSON of plain values and dataclasses, which :func:`~pyg_dist.backend.plain_json.typed` reads."""
    return json.dumps(content, default=_fields, indent=indent)


def _fields(thing: object) -> dict[str, object]:
    """The fields of a dataclass; empty lists are left out."""
    return {name: value for name, value in vars(thing).items() if value != []}


def digest_of(content: Mapping[str, object]) -> str:
    """The digest of a manifest's JSON without its last entry, the digest."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_fields)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


class Signed:
    """Base of manifests: a dataclass whose last field, ``digest``, is that of all others."""

    kind: ClassVar[Kind]

    def to_json(self) -> str:
        """The content of the file."""
        content = {name: value for name, value in vars(self).items() if name != "digest"}
        whole = {"format": f"pyg_dist {self.kind.name}", "version": self.kind.version, **content}
        return to_json(whole | {"digest": digest_of(whole)}, indent=1)

    @classmethod
    def load(cls: type[M], path: Path) -> M:
        """Read the manifest in the folder ``path``; written again, it has to be the same text.

        Raises:
            StoreError: There is none, it is of another version, or it was altered.
        """
        file, kind = path / cls.kind.file, cls.kind
        remedy = f"restore it, or {kind.remedy}"
        try:
            with refusing(StoreError, f"JSON in {file}", remedy, ValueError, RecursionError):
                if file.stat().st_size > kind.max_bytes:
                    raise ValueError(f"{file.stat().st_size} bytes")
                text = file.read_text()
                content = json.loads(text)
        except OSError as error:
            is_there = not isinstance(error, (FileNotFoundError, NotADirectoryError))
            got = f"{file.name}, {error.strerror}" if is_there else f"no {file.name}"
            raise StoreError(f"Expected a {kind.name} in {file.parent} (got {got}): {kind.origin}") from error
        with refusing(StoreError, f"the manifest of a {kind.name} in {file}", remedy, *DAMAGED):
            if content.pop("format") != f"pyg_dist {kind.name}":
                raise ValueError(f"no manifest of a {kind.name}")
            version = content.pop("version")
            if version != kind.version:
                raise StoreError(
                    f"Expected a {kind.name} of version {kind.version} in {file.parent} (got {version!r}): write it "
                    f"again"
                )
            made = typed(cls, content)
            if made.to_json() != text:
                raise ValueError("it is not as it was written: it was altered")
            for key, shard in vars(made).get("shards", {}).items():
                if "/" in key or shard.file.rpartition("-")[0] != key:  # no file but those of the folder is read
                    raise ValueError(f"{key!r} in the file {shard.file!r}")
            return made


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a file."""

    digest: str  # XXH3-128 of its bytes


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks of edges into a part, by source part: :class:`~pyg_dist.halo.plan.sizes.BlockNumbers`.

    Only files of edges in halo stores have them.
    """

    edges: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    post_edges: list[int] = field(default_factory=list)
    post_rows: list[int] = field(default_factory=list)
    pre_sums: list[int] = field(default_factory=list)
    digest: list[str] = field(default_factory=list)
    boundary: list[int] = field(default_factory=list)  # one number, of all blocks together


NO_BLOCKS = Blocks()


@dataclass(frozen=True)
class Shard:
    """One file of a store."""

    file: str  # its name, which ends in its digest
    bytes: int  # its size
    tensors: dict[str, StoredTensor]  # by name
    blocks: Blocks = NO_BLOCKS


@dataclass(frozen=True)
class GraphForm:
    """How a script sees the edges."""

    key: Literal["edge_index", "adj_t"]
    loop_rule: LoopRule


@dataclass(frozen=True)
class Manifest(Signed):
    """The manifest of the store of a graph with one type of nodes.

    Legend: *part* p or q, one file each; *block* (p, q), the edges from part p into part q.
    """

    kind: ClassVar[Kind] = Kind(
        "store", 2, "write one with python -m pyg_dist partition", "write the store again", 1 << 26
    )  # one of 512 parts has 30 MB

    layout: Literal["halo", "grid"]  # ``"halo"``: files by part; ``"grid"``: files by tile
    num_nodes: int  # N
    num_edges: int  # E
    num_parts: int  # parts of a halo store; ranks that a grid store was written for
    graph: GraphForm
    node_attributes: dict[str, TensorSpec]  # type and shape of a row, by name
    edge_attributes: dict[str, TensorSpec]  # the same for rows of edges
    other: dict[str, object]  # attributes that are neither, as JSON; tensors among them are in the shard ``other``
    plan: dict[str, object]  # decisions at the time of writing (partition, seed, mesh ...), as plain values
    shards: dict[str, Shard]  # files by key, such as ``edges-00003``
    digest: str = ""  # of all of the above

    def planned(self, name: str, kind: type[T], default: object = None) -> T:
        """An entry of :attr:`plan`, or else ``default``."""
        with refusing(StoreError, "the plan of a store", "write the store again", ValueError, TypeError):
            return typed(kind, self.plan.get(name, default), name)

    @property
    def nan(self) -> dict[str, NanCount]:
        """Attributes that have NaN, by name."""
        found = self.planned("nan", dict[str, tuple[int, int, int]], {})
        return {name: NanCount(*counts) for name, counts in found.items()}
