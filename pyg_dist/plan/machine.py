"""What the cost models know of a machine: constants, measured by :mod:`pyg_dist.backend.calibration`, in a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pyg_dist.errors import OptionError


@dataclass(frozen=True)
class Machine:
    """Constants of one kind of machine; the defaults were measured by ``benchmarks/grid.py --calibrate`` on two cores
    of a shared x86-64 server with gloo.

    Attributes:
        spmm: seconds of a sparse product by entry x column, by entry, and by row x column of the result.
        gemm_rate: flops per second of a dense product.
        intra_bandwidth: bytes per second that a rank sends within a machine.
        inter_bandwidth: the same between machines.
        latency: seconds of a collective without content.
        ranks_per_node: ranks on one machine.
        cores: ranks that really run at a time there.
    """

    spmm: tuple[float, float, float] = (2.5e-10, 2.0e-9, 1.0e-9)
    gemm_rate: float = 3.0e10
    intra_bandwidth: float = 5.0e8
    inter_bandwidth: float = 1.0e9
    latency: float = 3.0e-4
    ranks_per_node: int = 8
    cores: int = 2

    def spmm_seconds(self, entries: float, rows: int, source_rows: int, columns: int) -> float:
        """Seconds of ``[rows, source_rows]`` times ``[source_rows, columns]``."""
        by_product, by_entry, by_result = self.spmm
        return by_product * entries * columns + by_entry * entries + by_result * rows * columns

    def save(self, path: Path | None = None) -> Path:
        """Write the constants; :meth:`load` finds them."""
        path = machine_file() if path is None else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @staticmethod
    def load(path: Path | None = None) -> Machine:
        """The constants measured here, else the defaults.

        Raises:
            OptionError: The file is not of :meth:`save`.
        """
        path = machine_file() if path is None else path
        if not path.exists():
            return Machine()
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            known = {field.name for field in fields(Machine)}
            if set(values) != known:
                raise ValueError(f"it has {sorted(values)}")
            values["spmm"] = tuple(values["spmm"])
            return Machine(**values)
        except (ValueError, TypeError) as error:
            raise OptionError(f"Expected constants of a machine in {path} ({error}): measure them again") from error


def machine_file() -> Path:
    """Where the constants lie: ``PYG_DIST_MACHINE``, else the user's cache folder."""
    given = os.environ.get("PYG_DIST_MACHINE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "pyg_dist" / "machine.json"
