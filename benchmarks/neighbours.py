"""Neighbour sampling: edges a second and core, a whole batch, and the bytes of ids.

    python benchmarks/neighbours.py
    torchrun --standalone --nproc-per-node 2 benchmarks/neighbours.py
    SCRATCH/bin/python benchmarks/neighbours.py --dgl      # an environment with DGL: its sampler on the same graph
    python benchmarks/neighbours.py --graph A              # of power_law.py
    python benchmarks/neighbours.py --store STORE          # batches of a store
    python benchmarks/neighbours.py --hidden               # how much of the sampling a thread hides; needs a free core
    python benchmarks/neighbours.py --accuracy GRAPH.npz ...    # test accuracy, and that of an independent sampler

``--results FILE.json``: each figure is added to those that are there, run after run.

One thread a process, medians of CPU time; on several ranks each has its own part of a batch of ``--batch-size`` seeds,
parts are random, and the slowest rank counts. By default the graph has skewed sources: node ``u^2 N`` for a uniform u.

``--accuracy`` trains a two-layer SAGE over some seeds, fan-outs [10, 10], on any number of ranks; in one process also
with stock PyG on neighbours that NumPy's generator draws: mean test accuracy after the last epoch, its standard error.
Adam's rate is 0.003: at 0.01 the second step multiplies the loss on amazon_computers by four, in stock PyG, too, after
which some seeds, others for other batches, have not recovered in five epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SKIPPED, HIDDEN = 2, 64


def put(args: argparse.Namespace, what: str, name: str, numbers: dict[str, Any]) -> None:
    """Print figures, and add them to those in the file."""
    print(f"{what}, {name}: " + ", ".join(f"{key} {value:,.6g}" for key, value in numbers.items()), flush=True)
    if args.results:
        file = Path(args.results)
        found = json.loads(file.read_text()) if file.exists() else {}
        found.setdefault(what, {}).setdefault(name, []).append(numbers)
        file.write_text(json.dumps(found, indent=1) + "\n")


def graph_of(num_nodes: int, num_edges: int) -> torch.Tensor:
    """Edges, int64 ``[2, E]``; the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    source = torch.rand(num_edges, generator=rng, dtype=torch.float64).square_().mul_(num_nodes).long()
    return torch.stack([source, torch.randint(0, num_nodes, (num_edges,), generator=rng)])


def plain_graph(args: argparse.Namespace, num_features: int) -> Any:
    """The graph as PyG's ``Data``, with features of ones."""
    from torch_geometric.data import Data

    if args.graph:
        import power_law

        edge_index = power_law.load(args.graph).edge_index
    else:
        edge_index = graph_of(args.nodes, args.edges)
    return Data(edge_index=edge_index, x=torch.ones(args.nodes, num_features))


def cpu_seconds(call: Callable[[int], Any], rounds: int, window: int = 1) -> float:
    """Median CPU seconds of a call, which gets its number; of several that are made at once the mean."""
    times = []
    for k in range(0, (SKIPPED + rounds) * window, window):
        begin = time.process_time()
        for number in range(k, k + window):
            call(number)
        times.append((time.process_time() - begin) / window)
    return statistics.median(times[SKIPPED:])


def of_dgl(edge_index: torch.Tensor, args: argparse.Namespace) -> None:
    """DGL's sampler, blocks included."""
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=args.nodes).formats(["csc"])
    graph.create_formats_()
    seeds = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(0)).split(args.batch_size)
    for fan_out in args.fan_outs:
        sampler, counts = dgl.dataloading.NeighborSampler(fan_out[::-1]), []

        def draw(k: int, sampler: Any = sampler, counts: list[int] = counts) -> None:
            counts.append(sum(block.num_edges() for block in sampler.sample_blocks(graph, seeds[k])[2]))

        seconds = cpu_seconds(draw, args.rounds)
        edges = statistics.mean(counts)
        put(args, "DGL", str(fan_out), {"M edges/s": edges / seconds / 1e6, "ms": 1e3 * seconds, "edges": edges})


def of_pyg_dist(args: argparse.Namespace) -> None:
    """The sampler, and the batch of it."""
    import pyg_dist
    from pyg_dist import DistributedData
    from pyg_dist.backend.comm.group import world_group
    from pyg_dist.loader import NeighborLoader

    if args.store:
        data = DistributedData.open(args.store)
    else:
        data = DistributedData(plain_graph(args, 16), partition="random")
    for fan_out in args.fan_outs:
        loader = NeighborLoader(data, fan_out, batch_size=args.batch_size, shuffle=True, prefetch=False)
        lists, counts = loader.sampler.ranks.part, []

        def draw(k: int, loader: Any = loader, counts: list[int] = counts) -> None:
            counts.append(sum(loader.sampler.sample(k).attributes["num_sampled_edges"]))

        before = lists.num_bytes
        draw_seconds = cpu_seconds(draw, args.rounds, loader.sampler.window)
        num_bytes = (lists.num_bytes - before) / len(counts)
        batch_seconds = cpu_seconds(loader._batches.take, args.rounds, loader.sampler.window)
        times = torch.tensor([draw_seconds, batch_seconds, num_bytes], dtype=torch.float64)
        draw_seconds, batch_seconds, num_bytes = world_group().all_reduce_(times, "max").tolist()
        edges = statistics.mean(counts)
        if pyg_dist.is_main():
            numbers = {
                "M edges/s and core": edges / draw_seconds / pyg_dist.world_size() / 1e6, "ms": 1e3 * draw_seconds,
                "ms with the plan": 1e3 * batch_seconds, "edges": edges, "MB of ids a rank": num_bytes / 1e6,
            }  # fmt: skip
            graph_name = "store" if args.store else args.graph or "graph"
            put(args, f"{graph_name}, {pyg_dist.world_size()} ranks", str(fan_out), numbers)


def of_hidden(args: argparse.Namespace) -> None:
    """Of the time of making batches, what the thread beside the steps of a three-layer SAGE takes off the clock."""
    from torch_geometric.nn import GraphSAGE

    import pyg_dist
    from pyg_dist import DistributedData
    from pyg_dist.loader import NeighborLoader

    data = DistributedData(plain_graph(args, 100), partition="random")
    for fan_out in args.fan_outs:
        model = pyg_dist.distribute(GraphSAGE(100, 256, len(fan_out), 16))
        seconds, step_seconds = {}, 0.0
        for prefetch in (False, True):
            loader = NeighborLoader(data, fan_out, batch_size=args.batch_size, shuffle=True, prefetch=prefetch)
            waits, steps, batches = [], [], iter(loader)
            for _ in range(SKIPPED + args.rounds):
                begin = time.perf_counter()
                batch = next(batches)
                waits.append(time.perf_counter() - begin)
                model(batch.x, batch.edge_index)[: batch.batch_size].square().mean().backward()
                steps.append(time.perf_counter() - begin - waits[-1])
            seconds[prefetch] = statistics.median(waits[SKIPPED:])
            step_seconds = statistics.median(steps[SKIPPED:])
            del batches
        if pyg_dist.is_main():
            numbers = {
                "ms of a batch": 1e3 * seconds[False], "ms waited for it": 1e3 * seconds[True],
                "ms of a step": 1e3 * step_seconds, "hidden share": 1 - seconds[True] / seconds[False],
            }  # fmt: skip
            put(args, f"hidden, {pyg_dist.world_size()} ranks", str(fan_out), numbers)


def adjacency(edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Targets by sources, as a sparse tensor: stock PyG then makes no message of each edge, which takes minutes."""
    from torch_geometric.utils import to_torch_csr_tensor

    return to_torch_csr_tensor(edge_index.flip(0), size=(num_nodes, num_nodes))


def numpy_batches(data: Any, seed: int, fan_out: list[int], batch_size: int) -> Any:
    """The batches of an epoch, neighbours drawn by NumPy's generator: a sort of random numbers in each row."""
    rng = np.random.default_rng(seed)
    source, target = data.edge_index.numpy()
    order = np.argsort(target, kind="stable")
    source, rowptr = source[order], np.searchsorted(target[order], np.arange(data.num_nodes + 1))
    seeds = rng.permutation(data.train_mask.nonzero().view(-1).numpy())
    for begin in range(0, seeds.size, batch_size):
        nodes = frontier = seeds[begin : begin + batch_size]
        edges = []
        for count in fan_out:
            row = np.repeat(np.arange(frontier.size), np.diff(rowptr)[frontier])
            first = np.searchsorted(row, np.arange(frontier.size))
            entry = rowptr[frontier][row] + np.arange(row.size) - first[row]
            drawn = np.lexsort((rng.random(row.size), row))[np.arange(row.size) - first[row] < count]
            edges.append((source[entry[drawn]], frontier[row[drawn]]))
            frontier = np.setdiff1d(edges[-1][0], nodes)
            nodes = np.concatenate([nodes, frontier])
        number = np.empty(data.num_nodes, dtype=np.int64)
        number[nodes] = np.arange(nodes.size)
        ends = torch.from_numpy(number[np.concatenate(edges, axis=1)])
        adj_t = adjacency(ends, nodes.size)
        yield data.x[nodes], adj_t, data.y[nodes], min(batch_size, seeds.size - begin)


def accuracies(
    data: Any, batches_of: Callable[[int], Any], wrap: Callable[[Any], Any], args: argparse.Namespace
) -> list[float]:
    """Test accuracy after the last epoch, by seed."""
    from torch.nn.functional import cross_entropy
    from torch_geometric.nn import GraphSAGE

    found = []
    for seed in args.seeds:
        torch.manual_seed(seed)
        model = wrap(GraphSAGE(data.num_features, HIDDEN, 2, int(data.y.max()) + 1, dropout=0.5))
        optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
        epochs = batches_of(seed)
        for _ in range(args.epochs):
            model.train()
            for x, edge_index, y, size in epochs():
                optimizer.zero_grad()
                cross_entropy(model(x, edge_index)[:size], y[:size]).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        found.append(float((out[data.test_mask].argmax(1) == data.y[data.test_mask]).float().mean()))
    return found


def of_accuracy(path: str, args: argparse.Namespace) -> None:
    """Test accuracy, mean of the seeds and its standard error."""
    import pyg_dist
    from pyg_dist import DistributedData
    from pyg_dist.loader import NeighborLoader

    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from example_graphs import read_npz

    graph, fan_out, batch_size = read_npz(path), [10, 10], args.batch_size
    data = DistributedData(graph)

    def loaders(seed: int) -> Callable[[], Any]:
        loader = NeighborLoader(data, fan_out, data.train_mask, batch_size=batch_size, shuffle=True, seed=seed)
        return lambda: ((batch.x, batch.edge_index, batch.y, batch.batch_size) for batch in loader)

    arms = {"pyg_dist": lambda: accuracies(data, loaders, pyg_dist.distribute, args)}
    if pyg_dist.world_size() == 1:
        epochs = range(args.seeds.start * args.epochs, args.seeds.stop * args.epochs)
        epoch, whole = iter(epochs), graph.clone()
        whole.edge_index = adjacency(graph.edge_index, graph.num_nodes)
        arms["NumPy and PyG"] = lambda: accuracies(
            whole,
            lambda seed: lambda: numpy_batches(graph, next(epoch), fan_out, batch_size),
            lambda model: model,
            args,
        )
    for name, trained in arms.items():
        found = trained()
        if pyg_dist.is_main():
            error = statistics.stdev(found) / len(found) ** 0.5
            numbers = {"mean": statistics.mean(found), "standard error": error, "epochs": args.epochs}
            numbers |= {"rate": args.rate, **{f"seed {k}": x for k, x in zip(args.seeds, found, strict=True)}}
            put(args, f"test accuracy, {name}", Path(path).stem, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5, help="of --accuracy")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 5), metavar=("FIRST", "END"), help="of --accuracy")
    parser.add_argument("--rate", type=float, default=0.003, help="Adam's, of --accuracy")
    parser.add_argument("--dgl", action="store_true")
    parser.add_argument("--results", help="a JSON file")
    parser.add_argument("--graph", help="A, B or C of power_law.py, in place of the one with skewed sources")
    parser.add_argument("--store", help="a store, in place of the graph")
    parser.add_argument("--hidden", action="store_true")
    parser.add_argument("--accuracy", nargs="+", metavar="GRAPH.npz")
    args = parser.parse_args()
    args.seeds = range(*args.seeds)
    args.fan_outs = [[15, 10, 5], [10, 10]]
    torch.set_num_threads(1)
    if args.graph:
        import power_law

        args.nodes = power_law.SIZES[args.graph].num_nodes
    for path in args.accuracy or ():
        of_accuracy(path, args)
    if args.dgl:
        of_dgl(graph_of(args.nodes, args.edges), args)
    elif args.hidden:
        of_hidden(args)
    elif not args.accuracy:
        of_pyg_dist(args)


if __name__ == "__main__":
    main()
