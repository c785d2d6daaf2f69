"""A store of a graph with types: a folder of halo stores, one for each type of nodes and each relation.

The store of a relation between two types numbers the nodes of both in a row, sources first; all of them have the same
parts. What belongs to all of the graph is a store without nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch_geometric.typing import EdgeType

from pyg_dist.errors import StoreError
from pyg_dist.store.graph_input import WHOLE, piece_keys
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import Kind, Manifest, Signed

FILE = "types.json"


def is_typed_store(path: object) -> bool:
    """Whether a name is that of a store of a graph with types."""
    return isinstance(path, (str, Path)) and (Path(path) / FILE).is_file()


@dataclass(frozen=True)
class TypesManifest(Signed):
    """The manifest of such a folder."""

    kind: ClassVar[Kind] = Kind(
        "store of types", 1, "write one with python -m pyg_dist partition", "write the store again", 1 << 26, FILE
    )

    num_parts: int  # of each store
    partition: str  # how they were found
    types: dict[str, int]  # the number of nodes of each type
    relations: list[tuple[str, str, str]]  # of which there is a store each
    edges: list[str]  # the digest of the edges of each relation
    parts: dict[str, str]  # the digest of the owners of each type's nodes, int32
    stores: dict[str, str]  # the digest of each store's manifest, by the name of its folder
    digest: str = ""  # of all of the above

    def halo_stores(self, path: Path) -> TypedStores:
        """Open all stores; raises where a store has another manifest than this one names."""
        found = {}
        for name, digest in self.stores.items():
            manifest = Manifest.load(path / name)
            if manifest.digest != digest or manifest.layout != "halo" or manifest.num_parts != self.num_parts:
                raise StoreError(f"Expected the store that {path / FILE} names in {path / name} (got another one)")
            found[name] = HaloStore(path / name, manifest)
        of_nodes, of_edges = piece_keys(self.types, self.relations)
        stores = TypedStores(
            found[WHOLE],
            {kind: found[key] for kind, key in of_nodes.items()},
            {relation: found[key] for relation, key in of_edges.items()},
        )
        sizes = {kind: store.manifest.num_nodes for kind, store in stores.nodes.items()}
        wrong = [r for r, s in stores.edges.items() if s.manifest.num_nodes != sum(sizes[kind] for kind in {*r[::2]})]
        if sizes != self.types or wrong:
            raise StoreError(f"Expected stores of {self.types} nodes in {path} (got {wrong or sizes}): write it again")
        return stores


@dataclass(frozen=True)
class TypedStores:
    """The stores of a graph with types, opened for reading."""

    whole: HaloStore  # attributes of the whole
    nodes: dict[str, HaloStore]  # by type
    edges: dict[EdgeType, HaloStore]  # by relation

    def all(self) -> list[HaloStore]:
        """All of them."""
        return [self.whole, *self.nodes.values(), *self.edges.values()]
