"""An input graph with types: a source for each type of nodes and each relation, none of which is held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.graph_input import WHOLE, edges_key, nodes_key
from pyg_dist.store.source import Attribute, EdgeChunk, Reading, Source, TensorSource

_CHUNK = 1 << 20


class Piece(TensorSource):
    """What a format knows of a type of nodes, or of a relation, whose ``num_nodes`` do not matter."""

    num_nodes: int

    def __init__(
        self,
        path: Path,
        files: Sequence[Path] = (),
        num_nodes: int = 0,
        nodes: Sequence[Attribute] = (),
        edges: Sequence[Attribute] = (),
        num_edges: int | None = 0,
        read_ends: Callable[[int], Iterator[EdgeChunk]] = lambda size: iter(()),
    ) -> None:
        super().__init__(path, Reading())
        self.files, self.num_nodes, self.num_edges = tuple(files), num_nodes, num_edges
        self.nodes, self.edges, self._read_ends = tuple(nodes), tuple(edges), read_ends

    def open(self) -> None:
        """All is known."""

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        return self._read_ends(size)


@dataclass(frozen=True)
class TypedSource:
    """An input graph with types."""

    path: Path  # file or folder
    whole: Source  # attributes of the whole
    nodes: Mapping[str, Source]  # by type; without edges
    relations: Mapping[EdgeType, TensorSource]  # whose edges are numbered within the types of their ends

    def __post_init__(self) -> None:
        if not self.nodes:
            raise DataError(f"Expected a type of nodes in {self.path} (got none): add their number, or a feature")
        for relation in self.relations:
            for kind in (relation[0], relation[-1]):
                if kind not in self.nodes:
                    raise DataError(
                        f"Expected nodes of type {kind!r} in {self.path} (got edges {relation} without them): add them"
                    )

    @property
    def num_nodes(self) -> dict[str, int]:
        """Of each type."""
        return {kind: source.num_nodes or 0 for kind, source in self.nodes.items()}

    def pieces(self) -> dict[str, Source]:
        """Graphs of one type that a store keeps; the ends of a relation's edges are numbered through both types."""
        found = {WHOLE: self.whole} | {nodes_key(k): source for k, source in enumerate(self.nodes.values())}
        for k, (relation, source) in enumerate(self.relations.items()):
            joined = Joined(self, list(dict.fromkeys((relation[0], relation[-1]))), [relation])
            joined.first_target = joined.first[relation[-1]]
            joined.edges, joined.other, joined.other_tensors = source.edges, source.other, source.other_tensors
            joined.graph, joined.files = source.graph, source.files
            found[edges_key(k)] = joined
        return found

    def homogeneous(self) -> Joined:
        """All as one graph, as by ``to_homogeneous()``, with the nodes that train."""
        joined = Joined(self, list(self.nodes), list(self.relations))
        masks = {
            kind: attribute
            for kind, source in self.nodes.items()
            for attribute in source.nodes
            if (attribute.name, attribute.dtype, attribute.shape) == ("train_mask", "BOOL", ())
        }

        def rows(num_bytes: int) -> Iterator[Array]:
            for kind, size in self.num_nodes.items():
                yield from masks[kind].rows(num_bytes) if kind in masks else [np.zeros(size, np.bool_)]

        if masks:
            joined.nodes = (Attribute("train_mask", "BOOL", (), rows),)
        sources = (self.whole, *self.nodes.values(), *self.relations.values())
        joined.files = tuple(dict.fromkeys(path for source in sources for path in source.files))
        return joined

    def edge_index(self, relation: EdgeType) -> Tensor:
        """All edges of a relation in memory, int64 ``[2, E]``."""
        chunks = [
            np.stack([chunk.source, chunk.target])
            for chunk in self.checked(relation, self.relations[relation].ends(_CHUNK))
        ]
        return torch.from_numpy(np.concatenate([np.empty((2, 0), np.int64), *chunks], axis=1))

    def checked(self, relation: EdgeType, chunks: Iterator[EdgeChunk]) -> Iterator[EdgeChunk]:
        """The edges of a relation, whose ends are nodes of its types."""
        for chunk in chunks:
            for ids, kind in ((chunk.source, relation[0]), (chunk.target, relation[-1])):
                bound = self.num_nodes[kind]
                if ids.size and (ids.min() < 0 or ids.max() >= bound):
                    place = int(((ids < 0) | (ids >= bound)).nonzero()[0][0])
                    raise DataError(
                        f"Expected nodes of type {kind!r} in [0, {bound}) in {chunk.place(place)} (got {ids[place]}): "
                        f"drop the edge, or number the nodes of each type from 0 on"
                    )
            yield chunk


class Joined(Source):
    """Edges of relations as those of one graph, whose nodes are those of several types in a row."""

    num_nodes: int

    def __init__(self, typed: TypedSource, kinds: Sequence[str], relations: Sequence[EdgeType]) -> None:
        self.typed, self.kinds, self.relations = typed, kinds, relations
        super().__init__(typed.path, Reading())

    def open(self) -> None:
        sizes, self.num_nodes = self.typed.num_nodes, 0
        self.first: dict[str, int] = {}
        for kind in self.kinds:
            self.first[kind] = self.num_nodes
            self.num_nodes += sizes[kind]
        counts = [self.typed.relations[relation].num_edges for relation in self.relations]
        known = [count for count in counts if count is not None]
        self.num_edges = sum(known) if len(known) == len(counts) else None

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """One relation after another; attributes are read if they are the graph's."""
        for relation in self.relations:
            given = self.typed.relations[relation]
            source, target = self.first[relation[0]], self.first[relation[-1]]
            for chunk in self.typed.checked(relation, given.chunks(size) if self.edges else given.ends(size)):
                ends = chunk.source.astype(np.int64) + source, chunk.target.astype(np.int64) + target
                yield replace(chunk, source=ends[0], target=ends[1])
