"""The constants of a machine that both layouts are priced with, measured or assumed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from pyg_dist.backend.comm.wires.wire import carrier
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session.settings import MACHINE
from pyg_dist.errors import OptionError, refusing


@dataclass(frozen=True)
class Machine:
    """Constants of one kind of machine; ``python -m pyg_dist bench`` measures and stores them.

    The defaults were measured so, on two cores of an AMD EPYC (Zen 4) with gloo over loopback; the network between
    machines was not measured: it is assumed to be Ethernet of 10 Gbit/s.

    Attributes:
        source: where the constants come from, and when they were measured.
        spmm: seconds of a sparse product by entry x column, by entry, and by row x column of the result.
        gemm_rate: flops per second of a dense product.
        stream_rate: bytes per second that copies and element-wise functions read and write.
        quantize_rate: bytes per second, of rows and packed rows, of quantizing and dequantizing.
        call_seconds: of a collective or a round of messages, whatever it sends, in Python and torch.
        intra_latency: seconds per message within a machine.
        intra_bandwidth: bytes per second that a rank sends within a machine.
        inter_latency: seconds per message between machines.
        inter_bandwidth: bytes per second that a machine sends to others, all its ranks together.
        ranks_per_node: ranks on one machine.
        cores: ranks that really run at a time there.
        device: the kind of device that products and messages are on, ``"cpu"`` or ``"cuda"``.

    Example:
        >>> plan = Plan.of(KarateClub()[0].edge_index, torch.arange(34) % 2, 2)
        >>> fast = Machine(ranks_per_node=1)  # each rank on a machine of its own
        >>> slow = Machine(ranks_per_node=1, inter_bandwidth=25e6)  # over a link of 200 Mbit/s
        >>> plan.price(machine=slow).seconds > plan.price(machine=fast).seconds
        True
    """

    source: str = "defaults: 2 cores of an AMD EPYC, gloo"
    spmm: tuple[float, float, float] = (1.9e-11, 1.4e-9, 2.6e-10)
    gemm_rate: float = 6.7e10
    stream_rate: float = 2.8e10
    quantize_rate: float = 2.8e10
    call_seconds: float = 1.5e-4
    intra_latency: float = 6.6e-5
    intra_bandwidth: float = 2.5e9
    inter_latency: float = 5.0e-5
    inter_bandwidth: float = 1.2e9
    ranks_per_node: int = 8
    cores: int = 2
    device: str = "cpu"

    def turns(self, num_ranks: int) -> float:
        """Ranks by core: products, and messages that no network card carries, take so many times as long."""
        return max(1.0, min(num_ranks, self.ranks_per_node) / self.cores)

    def spmm_seconds(self, entries: float, rows: float, columns: int) -> float:
        """Seconds of a sparse matrix of so many entries and rows times a dense one of so many columns."""
        by_product, by_entry, by_result = self.spmm
        return by_product * entries * columns + by_entry * entries + by_result * rows * columns

    def send_seconds(self, num_bytes: float, num_messages: float, num_ranks: int, is_inside: bool) -> float:
        """One rank's messages (SuperGCN, eq. 2); the ranks of a machine share its link to others (Plexus, 4.2)."""
        if is_inside:
            return num_bytes / self.intra_bandwidth + num_messages * self.intra_latency
        sharing = min(self.ranks_per_node, num_ranks)
        return num_bytes * sharing / self.inter_bandwidth + num_messages * self.inter_latency

    def with_ranks_per_node(self, ranks_per_node: int) -> Machine:
        """The same machine with another number of ranks on each node."""
        if ranks_per_node < 1:
            raise OptionError(
                f"Expected at least one rank per node (got {ranks_per_node}): leave it out for the default"
            )
        return replace(self, ranks_per_node=ranks_per_node)

    def save(self, path: Path | None = None) -> Path:
        """Write the constants; :meth:`load` finds them."""
        path = machine_file(self.device) if path is None else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @staticmethod
    def default(device: str) -> Machine:
        """The constants assumed for a kind of device: the CPU's above, or :data:`ASSUMED_GPUS`."""
        return ASSUMED_GPUS if device == "cuda" else Machine()

    @staticmethod
    def load(path: Path | None = None, device: str = "cpu") -> Machine:
        """The constants in ``path``, else those measured here on a kind of device, else the defaults.

        Those of the wire in use come first, then gloo's.

        Raises:
            OptionError: The file is not of :meth:`save`, or ``path`` does not exist.
        """
        if path is None:
            found = [file for file in (machine_file(device, carrier()), machine_file(device)) if file.exists()]
            if not found:
                return Machine.default(device)
            path = found[0]
        expected, remedy = f"a machine's constants in {path}", "measure them with `python -m pyg_dist bench`"
        with refusing(OptionError, expected, remedy, OSError, ValueError, TypeError):
            stored = dict(json.loads(path.read_text()))
            values = {"device": "cpu", "quantize_rate": stored.get("stream_rate")} | stored  # older files lack them
            if set(values) != {field.name for field in fields(Machine)}:
                raise ValueError(f"it has {sorted(values)}")
            return typed(Machine, values)


ASSUMED_GPUS = Machine(
    source="assumed, products of one H100, links not measured: 8 H100 with NVLink, 400 Gbit/s each, nccl",
    spmm=(8.3e-13, 5.3e-12, 5.8e-12),  # of 16 to 602 columns over three graphs, within a factor of two
    gemm_rate=3.0e13,
    stream_rate=3.0e12,
    quantize_rate=3.0e12,
    call_seconds=4.0e-5,
    intra_latency=5.0e-6,
    intra_bandwidth=2.0e11,
    inter_latency=1.0e-5,
    inter_bandwidth=2.0e11,
    cores=8,
    device="cuda",
)
"""Products and streams as an H100 was measured (``docs/performance.md``); bandwidths of links are the data sheets', of
which three quarters are seen in practice.
"""


def machine_file(device: str = "cpu", wire: str = "gloo") -> Path:
    """The file with the constants of a device and a wire: ``PYG_DIST_MACHINE``, or else in the user's cache folder.

    A wire carries CPU tensors: the constants of other devices have one file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = f".{device}" if device != "cpu" else "" if wire == "gloo" else f".{wire}"
    return MACHINE.value() or cache / "pyg_dist" / f"machine{kind}.json"
