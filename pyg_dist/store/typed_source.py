"""An input graph with types: a source for each type of nodes and each relation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.graph_input import WHOLE, piece_keys
from pyg_dist.store.source import Attribute, EdgeChunk, ReadEdges, Source, with_edges

_CHUNK = 1 << 20


@dataclass(frozen=True)
class TypedSource:
    """An input graph with types."""

    path: Path  # file or folder
    whole: Source  # attributes of the whole
    nodes: Mapping[str, Source]  # by type; without edges
    relations: Mapping[EdgeType, Source]  # whose edges are numbered within the types of their ends

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
        of_nodes, of_edges = piece_keys(self.nodes, self.relations)
        found = {WHOLE: self.whole} | {of_nodes[kind]: source for kind, source in self.nodes.items()}
        for relation, source in self.relations.items():
            kinds = list(dict.fromkeys((relation[0], relation[-1])))
            found[of_edges[relation]] = replace(
                self._joined(kinds, [relation], source.chunks), files=source.files, other=source.other,
                edges=tuple(replace(attribute, rows=with_edges) for attribute in source.edges),
                other_tensors=source.other_tensors, graph=source.graph,
                first_target=self.num_nodes[relation[0]] if len(kinds) > 1 else 0,
            )  # fmt: skip
        return found

    def homogeneous(self) -> Source:
        """One graph with the nodes and edges of all types, as by ``to_homogeneous()``, and the training mask."""
        masks = {
            kind: attribute
            for kind, source in self.nodes.items()
            for attribute in source.nodes
            if (attribute.name, attribute.dtype, attribute.shape) == ("train_mask", "BOOL", ())
        }

        def rows(num_bytes: int) -> Iterator[Array]:
            for kind, size in self.num_nodes.items():
                yield from masks[kind].rows(num_bytes) if kind in masks else [np.zeros(size, np.bool_)]

        sources = (self.whole, *self.nodes.values(), *self.relations.values())
        files = tuple(dict.fromkeys(path for source in sources for path in source.files))
        nodes = (Attribute("train_mask", "BOOL", (), rows),) if masks else ()
        return replace(self._joined(list(self.nodes), list(self.relations)), files=files, nodes=nodes)

    def _joined(self, kinds: Sequence[str], relations: Sequence[EdgeType], chunks: ReadEdges | None = None) -> Source:
        """One graph with the nodes of several types, one type after another, and the edges of relations.

        ``chunks`` reads the edges of the only relation; ``None``: each relation's are read in turn, without attributes.
        """
        sizes = [self.num_nodes[kind] for kind in kinds]
        first = dict(zip(kinds, accumulate(sizes, initial=0), strict=False))
        counts = [self.relations[relation].num_edges for relation in relations]
        known = [count for count in counts if count is not None]

        def ends(size: int) -> Iterator[EdgeChunk]:
            for relation in relations:
                source, target = first[relation[0]], first[relation[-1]]
                for chunk in self.checked(relation, (chunks or self.relations[relation].ends)(size)):
                    ends = chunk.source.astype(np.int64) + source, chunk.target.astype(np.int64) + target
                    yield replace(chunk, source=ends[0], target=ends[1])

        num_edges = sum(known) if len(known) == len(counts) else None
        return Source(self.path, num_nodes=sum(sizes), num_edges=num_edges, read_ends=ends)

    def edge_index(self, relation: EdgeType) -> Tensor:
        """All edges of a relation in memory, int64 ``[2, E]``."""
        chunks = [
            np.stack([chunk.source, chunk.target])
            for chunk in self.checked(relation, self.relations[relation].ends(_CHUNK))
        ]
        return torch.from_numpy(np.concatenate([np.empty((2, 0), np.int64), *chunks], axis=1))

    def checked(self, relation: EdgeType, chunks: Iterator[EdgeChunk]) -> Iterator[EdgeChunk]:
        """The edges of a relation; raises where an end is no node of its type."""
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
