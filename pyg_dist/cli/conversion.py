"""From an input graph to a store: read, partition or choose a mesh, sort, write. One process, nothing collective."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.session.agreement import digest
from pyg_dist.cli.inputs import model_columns, read_parts, require, require_parts, say_what_was_read, train_mask_of
from pyg_dist.errors import DataError, PygDistError, StoreError
from pyg_dist.grid.plan.cost import grid_plans
from pyg_dist.grid.plan.mesh_shape import MeshShape
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.halo.plan.cover import minimum_vertex_cover
from pyg_dist.partition import Batches, check_given, partition
from pyg_dist.partition.balance import balanced_by_kind
from pyg_dist.partition.inputs import Array, node_work
from pyg_dist.partition.solver import Preset, Solver, require_memory
from pyg_dist.partition.stream import CHUNK, stream_parts
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.attributes import NanCount
from pyg_dist.store.folder import PARTIAL, StoreFolder, clear, explained_disk_errors, replace_text, require_space
from pyg_dist.store.format import ShardWriter, TensorSpec, as_torch, sync
from pyg_dist.store.graph_input import WHOLE, piece_keys
from pyg_dist.store.grid_store import write_grid
from pyg_dist.store.halo_writer import Block, Choose, NodeParts, write_edges, write_nodes
from pyg_dist.store.manifest import FILE as MANIFEST
from pyg_dist.store.manifest import Manifest, Shard
from pyg_dist.store.source import Attribute
from pyg_dist.store.sources import Source
from pyg_dist.store.spool import Spool, SpoolFacts, load_spool, save_spool, spool
from pyg_dist.store.typed_source import TypedSource
from pyg_dist.store.typed_store import FILE, TypesManifest

Progress = Callable[[str, int], None]
"""Called with the step and the number of further edges that are done in it."""

_OWN_COLUMNS = {"node": ("node_id",), "edge": ("edge_id", "sender", "source", "target", "is_post")}
_MOST_TILES = 1 << 14
_WORK_BYTES_PER_EDGE = 16 + 20 + 17
"""On disk: the spool, the buckets and the edges of the store."""


@dataclass(frozen=True)
class StoreOptions:
    """How a halo store is written."""

    parts: int  # how many
    method: str = "metis"  # of the partition, by name; or a file with the part of each node
    epsilon: float = 0.03  # how much heavier than the mean a part may be
    seed: int = 0  # of the partition
    memory: int = 4 << 30  # bytes to use
    solver: Solver = "mt-kahypar"  # of hypergraphs
    preset: Preset | None = None  # Mt-KaHyPar's; None: the method's own
    undirected: bool = False  # add the reverse of each edge
    resume: bool = False  # go on with interrupted work
    force: bool = False  # replace a store
    batches: Batches | None = None  # mini-batches of the stochastic model


def write_halo_store(
    source: Source, out: Path, options: StoreOptions, progress: Progress | None = None, parts: Tensor | None = None
) -> Manifest:
    """Write the store of a graph, in bounded memory but for the solver of the partition.

    ``parts``: the part of each node, int32 ``[N]``, for a piece of a graph with types; some parts may be empty.
    """
    require(options.parts >= 1, f"one part or more (got {options.parts})")
    if source.num_nodes is not None and parts is None:
        require_parts("part", options.parts, source.num_nodes)

    with _converting(source, out, options, progress, must_train=parts is None) as work:
        edges, others = work.edges, work.write_others()
        if parts is None:
            require_parts("part", options.parts, edges.num_nodes)
        owner = work.parts() if parts is None else parts.numpy()
        nodes = NodeParts.of(owner, options.parts)
        shards = write_nodes(work.folder, nodes, work.attributes(), options.memory, again=not work.knows_nan)
        work.note_nan()
        load = np.bincount(owner, weights=edges.in_degree, minlength=options.parts)
        shards |= write_edges(
            work.folder, edges, nodes, _cover(load), options.memory, lambda n: work.progress("sorting", n)
        )
        return work.commit("halo", others | shards, {
            "partition": "given" if options.method.endswith(".npy") else options.method,
            "epsilon": options.epsilon,
            "seed": options.seed,
            "edges": edges.digest(source.first_target),
            "parts": digest(torch.from_numpy(owner.astype(np.int32, copy=False))),
        })  # fmt: skip


def write_grid_store(
    source: Source,
    out: Path,
    options: StoreOptions,
    tiles: tuple[int, int],
    mesh: dict[str, int] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the grid store of a graph, in bounded memory, in ``tiles`` rows and columns of tiles.

    Node orders are balanced for ``mesh``; None: the cheapest of ``options.parts`` ranks.
    """
    require(min(tiles) >= 1, f"--tiles of one or more (got {tiles[0]} {tiles[1]})")
    require(
        tiles[0] * tiles[1] <= _MOST_TILES, f"at most {_MOST_TILES:,} tiles, a file each (got {tiles[0] * tiles[1]:,})"
    )
    require(options.parts >= 1, f"one rank or more (got {options.parts})")
    wanted = None if mesh is None else MeshShape.of(mesh, options.parts)  # raises before there is a folder

    with _converting(source, out, options, progress, repr(("grid", tiles, mesh))) as work:
        edges, others = work.edges, work.write_others()
        edge_digest = edges.digest()
        model = Model.of_layers(edges.num_nodes, edges.num_edges, *model_columns(source))
        machine = Machine.load()
        best = grid_plans(model, options.parts, machine, wanted)[0]
        plan, orders = GridPlan.of(
            lambda: ((torch.from_numpy(ends[0]), torch.from_numpy(ends[1])) for ends in edges.ends(CHUNK)), model,
            best, machine, options.seed, digest(repr((edge_digest, options.seed))),
        )  # fmt: skip
        shards = write_grid(
            work.folder, edges, work.attributes(), [order.node_id.numpy() for order in orders], tiles, options.memory,
            lambda n: work.progress("sorting", n),
        )  # fmt: skip
        work.note_nan()
        stored = {name: value for name, value in asdict(plan).items() if name != "layout"}
        more = {"tiles": tiles, "edge_digest": edge_digest, "seed": options.seed}
        return work.commit("grid", others | shards, stored | more)


def write_types_store(
    source: TypedSource, out: Path, options: StoreOptions, progress: Progress | None = None
) -> TypesManifest:
    """Write the store of a graph with types, as :func:`write_halo_store` does of each piece; it appears whole."""
    is_plain = not (options.undirected or options.batches is not None)
    require(is_plain, "no --undirected or --model stochastic with several types (got one): leave it out")
    require_parts("part", options.parts, sum(source.num_nodes.values()))
    new, old = (out.with_name(f"{out.name}.{word}") for word in ("new", "old"))
    if out.exists() and not (options.force and (out / FILE).is_file()) and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"Expected nothing in {out} (got files): choose another name, or --force replaces a store")
    pieces = source.pieces()
    for piece in pieces.values():
        _check_names(piece)
    try:
        # An interrupted run leaves its work here and in the folder of a piece, and the pieces that are complete.
        with _converting(source.homogeneous(), new / "parts", options, progress) as whole:
            options = replace(options, resume=whole.folder.known("parts", str) is not None)
            if not options.resume:
                clear(new, whole.folder.path.name)
            parts = torch.from_numpy(whole.parts(list(source.num_nodes.values())))
            shutil.rmtree(whole.folder.work / "spool", ignore_errors=True)
            manifest = _write_pieces(source, pieces, parts, new, options, progress)
            shutil.rmtree(whole.folder.path)
    except PygDistError:
        if new.exists() and not (new / "parts").exists():
            shutil.rmtree(new)
        raise
    replace_text(new / FILE, manifest.to_json())
    shutil.rmtree(old, ignore_errors=True)  # whatever happens, the old store or the new one is whole
    if out.exists():
        os.replace(out, old)
    os.replace(new, out)
    shutil.rmtree(old, ignore_errors=True)
    return TypesManifest.load(out)


def _write_pieces(
    source: TypedSource, pieces: Mapping[str, Source], parts: Tensor, out: Path, options: StoreOptions,
    progress: Progress | None,
) -> TypesManifest:  # fmt: skip
    """Write the stores of all types and relations; returns the manifest that names them."""
    sizes = source.num_nodes
    of_kind = dict(zip(sizes, torch.split(parts, list(sizes.values())), strict=True))
    of_nodes, of_edges = piece_keys(sizes, source.relations)
    owners = {WHOLE: parts[:0]} | {of_nodes[kind]: owner for kind, owner in of_kind.items()}
    for (first, _, last), key in of_edges.items():
        owners[key] = of_kind[first] if first == last else torch.cat([of_kind[first], of_kind[last]])
    stores = {}
    for key, piece in pieces.items():
        is_there = options.resume and (out / key / MANIFEST).is_file() and not (out / key / PARTIAL).exists()
        if not is_there:
            write_halo_store(piece, out / key, options, progress, owners[key])
        stores[key] = Manifest.load(out / key)
    return TypesManifest(
        options.parts, "given" if options.method.endswith(".npy") else options.method, sizes, list(source.relations),
        [stores[key].planned("edges", str) for key in of_edges.values()],
        {kind: digest(owner) for kind, owner in of_kind.items()},
        {key: manifest.digest for key, manifest in stores.items()},
    )  # fmt: skip


def _check_names(source: Source) -> None:
    for kind, attributes in (("node", source.nodes), ("edge", source.edges)):
        for name in (a.name for a in attributes if a.name in _OWN_COLUMNS[kind]):
            raise DataError(f"Expected no {kind} attribute '{name}', which stores have themselves (got one): rename it")


@contextmanager
def _converting(
    source: Source, out: Path, options: StoreOptions, progress: Progress | None, mesh: str = "", must_train: bool = True
) -> Iterator[_Conversion]:
    """Context of a conversion of an input to the store ``out``; after an error ``--resume`` can go on."""
    _check_names(source)
    require_space(out, _space_needed(source))
    identity = _identity(source, options, mesh)
    with explained_disk_errors(out), StoreFolder(out, identity, options.resume, options.force) as folder:
        yield _Conversion(folder, source, options, progress or (lambda step, count: None), must_train)


class _Conversion:
    """An input, and the folder that its store is written to.

    Attributes:
        nan: NaN of each node attribute, known once its rows were written.
        knows_nan: whether an interrupted run has counted it.
        must_train: whether a ``train_mask`` has to select a node.
    """

    def __init__(
        self, folder: StoreFolder, source: Source, options: StoreOptions, progress: Progress, must_train: bool
    ) -> None:
        self.folder, self.source, self.options, self.progress = folder, source, options, progress
        self.must_train = must_train
        counted = folder.known("nan", dict[str, NanCount])
        self.knows_nan, self.nan = counted is not None, counted or {}

    @cached_property
    def edges(self) -> Spool:
        """The edges, read to disk when they are first needed, or by an interrupted run."""
        path, folder, source = self.folder.work / "spool", self.folder, self.source
        edges = load_spool(path, folder.known("spool", tuple[SpoolFacts, dict[str, int]]), source.edges)
        if edges is None:
            options = self.options
            edges = spool(source, path, options.undirected, options.memory, lambda n: self.progress("reading", n))
            folder.note("spool", save_spool(edges))
        say_what_was_read(source, edges)
        return edges

    def attributes(self) -> tuple[Attribute, ...]:
        """Of nodes; their NaN entries are counted on the way."""
        return tuple(replace(a, rows=partial(self._watched_rows, a)) for a in self.source.nodes)

    def _watched_rows(self, attribute: Attribute, num_bytes: int) -> Iterator[Array]:
        """The rows of an attribute; NaN is counted, and training nodes are looked for, on the way."""
        found, row, has_training = NanCount(), 0, False
        for piece in attribute.rows(num_bytes):
            if attribute.name == "train_mask":
                has_training |= bool(piece.any())
            if attribute.dtype in ("F64", "F32", "F16", "BF16"):
                found += NanCount.of(as_torch(np.require(piece, requirements=["C", "W"]), attribute.dtype), row)
            row += len(piece)
            yield piece
        self.nan[attribute.name] = found
        if self.must_train and attribute.name == "train_mask" and attribute.dtype == "BOOL" and not has_training:
            raise DataError("Expected 'train_mask' to select at least one node (got none): the loss would be NaN")

    def note_nan(self) -> None:
        self.folder.note("nan", self.nan)

    def parts(self, kinds: Sequence[int] = ()) -> Array:
        """The part of each node, int32 ``[N]``, found now or by an interrupted run.

        ``kinds``: the number of nodes of each type, where each type has to be balanced.
        """
        path, known = self.folder.work / "parts", self.folder.known("parts", str)
        if known is not None and path.exists():
            kept = np.fromfile(path, np.int32)
            if digest(kept) == known:
                return kept
        edges, options = self.edges, self.options
        if options.method.endswith(".npy"):
            found = check_given(read_parts(options.method), edges.num_nodes, options.parts)
        else:
            found = _found_parts(edges, self.source, options)
            if kinds:
                found = balanced_by_kind(lambda: edges.ends(CHUNK), found, kinds, options.parts, options.epsilon)
        parts: Array = found.numpy()
        path.write_bytes(parts.data)
        sync(path)
        self.folder.note("parts", digest(parts))
        return parts

    def write_others(self) -> dict[str, Shard]:
        others = self.source.other_tensors
        finished = self.folder.finished("other")
        if finished or not others:
            return finished
        writer = ShardWriter(self.folder.work / "other", {name: spec for name, (spec, _) in others.items()})
        for name, (_, read) in others.items():
            writer.append({name: read()})
        return {"other": self.folder.finish("other", writer)}

    def commit(self, layout: Literal["halo", "grid"], shards: dict[str, Shard], plan: dict[str, object]) -> Manifest:
        """Write the manifest with these files and facts of the plan, which completes the store."""
        source, edges = self.source, self.edges
        nan = {name: astuple(found) for name, found in (self.nan | edges.nan).items() if found.rows}
        of_nodes, of_edges = ({a.name: TensorSpec(a.dtype, a.shape) for a in of} for of in (source.nodes, source.edges))
        manifest = Manifest(
            layout, edges.num_nodes, edges.num_edges, self.options.parts, source.graph, of_nodes, of_edges,
            dict(source.other), plan | {"nan": nan}, dict(sorted(shards.items())),
        )  # fmt: skip
        self.folder.commit(manifest)
        return manifest


def _identity(source: Source, options: StoreOptions, mesh: str) -> str:
    """Digest of the input and of the options that decide what the store holds."""
    wanted = {k: v for k, v in asdict(options).items() if k not in ("memory", "resume", "force")}
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    return digest(repr((source.name, source.reading, files, wanted, mesh)))


def _space_needed(source: Source) -> int:
    """About how many bytes are needed on the disk; unknown numbers of edges are guessed from the input's size."""
    num_edges = source.num_edges
    if num_edges is None:
        num_edges = sum(path.stat().st_size for path in source.files) // 8
    rows = sum(TensorSpec(a.dtype, (source.num_nodes or 0, *a.shape)).num_bytes for a in source.nodes)
    of_edges = sum(TensorSpec(a.dtype, (num_edges, *a.shape)).num_bytes for a in source.edges)
    return num_edges * _WORK_BYTES_PER_EDGE + rows + 3 * of_edges


def _found_parts(edges: Spool, source: Source, options: StoreOptions) -> Tensor:
    chosen = PartsOptions(
        options.method, options.epsilon, options.seed, options.solver, options.preset, options.memory, options.batches
    )  # checked here
    if options.method == "random" or options.parts == 1:
        none = host.empty(2, 0, dtype=torch.int64)
        return partition(none, edges.num_nodes, options.parts, "random", seed=options.seed)
    mask = train_mask_of(source)
    mask = None if mask is None or mask.dim() > 1 else mask
    if options.method == "stream":
        require_memory("stream", edges.num_nodes, edges.num_edges, options.parts, options.memory)
        weight = node_work(edges.in_degree, mask)
        return stream_parts(lambda: edges.ends(CHUNK), weight, options.parts, options.epsilon, options.seed)
    left = options.memory - 16 * edges.num_edges
    require_memory(options.method, edges.num_nodes, edges.num_edges, options.parts, max(left, 0))
    return find_parts(edges.edge_index(), edges.num_nodes, options.parts, chosen, mask)


def _cover(load: Array) -> Choose:
    """The hybrid exchange, as :meth:`~pyg_dist.halo.plan.cover.RemoteEdges.cover` has it, block by block."""

    def choose(block: Block) -> Array:
        prefer = host.full((block.num_rows,), bool(load[block.receiver] <= load[block.sender]))
        cover = minimum_vertex_cover(
            torch.from_numpy(block.row), torch.from_numpy(block.sum), block.num_rows, block.num_sums, prefer
        )
        is_post: Array = cover.left.numpy()[block.row]
        return is_post

    return choose
