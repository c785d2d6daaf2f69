"""A picture of a plan: a heat map, and bars of each rank's work and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyg_dist.errors import MissingPackageError
from pyg_dist.plan.grid.work import work_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyg_dist.plan.grid.plan import GridPlan
    from pyg_dist.plan.halo.plan import Plan


def plot(plan: Plan, path: str | Path, width: int) -> None:
    """Write the picture of ``plan`` to ``path``; the suffix (.png, .svg, .pdf) chooses the format.

    Args:
        plan: the plan.
        path: where to.
        width: columns of the aggregation whose bytes are shown.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    mebibyte = plan.row_bytes(width) / 2**20
    figure = _figure()
    between, work, traffic = figure.subplots(1, 3)
    image = between.imshow((plan.rows_between() * mebibyte).numpy(), cmap="viridis")
    figure.colorbar(image, ax=between, label="MiB")
    between.set(title=f"sent in one aggregation of {width} columns", xlabel="to rank", ylabel="from rank")
    ranks = range(plan.ranks)
    work.bar(ranks, [s.work for s in plan.sizes])
    work.set(title="work: rows read and added", xlabel="rank")
    traffic.bar([r - 0.2 for r in ranks], [s.rows_sent * mebibyte for s in plan.sizes], width=0.4, label="sent")
    traffic.bar([r + 0.2 for r in ranks], [s.rows_received * mebibyte for s in plan.sizes], width=0.4, label="received")
    traffic.set(title="traffic of one aggregation", xlabel="rank", ylabel="MiB")
    traffic.legend()
    figure.suptitle(f"{plan.partition} partition, {plan.exchange} exchange, plan {plan.hash[:12]}")
    figure.savefig(path)


def plot_grid(plan: GridPlan, path: str | Path) -> None:
    """Write the picture of a grid's ``plan``: edges by tile, and what each rank sends and holds in a training step.

    Args:
        plan: the plan.
        path: where to; the suffix (.png, .svg, .pdf) chooses the format.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure, shape = _figure(), plan.shape
    tiles, traffic, memory = figure.subplots(1, 3)
    edges = {(p["z"], p["x"]): n for p, n in zip(map(shape.coordinates, range(plan.ranks)), plan.edges, strict=True)}
    image = tiles.imshow([[edges[z, x] for x in range(shape.x)] for z in range(shape.z)], cmap="viridis")
    figure.colorbar(image, ax=tiles, label="edges")
    tiles.set(title=f"edges of a tile, {plan.tries[-1].method} order", xlabel="x: sources", ylabel="z: targets")
    ranks = range(plan.ranks)
    traffic.bar(ranks, [work_of(plan.model, shape, plan.sums, rank).num_bytes / 2**20 for rank in ranks])
    traffic.set(title="sent in a step", xlabel="rank", ylabel="MiB")
    memory.bar(ranks, [num_bytes / 2**20 for num_bytes in plan.memory_bytes()])
    memory.set(title="memory", xlabel="rank", ylabel="MiB")
    figure.suptitle(f"mesh {shape}, {plan.model}, plan {plan.hash[:12]}")
    figure.savefig(path)


def _figure() -> Figure:
    """Not through pyplot, which keeps figures and opens windows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"Expected matplotlib for plan.plot (got: {error}); pip install 'pyg-dist[plot]'"
        ) from error
    return Figure(figsize=(13, 4.2), layout="constrained")
