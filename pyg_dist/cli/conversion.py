"""From an input graph to a store: read, partition, sort, write. One process, nothing collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.cli.graph_options import say_what_was_read
from pyg_dist.errors import DataError, OptionError
from pyg_dist.halo.plan.cover import minimum_vertex_cover
from pyg_dist.partition import Batches, check_given, partition
from pyg_dist.partition.inputs import Array, as_parts, node_work
from pyg_dist.partition.memory import require_memory
from pyg_dist.partition.solver import Preset, Solver
from pyg_dist.partition.stream import CHUNK, stream_parts
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.store.attributes import NanCount
from pyg_dist.store.folder import StoreFolder, explained_disk_errors, require_space
from pyg_dist.store.format import TensorSpec, as_torch
from pyg_dist.store.halo_writer import Block, Choose, NodeParts, write_edges, write_nodes
from pyg_dist.store.manifest import Manifest, Shard
from pyg_dist.store.source import NodeAttribute, SourceInfo
from pyg_dist.store.sources import Source
from pyg_dist.store.spool import Spool, load_spool, save_spool, spool
from pyg_dist.store.writer import ShardWriter, sync

Progress = Callable[[str, int], None]
"""Called with the step and the number of further edges that are done in it."""

_WORK_BYTES_PER_EDGE = 16 + 20 + 17
"""On disk: the spool, the buckets and the edges of the store."""


@dataclass(frozen=True)
class StoreOptions:
    """What a halo store is written with.

    Attributes:
        parts: how many.
        method: of the partition, by name; or a file with the part of each node.
        epsilon: how much heavier than the mean a part may be.
        seed: of the partition.
        memory: bytes to use.
        solver: of hypergraphs.
        preset: Mt-KaHyPar's; None: the method's own.
        undirected: add the reverse of each edge.
        resume: go on with interrupted work.
        force: replace a store.
        batches: mini-batches of the stochastic model.
    """

    parts: int
    method: str = "metis"
    epsilon: float = 0.03
    seed: int = 0
    memory: int = 4 << 30
    solver: Solver = "mt-kahypar"
    preset: Preset | None = None
    undirected: bool = False
    resume: bool = False
    force: bool = False
    batches: Batches | None = None


def write_halo_store(source: Source, out: Path, options: StoreOptions, progress: Progress | None = None) -> Manifest:
    """Write the store of a graph, in bounded memory but for the solver of the partition.

    Raises:
        DataError: The input is not valid; the message names file and line.
        OptionError: More parts than nodes, or too little memory for what was asked for.
        StoreError: Something is in the way in ``out``, or the disk is full.
    """
    if options.parts < 1:
        raise OptionError(f"Expected one part or more (got {options.parts})")
    tell = progress or (lambda step, count: None)
    info = source.info()
    if info.num_nodes is not None and options.parts > info.num_nodes:
        _refuse_parts(options.parts, info.num_nodes)
    require_space(out, space_needed(info))
    with (
        explained_disk_errors(out),
        StoreFolder(out, identity_of(source, info, options), options.resume, options.force) as folder,
    ):
        edges = read_edges(source, info, folder, options, tell)
        if options.parts > edges.num_nodes:
            _refuse_parts(options.parts, edges.num_nodes)
        parts = _parts(edges, info, folder, options)
        nodes = NodeParts.of(parts, options.parts)
        shards, known = write_others(folder, info), folder.known("nan")
        nan: dict[str, tuple[int, ...]] = {} if known is None else known["counts"]
        attributes = tuple(watched(a, nan) for a in info.nodes)
        shards |= write_nodes(folder, nodes, attributes, options.memory, again=known is None)
        folder.note("nan", {"counts": nan})
        load = np.bincount(parts, weights=edges.in_degree, minlength=options.parts)
        shards |= write_edges(folder, edges, nodes, _cover(load), options.memory, lambda n: tell("sorting", n))
        plan = {
            "partition": "given" if options.method.endswith(".npy") else options.method,
            "epsilon": options.epsilon,
            "seed": options.seed,
            "edges": edges.digest(),
            "parts": digest(torch.from_numpy(parts.astype(np.int32, copy=False))),
            "nan": nan_counts(nan, edges),
        }
        manifest = Manifest(
            "halo", edges.num_nodes, edges.num_edges, options.parts, info.graph,
            {a.name: (a.dtype, a.shape) for a in info.nodes}, {a.name: (a.dtype, a.shape) for a in info.edges},
            info.other, plan, shards,
        )  # fmt: skip
        folder.commit(manifest)
    return manifest


def _refuse_parts(parts: int, nodes: int) -> None:
    raise OptionError(f"Expected at most a part for each of {nodes:,} nodes (got {parts:,} parts)")


def identity_of(source: Source, info: SourceInfo, options: StoreOptions, mesh: str = "") -> str:
    """Digest of input and options, but for how the work is done."""
    wanted = {k: v for k, v in asdict(options).items() if k not in ("memory", "resume", "force")}
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in info.files]
    return digest(repr((source.name, source.reading, files, wanted, mesh)))


def space_needed(info: SourceInfo) -> int:
    """Bytes on the disk, about; where an input does not count its edges, they are guessed from its size."""
    num_edges = info.num_edges
    if num_edges is None:
        num_edges = sum(path.stat().st_size for path in info.files) // 8
    rows = sum(TensorSpec(a.dtype, (info.num_nodes or 0, *a.shape)).num_bytes for a in info.nodes)
    of_edges = sum(TensorSpec(a.dtype, (num_edges, *a.shape)).num_bytes for a in info.edges)
    return num_edges * _WORK_BYTES_PER_EDGE + rows + 3 * of_edges


def read_edges(source: Source, info: SourceInfo, folder: StoreFolder, options: StoreOptions, tell: Progress) -> Spool:
    """The edges on disk, of an interrupted run where they are whole."""
    known, path = folder.known("spool"), folder.work / "spool"
    found = None if known is None else load_spool(path, known, info.edges)
    if found is None:
        found = spool(source, path, options.undirected, options.memory, lambda n: tell("reading", n))
        folder.note("spool", save_spool(found))
    say_what_was_read(source, found)
    return found


def _parts(edges: Spool, info: SourceInfo, folder: StoreFolder, options: StoreOptions) -> Array:
    """The part of each node, int32 ``[N]``."""
    path, known = folder.work / "parts", folder.known("parts")
    if known is not None and path.exists() and digest(np.fromfile(path, np.int32)) == known["digest"]:
        return np.fromfile(path, np.int32)
    parts = node_parts(edges, info, options).numpy()
    parts.tofile(path)
    sync(path)
    folder.note("parts", {"digest": digest(parts)})
    return parts


def node_parts(edges: Spool, info: SourceInfo, options: StoreOptions) -> Tensor:
    """The part of each node, int32 ``[N]``.

    Raises:
        OptionError: The solver would need more than ``memory``.
    """
    if options.method.endswith(".npy"):
        return check_given(read_parts(options.method), edges.num_nodes, options.parts)
    chosen = PartsOptions(
        options.method, options.epsilon, options.seed, options.solver, options.preset, options.memory, options.batches
    )  # checked here
    if options.method == "random" or options.parts == 1:
        none = torch.empty(2, 0, dtype=torch.int64)
        return partition(none, edges.num_nodes, options.parts, "random", seed=options.seed)
    mask = train_mask_of(info)
    mask = None if mask is None or mask.dim() > 1 else mask
    if options.method == "stream":
        require_memory("stream", edges.num_nodes, edges.num_edges, options.parts, options.memory)
        weight = node_work(edges.in_degree, mask)
        return stream_parts(lambda: _ends(edges), weight, options.parts, options.epsilon, options.seed)
    left = options.memory - 16 * edges.num_edges
    require_memory(options.method, edges.num_nodes, edges.num_edges, options.parts, max(left, 0))
    return find_parts(edges.edge_index(), edges.num_nodes, options.parts, chosen, mask)


def _ends(edges: Spool) -> Iterator[Array]:
    for _, source, target, _ in edges.chunks(CHUNK):
        yield np.stack([source, target])


def read_parts(path: str) -> Tensor:
    """A part for each node, from an ``.npy`` file.

    Raises:
        DataError: It is no such file.
    """
    try:
        return as_parts(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Expected {path} to be .npy with a part per node (got: {error})") from error


def train_mask_of(info: SourceInfo) -> Tensor | None:
    """The training nodes, bool ``[N]`` or ``[N, K]``, if the input has them."""
    for attribute in info.nodes:
        if attribute.name == "train_mask" and attribute.dtype == "BOOL" and len(attribute.shape) < 2:
            return torch.from_numpy(np.concatenate(list(attribute.rows(1 << 22))))
    return None


def _cover(load: Array) -> Choose:
    """The hybrid exchange, as :meth:`~pyg_dist.halo.plan.cover.RemoteEdges.cover` has it, block by block."""

    def choose(block: Block) -> Array:
        prefer = torch.full((block.num_rows,), bool(load[block.receiver] <= load[block.sender]))
        cover = minimum_vertex_cover(
            torch.from_numpy(block.row), torch.from_numpy(block.sum), block.num_rows, block.num_sums, prefer
        )
        is_post: Array = cover.left.numpy()[block.row]
        return is_post

    return choose


def nan_counts(nan: dict[str, tuple[int, ...]], edges: Spool) -> dict[str, tuple[int, ...]]:
    """What is NaN in attributes of nodes, as :func:`watched` has it, and of edges, for the manifest."""
    of_nodes = {name: counts for name, counts in nan.items() if counts[0]}
    return of_nodes | {name: astuple(count) for name, count in edges.nan.items()}


def write_others(folder: StoreFolder, info: SourceInfo) -> dict[str, Shard]:
    """The tensors without rows, if there are any."""
    if not info.other_tensors:
        return {}
    kept = folder.kept_shard("other")
    if kept is None:
        specs = {name: spec for name, (spec, _) in info.other_tensors.items()}
        writer = ShardWriter(folder.work / "other", specs)
        for name, (_, read) in info.other_tensors.items():
            writer.write_whole(name, read())
        kept = folder.keep("other", writer)
    return {"other": kept}


def watched(attribute: NodeAttribute, nan: dict[str, tuple[int, ...]]) -> NodeAttribute:
    """The attribute, whose NaN entries are counted on the way; training nodes are looked for."""

    def rows(num_bytes: int) -> Any:
        found, row, trained = NanCount(), 0, 0
        for piece in attribute.rows(num_bytes):
            if attribute.name == "train_mask":
                trained += int(piece.any())
            if attribute.dtype in ("F64", "F32", "F16", "BF16"):
                found += NanCount.of(as_torch(np.require(piece, requirements=["C", "W"]), attribute.dtype), row)
            row += len(piece)
            yield piece
        nan[attribute.name] = astuple(found)
        if attribute.name == "train_mask" and attribute.dtype == "BOOL" and not trained:
            raise DataError("Expected 'train_mask' to select at least one node (got none): the loss would be NaN")

    return NodeAttribute(attribute.name, attribute.dtype, attribute.shape, rows)
