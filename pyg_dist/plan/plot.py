"""A picture of a plan: a heat map of the bytes between ranks, and bars of each rank's work and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyg_dist.errors import MissingPackageError
from pyg_dist.plan.halo_cost import ELEMENT_BYTES

if TYPE_CHECKING:
    from pyg_dist.plan.plan import Plan


def plot(plan: Plan, path: str | Path, width: int) -> None:
    """Write the picture of ``plan`` to ``path``; the suffix (.png, .svg, .pdf) chooses the format.

    Args:
        plan: the plan.
        path: where to.
        width: columns of the aggregation whose bytes are shown.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"Expected matplotlib for plan.plot (got: {error}); pip install 'pyg-dist[plot]'"
        ) from error
    mebibyte = width * ELEMENT_BYTES / 2**20
    figure = Figure(
        figsize=(13, 4.2), layout="constrained"
    )  # not through pyplot, which keeps figures and opens windows
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
