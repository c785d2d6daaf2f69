"""An epoch of a weather model on one graph with a batch of states, pyg_dist against stock PyG on the same two cores.

    python benchmarks/mesh.py                          # a grid of one degree, a mesh of four
    python benchmarks/mesh.py --degrees 3 --batches 4 --rounds 3

A model of GraphCast's shape: a grid of latitudes and longitudes is encoded into a coarser mesh, processed there, and
decoded; messages are made of both ends and of the edge, whose state changes, too. States are ``[B, N, F]``. Stock PyG
runs in one process with two threads, pyg_dist on one rank with two threads and on two ranks with one each. For two
ranks, the messages and bytes of an epoch are counted: a batch is to take as many messages as one state does.
"""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import replace
from pathlib import Path

import epoch as one_type
import machine
import torch
import torch.nn.functional as F
from measure import Epoch, Schedule, Variant, interleaved
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing
from tqdm import tqdm

from pyg_dist import DistributedData, distribute, is_main, world_size
from pyg_dist.data.typed_layout import find_parts_by_type
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.plan.parts import PartsOptions
from pyg_dist.store.graph_input import read_hetero

UP, WITHIN, DOWN = ("grid", "up", "mesh"), ("mesh", "within", "mesh"), ("mesh", "down", "grid")
COARSER, FEATURES, HIDDEN, STEPS = 4, 8, 32, 2


def node(row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
    """The number of a point; longitudes go around."""
    return row.clamp(0, rows - 1) * columns + column % columns


def graph_of(degrees: float) -> HeteroData:
    """Points every so many degrees, and a mesh of points ``COARSER`` times as far apart."""
    rows, columns = int(180 / degrees), int(360 / degrees)
    fine, coarse = (rows, columns), (rows // COARSER, columns // COARSER)
    number, of_mesh = torch.arange(rows * columns), torch.arange(coarse[0] * coarse[1])
    place = torch.stack([number // columns, number % columns])
    corner = torch.tensor([(a, b) for a in (0, 1) for b in (0, 1)]).T
    near = node(*(place[:, :, None] // COARSER + corner[:, None]), *coarse)  # the four mesh points around each
    of_place = torch.stack([of_mesh // coarse[1], of_mesh % coarse[1]])
    around = torch.tensor([(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]).T
    links = torch.cat([node(*(of_place[:, :, None] + scale * around[:, None]), *coarse) for scale in (1, 3)], 1)
    data, rng = HeteroData(), torch.Generator().manual_seed(0)
    data["grid"].num_nodes, data["mesh"].num_nodes = fine[0] * fine[1], coarse[0] * coarse[1]
    up = torch.stack([number.repeat_interleave(4), near.flatten()])
    data[UP].edge_index, data[DOWN].edge_index = up, up.flip(0)
    data[WITHIN].edge_index = torch.stack([links.flatten(), of_mesh.repeat_interleave(links.shape[1])])
    for relation in (UP, WITHIN, DOWN):
        data[relation].edge_attr = torch.randn(data[relation].edge_index.shape[1], 4, generator=rng)
    return data


class Interaction(MessagePassing):
    """GraphCast's step: edges have a state, which both ends change."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.ends, self.edge, self.node = (nn.Linear(k * HIDDEN, HIDDEN) for k in (2, 1, 2))

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        edge_attr = edge_attr + self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        sums = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return x[1] + self.node(torch.cat([x[1], sums], dim=-1)).relu(), edge_attr

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return (self.ends(torch.cat([x_i, x_j], dim=-1)) + self.edge(edge_attr)).relu()  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return edge_attr


class Forecast(nn.Module):
    """Encode, process, decode."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.mesh, self.out = (nn.Linear(w, v) for w, v in ((FEATURES, HIDDEN), (3, HIDDEN), (HIDDEN, 1)))
        self.edges = nn.ModuleList(nn.Linear(4, HIDDEN) for _ in range(3))
        self.steps = nn.ModuleList(Interaction() for _ in range(STEPS + 2))

    def forward(self, states: Tensor, mesh: Tensor, data: HeteroData) -> Tensor:
        up, within, down = (
            lin(data[relation].edge_attr) for lin, relation in zip(self.edges, (UP, WITHIN, DOWN), strict=True)
        )
        encode, *process, decode = self.steps
        grid, mesh = self.grid(states), self.mesh(mesh)
        mesh, _ = encode((grid, mesh), data[UP].edge_index, up)
        for step in process:
            mesh, within = step((mesh, mesh), data[WITHIN].edge_index, within)
        grid, _ = decode((mesh, grid), data[DOWN].edge_index, down)
        return self.out(grid)  # type: ignore[no-any-return]


def training_epoch(degrees: float, batch: int, is_stock: bool) -> Epoch:
    """Return a function that trains on one batch of states; rank 0 of two says what an epoch sends."""
    torch.manual_seed(0)
    data, model = graph_of(degrees), Forecast()
    states = torch.randn(batch, data["grid"].num_nodes, FEATURES)
    mesh = torch.randn(batch, data["mesh"].num_nodes, 3)
    if not is_stock:
        data, model = DistributedData(data), distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(states, mesh, data)[..., 0], states[..., 0])
        loss.backward()
        optimizer.step()
        return loss.item()

    if not is_stock and world_size() > 1:
        epoch()  # of the first one, which lays out what is kept
        before = replace(data.traffic)
        epoch()
        messages, sent = data.traffic.num_messages - before.num_messages, data.traffic.num_bytes - before.num_bytes
        if is_main():
            tqdm.write(f"B = {batch}: rank 0 sends {messages} messages, {sent:,} bytes in an epoch")
    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", type=float, default=1.0, help="between points of the grid")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant that count")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in a turn")
    parser.add_argument("--retakes", type=int, default=10, help="repeat a disturbed turn at most so often")
    parser.add_argument("--output", type=Path, default=one_type.RESULTS / "mesh.json", help="the JSON file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if hasattr(os, "sched_setaffinity"):  # all variants on the same cores; processes inherit this
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: one_type.NUM_CORES])
    description, graph = machine.describe(), graph_of(args.degrees)
    hetero = read_hetero(graph, allow_nan=True, warn=False)
    parts = find_parts_by_type(graph.edge_index_dict, hetero.num_nodes, None, 2, PartsOptions("metis", 0.03, 0))
    plan = HeteroPlan.of(graph.edge_index_dict, parts, 2)
    print(plan.describe((HIDDEN,)))
    schedule, results = Schedule(args.rounds, args.epochs, num_retakes=args.retakes), {}
    for batch in args.batches:
        variants = [
            Variant("stock PyG", training_epoch, (args.degrees, batch, True), 1, 2),
            Variant("pyg_dist, 1 rank", training_epoch, (args.degrees, batch, False), 1, 2),
            Variant("pyg_dist, 2 ranks", training_epoch, (args.degrees, batch, False), 2, 1),
        ]
        name = f"B = {batch}"
        results[name] = interleaved(variants, schedule, lambda turns, name=name: tqdm(turns, desc=name, disable=None))
    print(one_type.table(results))
    one_type.write(args.output, description, schedule, results, plan=plan.to_dict((HIDDEN,)))


if __name__ == "__main__":
    main()
