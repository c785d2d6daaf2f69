"""Every linear map of the backend and the layouts is a dense matrix; its derivative is the transpose, to any order."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from random_graphs import random_graph
from torch import Tensor
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.autograd.linear_map import apply, begin
from pyg_dist.backend.autograd.replicated import CopyToRanks, GatherRows
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.ops.quantize import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.grid.collectives import AllGather, Mesh, sum_all
from pyg_dist.grid.operator import GridOperator, Side, TileProduct
from pyg_dist.grid.plan.mesh_shape import INPUT, WHOLE_ROWS, MeshShape, TileLayout
from pyg_dist.grid.plan.node_order import ListedOrder
from pyg_dist.grid.sharding import Grid
from pyg_dist.halo.exchange import AllToAll, ToNeighbours
from pyg_dist.halo.graph import HaloGraph

Pieces = list[Tensor]
WIDTH = 3


@dataclass
class Case:
    """A map, and what it does to the tensors of all ranks, in one process.

    Attributes:
        linear_map: on this rank.
        x_shapes: of the whole input: a tensor for each rank, or one that every rank has, or has a part of.
        dense: from those to the whole output, in torch's own functions.
        x_piece, y_piece: this rank's piece of the whole input, or output.
        x_copies, y_copies: on how many ranks each element lies.
    """

    name: str
    linear_map: Any
    x_shapes: list[tuple[int, ...]]
    dense: Callable[[Pieces], Pieces]
    x_piece: Callable[[Pieces], Tensor]
    y_piece: Callable[[Pieces], Tensor]
    x_copies: int = 1
    y_copies: int = 1


def whole(pieces: Pieces) -> Tensor:
    return pieces[0]


def uneven(size: int) -> list[int]:
    """Rows by rank, the last of several without any."""
    return [4, 3, 0][:size] if size == 3 else [4, 0][:size]


def of_copies(rank: int, size: int) -> Iterator[Case]:
    """Identities, sums and gathers."""
    group, counts = world_group(), uneven(size)

    def own(pieces: Pieces) -> Tensor:
        return pieces[rank]

    totals = {"group": group.sum, "transport": partial(sum_all, transport=Transport(group))}
    for name, total in totals.items():
        yield Case(f"copies, {name}", CopyToRanks(total), [(5, WIDTH)], lambda x: x * size, whole, own, size)
    order = torch.randperm(sum(counts))
    gather = GatherRows(group, counts, order, order.split(counts)[rank])

    def in_order(x: Pieces) -> Pieces:
        return [torch.cat(x)[torch.argsort(order)]]

    yield Case("gathered rows", gather, [(n, WIDTH) for n in counts], in_order, own, whole, 1, size)
    for dim in (0, 1):
        shapes = [(n, WIDTH) if dim == 0 else (WIDTH, n) for n in counts]
        gather_all = AllGather(Transport(group), counts, dim)
        yield Case(f"pieces {dim}", gather_all, shapes, lambda x, d=dim: [torch.cat(x, d)] * size, own, own)  # type: ignore[misc]


def of_redistributions(rank: int, size: int) -> Iterator[Case]:
    """Rows to one rank or to several, and tiles of a matrix."""
    group, counts = world_group(), uneven(size)

    def own(pieces: Pieces) -> Tensor:
        return pieces[rank]

    total = sum(counts)
    before, after = torch.randperm(total).split(counts), torch.randperm(total).split(counts[::-1])

    def permuted(x: Pieces) -> Pieces:
        rows = torch.cat(x)[torch.argsort(torch.cat(before))]
        return [rows[positions] for positions in after]

    move = Redistribution.by_position(group, before, after)
    yield Case("permutation", move, [(n, WIDTH) for n in counts], permuted, own, own)
    yield Case("permutation of scalars", move, [(n,) for n in counts], permuted, own, own)
    yield Case("permutation of nothing", move, [(n, 0) for n in counts], permuted, own, own)

    keys = torch.randperm(total).split(counts)
    # Some rows go to nobody, some to several ranks.
    gets = [[torch.randperm(n)[: torch.randint(n + 1, ())] for n in counts] for _ in range(size)]

    def copied(x: Pieces) -> Pieces:
        arrived = [torch.cat([x[s][rows] for s, rows in enumerate(lists)]) for lists in gets]
        key = [torch.cat([keys[s][rows] for s, rows in enumerate(lists)]) for lists in gets]
        return [values[torch.argsort(k)] for values, k in zip(arrived, key, strict=True)]

    row = torch.cat([gets[r][rank] for r in range(size)])
    receiver = torch.cat([torch.full((gets[r][rank].numel(),), r) for r in range(size)])
    copies = Redistribution.of_copies(Transport(group), receiver, row, keys[rank])
    yield Case("copies of rows", copies, [(n, WIDTH) for n in counts], copied, own, own)

    num_nodes, width = 11, 5
    orders = tuple(ListedOrder.of(torch.randperm(num_nodes)) for _ in range(2))
    layouts = (INPUT, WHOLE_ROWS, TileLayout(("z",), "x", 1), TileLayout(("y",), "z", 0))
    for axis in ("x", "y", "z"):
        grid = Grid(Mesh(MeshShape.of({axis: size}, size)), orders, "all_reduce")
        for first, second in ((a, b) for a in layouts for b in layouts if a != b):
            one, other = grid.tile(first, width), grid.tile(second, width)
            pieces = [partial(tile_of, tile) for tile in (one, other)]
            repeats = [size if axis in layout.replicas else 1 for layout in (first, second)]
            yield Case(
                f"tiles {axis} {first} {second}",
                grid.redistribution(one, other),
                [(num_nodes, width)],
                lambda x: [x[0] * 1],
                *pieces,
                *repeats,
            )


def tile_of(tile: Any, pieces: Pieces) -> Tensor:
    return pieces[0][tile.global_id][:, tile.columns.start : tile.columns.stop]


def of_halo(rank: int, size: int) -> Iterator[Case]:
    """Exchanges, the rows that they bring, and products."""

    def own(pieces: Pieces) -> Tensor:
        return pieces[rank]

    group = world_group()
    counts = [[0 if s == r else (2 * s + r) % 4 for r in range(size)] for s in range(size)]

    def exchanged(x: Pieces) -> Pieces:
        sent = [piece.split(counts[s]) for s, piece in enumerate(x)]
        return [torch.cat([sent[s][r] for s in range(size)]) for r in range(size)]

    for kind in (ToNeighbours, AllToAll):
        exchange = kind(Transport(group), tuple(counts[rank]), tuple(c[rank] for c in counts))
        yield Case(kind.__name__, exchange, [(sum(c), WIDTH) for c in counts], exchanged, own, own)

    num_nodes, num_edges = 23, 90
    graph = random_graph(num_nodes, num_edges, seed=4)
    source, target = graph.edge_index
    parts = torch.arange(num_nodes) * 7 % size
    weight = torch.rand(num_edges, dtype=torch.float64)
    graph.edge_weight = weight
    for exchange_name in ("post", "pre", "hybrid"):
        data = DistributedData(graph, partition=parts, exchange=exchange_name)
        for messages in (0, size**2):  # few, and as many as there can be
            halo = HaloGraph(data.graph.share, data.graph.node_sharding, data.graph.loop_rule, messages)
            nodes = by_rank(halo.node_sharding.global_id, group)
            shapes = [(n.numel(), WIDTH) for n in nodes]
            name = f"{exchange_name} {messages}"

            def product(matrix: Tensor, x: Pieces, nodes: Pieces = nodes) -> Pieces:
                rows = torch.cat(x)[torch.argsort(torch.cat(nodes))]
                return [(matrix @ rows)[mine] for mine in nodes]

            for values in (None, data.edge_weight):
                adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
                entries = torch.ones(num_edges, dtype=torch.float64) if values is None else weight
                adjacency.index_put_((target, source), entries, accumulate=True)
                in_degree = torch.bincount(target, minlength=num_nodes).clamp(min=1).view(-1, 1)
                from pyg_dist.graph.protocol import Norm

                mean = halo.operator(Norm.MEAN, values, torch.float64)
                yield Case(f"mean {name}", mean, shapes, partial(product, adjacency / in_degree), own, own)
                looped = adjacency.clone().fill_diagonal_(0.0)
                looped += torch.diag(torch.where(adjacency.diagonal() > 0, 0.0, 1.0).double())
                looped += torch.diag(last_loop(source, target, entries, num_nodes))
                scale = looped.sum(1).rsqrt()
                norm = halo.operator(Norm.gcn(True), values, torch.float64)
                gcn = scale.view(-1, 1) * looped * scale
                yield Case(f"gcn {name}", norm, shapes, partial(product, gcn), own, own)

            ids = by_rank(halo.share.row_transfer.incoming_key % SUM_KEY, group)

            def halos(x: Pieces, nodes: Pieces = nodes, ids: Pieces = ids) -> Pieces:
                rows = torch.cat(x)[torch.argsort(torch.cat(nodes))]
                return [rows[needed] for needed in ids]

            yield Case(f"halo {name}", halo.row_transfer.to_slots, shapes, halos, own, own)


def last_loop(source: Tensor, target: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """The weight of each node's last self loop, as ``add_remaining_self_loops`` keeps it; zero for none."""
    out = torch.zeros(num_nodes, dtype=weight.dtype)
    for s, t, w in zip(source.tolist(), target.tolist(), weight.tolist(), strict=True):
        if s == t:
            out[s] = w
    return out


def by_rank(mine: Tensor, group: Any) -> Pieces:
    """Every rank's tensor."""
    counts = group.gather_counts(mine.numel())
    return list(group.gather_rows(mine, counts).split(counts))


def of_tiles(rank: int, size: int) -> Iterator[Case]:
    """Products on a mesh of one axis, which is that of the source's rows or that of the target's."""

    def own(pieces: Pieces) -> Tensor:
        return pieces[rank]

    axis, alone = Transport(world_group()), Transport(Group())
    lengths = [5, 4, 2][:size]
    num_rows, num_cols = sum(lengths), 6
    tiles = []
    for _ in range(size):
        row, col = torch.randint(num_rows, (30,)), torch.randint(num_cols, (30,))
        weight, scale = torch.randn(30, dtype=torch.float64), torch.rand(num_rows, dtype=torch.float64) + 0.5
        dense = torch.zeros(num_rows, num_cols, dtype=torch.float64).index_put_((row, col), weight, accumulate=True)
        csr = CSR.from_edges(row, col, torch.arange(30), num_rows, num_cols)
        tiles.append((GridOperator(Matrix(csr, weight), row_scale=scale, divides=True), dense / scale.view(-1, 1)))
    operator, matrices = tiles[rank][0], [matrix for _, matrix in tiles]
    for num_blocks in (1, 3):
        for is_scattered in (True, False):
            over = Side(axis, tuple(lengths), is_scattered)
            here = Side(alone, (num_cols,), False)
            product = TileProduct(operator, here, over, num_blocks)
            turned = TileProduct(operator.transposed, over, here, num_blocks)
            columns, name = [(num_cols, WIDTH)] * size, f"{num_blocks} {is_scattered}"
            if is_scattered:
                yield Case(f"tile sum {name}", product, columns, partial(scattered, matrices, lengths), own, own)
                rows = [(n, WIDTH) for n in lengths]
                yield Case(f"tile gather {name}", turned, rows, partial(gathered, matrices), own, own)
            else:
                yield Case(f"tile sum {name}", product, columns, partial(summed, matrices), own, whole, 1, size)
                rows = [(num_rows, WIDTH)]
                yield Case(f"tile replicas {name}", turned, rows, partial(gathered, matrices), whole, own, size)


def summed(matrices: Pieces, x: Pieces) -> Pieces:
    return [sum(a @ piece for a, piece in zip(matrices, x, strict=True))]  # type: ignore[list-item]


def scattered(matrices: Pieces, lengths: list[int], x: Pieces) -> Pieces:
    return list(summed(matrices, x)[0].split(lengths))


def gathered(matrices: Pieces, x: Pieces) -> Pieces:
    return [a.t() @ torch.cat(x) for a in matrices]


SOURCES = (of_copies, of_redistributions, of_halo, of_tiles)


def drawn(shapes: list[tuple[int, ...]]) -> Pieces:
    """Random tensors, the same on every rank."""
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def check(case: Case, group: Any) -> None:
    a = case.linear_map
    x = [piece.requires_grad_() for piece in drawn(case.x_shapes)]
    y = case.dense(x)
    v = [piece.requires_grad_() for piece in drawn([tuple(piece.shape) for piece in y])]
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11, msg=lambda text: f"{case.name}: {text}")

    mine, by_v = (piece.detach().clone() for piece in (case.x_piece(x), case.y_piece(v)))
    out, back = a.start(mine).wait(), a.transposed.start(by_v).wait()
    close(out, case.y_piece(y).detach())
    adjoint = torch.autograd.grad(y, x, v, create_graph=True)
    close(back, case.x_piece(list(adjoint)).detach())
    inner = torch.stack([(out * by_v).sum() / case.y_copies, (mine * back).sum() / case.x_copies])
    left, right = group.sum(inner)
    close(left, right)
    assert torch.equal(apply(a, mine, a.start(mine)), out), "started beforehand"

    mine.requires_grad_()
    by_v.requires_grad_()
    (first,) = torch.autograd.grad(apply(a, mine), mine, by_v, create_graph=True)
    close(first, back)
    begun = begin(a, mine)
    between = mine * 2  # recorded meanwhile
    out_later = begun.wait()
    assert torch.equal(out_later, out)
    (twice,) = torch.autograd.grad([out_later, between], mine, [by_v.detach(), torch.ones_like(between)])
    close(twice, back + 2)
    (forward_again,) = torch.autograd.grad(first, by_v, mine.detach())
    assert torch.equal(forward_again, out), f"{case.name}: the transpose of the transpose is another map"

    # Of what is not linear: three times through the map and its transpose.
    slopes = torch.autograd.grad(sum((piece**3).sum() for piece in case.dense(x)), x, create_graph=True)
    expected = torch.autograd.grad(sum((slope**2).sum() for slope in slopes), x)
    for result in (apply(a, mine), begin(a, mine).wait()):
        (slope,) = torch.autograd.grad((result**3).sum(), mine, create_graph=True)
        close(slope, case.x_piece(list(slopes)))
        (found,) = torch.autograd.grad((slope**2).sum(), mine)
        close(found, case.x_piece(list(expected)))


def check_all(source: int, size: int) -> list[str]:
    pyg_dist.init()
    torch.manual_seed(source)
    classes = set()
    for case in SOURCES[source](pyg_dist.rank(), size):
        check(case, world_group())
        classes |= {type(case.linear_map).__name__, type(case.linear_map.transposed).__name__}
    return sorted(classes)


COVERED = {
    "of_copies": ["AllGather", "CopyToRanks", "GatherRows", "ReduceScatter", "SliceRows", "SumOverRanks"],
    "of_redistributions": ["Redistribution"],
    "of_halo": ["AllToAll", "HaloTransfer", "LinearOperator", "ToNeighbours"],
    "of_tiles": ["TileProduct"],
}


@pytest.mark.parametrize("source", range(len(SOURCES)))
@pytest.mark.parametrize("size", [1, 3, pytest.param(2, marks=pytest.mark.slow)])
def test_maps_and_transposes(workers: Pools, source: int, size: int) -> None:
    for classes in workers(size).run(check_all, source, size):
        assert classes == COVERED[SOURCES[source].__name__]


def test_no_map_is_left_out() -> None:
    found = set()
    for module in pkgutil.walk_packages(pyg_dist.__path__, "pyg_dist."):
        if module.name.split(".")[1] not in ("backend", "halo", "grid"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            is_map = isinstance(value, type) and hasattr(value, "start")
            if is_map and (hasattr(value, "transposed") or "transposed" in value.__annotations__):
                found.add(name)
    bases = {"LinearMap", "AddingMap", "Exchange"}  # protocols, and what implementations have in common
    of_one_rank = {"Matrix"}  # tests/backend/sparse
    assert found - bases - of_one_rank == {name for names in COVERED.values() for name in names}
