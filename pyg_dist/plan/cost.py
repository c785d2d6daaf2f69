"""What an epoch of aggregations costs, predicted from the plan's counts and a machine's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

ELEMENT_BYTES = 4  # float32

# An entry of a pattern: int32 column and int64 edge, in the pattern and in its transpose.
_ENTRY_BYTES = 2 * (4 + 8)


@dataclass(frozen=True)
class Machine:
    """The rates of one rank, from ``benchmarks/network.py``; the defaults are two ranks of one thread over gloo.

    Attributes:
        latency: seconds per message.
        bandwidth: bytes per second that a rank sends.
        aggregation: values (rows times columns) per second that a rank reads and adds.
    """

    latency: float = 2.0e-4
    bandwidth: float = 1.0e9
    aggregation: float = 5.0e8


def exchange_seconds(rows: Tensor, width: int, machine: Machine) -> float:
    r"""One exchange of ``width`` columns: the slowest rank's messages, one after another.

    .. math::
        T = \max_i \sum_j \left( \frac{Comm^{i,j}}{BW} + L \right)

    Source: SuperGCN, eq. 2; pairs of ranks without traffic cost nothing.

    Shapes:
        - rows: ``[P, P]``, sender by receiver
    """
    seconds = rows * (width * ELEMENT_BYTES / machine.bandwidth) + (rows > 0) * machine.latency
    return float(seconds.sum(1).max()) if rows.numel() else 0.0


def epoch_seconds(rows: Tensor, work: Sequence[int], widths: Sequence[int], machine: Machine) -> float:
    """Aggregations of ``widths`` columns, forward and backward, without overlap and without dense layers."""
    return sum(
        2 * (exchange_seconds(rows, width, machine) + max(work, default=0) * width / machine.aggregation)
        for width in widths
    )


def memory_bytes(nodes: int, edges: int, entries: int, slots: int, widths: Sequence[int]) -> int:
    """An estimate of what one rank holds in training, parameters and the optimizer's state aside.

    The patterns and their transposes, a row and its gradient per node and width, and the largest buffers.

    Args:
        nodes: nodes owned.
        edges: edges kept.
        entries: entries of all patterns.
        slots: rows sent and received in one aggregation.
        widths: columns of each layer's input.
    """
    patterns = entries * _ENTRY_BYTES + 2 * 8 * nodes + 8 * (nodes + edges)
    return patterns + 2 * ELEMENT_BYTES * nodes * sum(widths) + ELEMENT_BYTES * slots * max(widths, default=0)
