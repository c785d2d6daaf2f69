"""The plan of a training run, for people and programs: sizes, balance and traffic of every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.ops.quantize import row_bytes
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import DAMAGED, AgreementError, DataError, OptionError, refusing
from pyg_dist.halo.plan.cost import ELEMENT_BYTES, memory_bytes
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.levels import Counted, Crossings, Hierarchy, LevelCounts, is_dense
from pyg_dist.halo.plan.sizes import ShareSizes, size_table
from pyg_dist.partition.inputs import as_edges, as_parts, check_ends, check_given
from pyg_dist.pricing.base import DistributionPlan, imbalance
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price
from pyg_dist.pricing.plot import Bars, HeatMap, draw

_FORMAT = 3
"""Of the files of plans."""


@dataclass(frozen=True)
class Plan(DistributionPlan):
    """The plan of one :class:`~pyg_dist.DistributedData`, equal on every rank.

    Attributes:
        layout: ``"halo"``.
        partition: how the parts were made.
        exchange: ``"post"``, ``"pre"`` or ``"hybrid"``.
        sizes: each rank's numbers, by rank.
        pairs: (sender, receiver, rows) of each pair of ranks with traffic, for the chosen exchange.
        hash: see :func:`plan_hash`; equal plans have equal hashes.
        parts: the owner of each node, ``[N]`` integers; in ``data.plan`` on rank 0 only.
        bits: bits of a value in the messages of training, forward and backward.
        ranks_per_node: ranks on each machine, consecutive ones; None: that of the :class:`~pyg_dist.plan.Machine`.
        two_levels: whether ranks of a machine share what crosses to another (:mod:`pyg_dist.halo.plan.two_level`).
        across: rows of the hybrid exchange that cross machines, in one level and in two; None: not counted.

    Example:
        >>> from pyg_dist.partition import partition
        >>> graph = KarateClub()[0]
        >>> plan = Plan.of(graph.edge_index, partition(graph.edge_index, graph.num_nodes, 4, "metis"), 4)
        >>> plan.ranks, plan.rows["hybrid"] <= plan.rows["post"]
        (4, True)
    """

    layout: str
    partition: str
    exchange: ExchangeKind
    sizes: tuple[ShareSizes, ...]
    pairs: tuple[tuple[int, int, int], ...]
    hash: str
    parts: Tensor | None = field(default=None, compare=False, repr=False)
    bits: tuple[int, int] = (32, 32)
    ranks_per_node: int | None = field(default=None, compare=False)
    two_levels: bool = field(default=False, compare=False)
    across: tuple[int, int] | None = field(default=None, compare=False)

    @staticmethod
    def of(
        edge_index: Tensor,
        parts: Tensor,
        num_ranks: int,
        exchange: ExchangeKind = "hybrid",
        partition: str = "given",
        ranks_per_node: int | None = None,
        hierarchy: Hierarchy = "auto",
        model: Model | None = None,
        machine: Machine | None = None,
        bits: tuple[int, int] = (32, 32),
    ) -> Plan:
        """The plan for any number of ranks, in this process. Not collective, O(E log E) time.

        ``hierarchy`` "auto" takes the levels that a step of ``model`` is cheaper with on ``machine`` (see
        :meth:`price`); with ``ranks_per_node`` None there is one.

        Shapes:
            - edge_index: int64 ``[2, E]``
            - parts: ``[N]`` integers

        Raises:
            DataError: Parts out of range, or edges between other nodes.
            OptionError: There is no such exchange.

        Example:
            >>> plan = Plan.of(KarateClub()[0].edge_index, torch.arange(34) % 4, 4)
            >>> plan.ranks, plan.nodes
            (4, [9, 9, 8, 8])
        """
        if exchange not in EXCHANGES:
            raise OptionError(f"Expected exchange to be one of {', '.join(EXCHANGES)} (got {exchange!r})")
        edge_index, parts = as_edges(edge_index), as_parts(parts)
        parts = check_given(parts, len(parts), num_ranks)
        check_ends(edge_index, len(parts), "edge_index")
        if model is None:
            model = Model.of_layers(parts.numel(), edge_index.shape[1], None, None)
        machine = machine_with(machine, ranks_per_node)
        counts = LevelCounts.of(edge_index, parts, num_ranks, ranks_per_node)
        chosen = counts.chosen(exchange, hierarchy, model, machine, bits)
        return Plan(
            "halo", partition, exchange, chosen.sizes, pairs_of(chosen.rows),
            plan_hash(edge_index, parts, num_ranks, exchange), parts, bits, ranks_per_node,
            chosen.two_levels, counts.across,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def nodes(self) -> list[int]:
        return [s.nodes for s in self.sizes]

    @property
    def rows(self) -> dict[str, int]:
        """Rows sent in one aggregation, all ranks together, by kind of exchange."""
        return {kind: sum(getattr(s, kind) for s in self.sizes) for kind in EXCHANGES}

    @property
    def messages(self) -> int:
        return sum(s.messages for s in self.sizes)

    @property
    def is_dense(self) -> bool:
        """Whether so many pairs of ranks exchange that an all-to-all-v is cheaper than a message for each."""
        return not self.two_levels and is_dense(self.messages, self.ranks)

    def rows_between(self) -> Tensor:
        """Rows sent in one aggregation, int64 ``[P, P]``, sender by receiver."""
        rows = host.zeros(self.ranks, self.ranks, dtype=torch.int64)
        if self.pairs:
            sender, receiver, count = host.tensor(self.pairs).unbind(1)
            rows[sender, receiver] = count
        return rows

    def rows_between_nodes(self) -> int:
        """Rows sent in one aggregation, in the plan's levels, that leave their machine."""
        return self._levels(None).between

    def halo_bytes(self, width: int, element_size: int = ELEMENT_BYTES, backward: bool = False) -> int:
        """Bytes sent in one aggregation of ``width`` columns, all ranks together; as many backward, unless bits differ.

        A row in fewer than 16 bits a value takes four bytes more, for its zero point and scale, and goes as it is
        where that is shorter.
        """
        return sum(self._bytes_by_level(self._levels(None), width, element_size, backward))

    def _levels(self, machine: Machine | None) -> Crossings:
        levels = Crossings.of(self.rows_between(), self.messages, self._machine(machine).ranks_per_node)
        between = sum(s.link_messages for s in self.sizes)
        return levels._replace(messages=(self.messages - between, between)) if self.two_levels else levels

    def _bytes_by_level(
        self, levels: Crossings, width: int, element_size: int = ELEMENT_BYTES, backward: bool = False
    ) -> tuple[int, int]:
        """The bytes of one aggregation of ``width`` columns, inside machines and between them."""
        of_row = self.row_bytes(width, element_size, backward)
        return levels.inside * (width * element_size if self.two_levels else of_row), levels.between * of_row

    def row_bytes(self, width: int, element_size: int = ELEMENT_BYTES, backward: bool = False) -> int:
        """Bytes of one row of ``width`` columns in a message."""
        return row_bytes(width, element_size, self.bits[backward])

    def memory_bytes(self, model: Model | None = None) -> list[int]:
        model = self.assumed_model() if model is None else model
        received = [0] * self.ranks
        for _, receiver, _ in self.pairs:
            received[receiver] += 1
        return [
            memory_bytes(
                s.nodes, s.edges, s.work + s.halo_edges, s.rows_sent + s.rows_received, model, *self._cut(s, messages)
            )
            for s, messages in zip(self.sizes, received, strict=True)
        ]

    def _cut(self, sizes: ShareSizes, received: int) -> tuple[int, int]:
        """Entries and rows of the pieces for one message each; what arrives as one is not cut. Forward and backward."""
        if self.is_dense or max(sizes.messages, received) < 2:
            return 0, 0
        boundary = sizes.nodes - sizes.inner
        return sizes.work - (sizes.edges - sizes.halo_edges), received * boundary + sizes.messages * sizes.nodes

    def assumed_model(self) -> Model:
        return Model.of_layers(sum(self.nodes), sum(s.edges for s in self.sizes), None, None)

    def price(self, model: Model | None = None, machine: Machine | None = None) -> Price:
        counted = Counted(self.sizes, self.rows_between(), self.two_levels)
        model = self.assumed_model() if model is None else model
        return counted.price(model, self._machine(machine), self.bits)

    def _machine(self, machine: Machine | None) -> Machine:
        given = machine is not None and not self.two_levels
        return machine_with(machine, None if given else self.ranks_per_node)

    def _numbers(self, widths: Sequence[int], machine: Machine) -> dict[str, object]:
        """``bytes`` are of float32 or ``bits``. A node, in ``..._between_nodes``, is one of the machine's ranks."""
        levels = self._levels(machine)
        of_widths = {str(width): self._bytes_by_level(levels, width) for width in widths}
        across = None if self.across is None else dict(zip(("rank_pairs", "machine_pairs"), self.across, strict=True))
        uneven = ("nodes", "edges", "work", "rows_sent", "rows_received")
        return {
            "partition": self.partition,
            "exchange": self.exchange,
            **{name: [getattr(s, name) for s in self.sizes] for name in ("inner", "halo_edges", *uneven)},
            "rows": self.rows,
            "all_to_all": self.is_dense,
            "bits": list(self.bits),
            "backward_bytes": {str(width): self.halo_bytes(width, backward=True) for width in widths},
            "ranks_per_node": machine.ranks_per_node,
            "levels": 1 + self.two_levels,
            "between_machines": across,
            "rows_inside_nodes": levels.inside,
            "rows_between_nodes": levels.between,
            "rows_leaving_node": levels.of_rank,
            "rows_by_nodes": levels.of_machines,
            "messages_inside_nodes": levels.messages[0],
            "messages_between_nodes": levels.messages[1],
            "bytes_inside_nodes": {width: level[0] for width, level in of_widths.items()},
            "bytes_between_nodes": {width: level[1] for width, level in of_widths.items()},
            "imbalance": {name: imbalance([getattr(s, name) for s in self.sizes]) for name in uneven},
        }

    def _title(self) -> str:
        levels = " in two levels" if self.two_levels else ""
        return (
            f"{self.layout} layout, {self.partition} partition, {self.exchange} exchange{levels}, plan {self.hash[:12]}"
        )

    def _table(self, machine: Machine) -> list[str]:
        table = size_table(self.sizes)
        by_kind = ", ".join(f"{kind} {count:,}" for kind, count in self.rows.items())
        way = "an all-to-all-v" if self.is_dense else "a message per neighbour"
        table.append(f"rows per aggregation: {by_kind}; by {way}")
        if self.ranks > machine.ranks_per_node:
            levels = self._levels(machine)
            (near, far), most = levels.messages, max(levels.of_rank)
            table.append(
                f"on nodes of {machine.ranks_per_node} ranks: {levels.inside:,} rows stay inside, "
                f"{levels.between:,} leave, of a rank at most {most:,}, to another node at most "
                f"{levels.most_between_two:,}; messages: {near:,} inside, {far:,} between nodes"
            )
            if self.across is not None:
                one, two = self.across
                table.append(f"rows of the hybrid exchange that leave: {one:,} in one level, {two:,} in two")
        return table

    def _traffic(self, width: int, machine: Machine) -> str:
        text = super()._traffic(width, machine)
        if self.bits != (32, 32):
            backward = self.halo_bytes(width, backward=True)
            text += f" in {self.bits[0]} bits, {backward:,} backward in {self.bits[1]}"
        if self.ranks > machine.ranks_per_node:
            text += f"; {self._bytes_by_level(self._levels(machine), width)[1]:,} forward leave their node"
        return text

    def save(self, path: str | Path) -> None:
        """Write the plan and its parts, as safetensors with the rest as JSON in the header.

        Raises:
            DataError: A rank other than 0 has no parts to write.

        Example:
            >>> data.plan.save("karate.plan")
        """
        if self.parts is None:
            raise DataError("Expected a plan with its parts, which rank 0 has: save it there, under is_main()")
        from safetensors.torch import save

        content = asdict(replace(self, parts=None)) | {"format": _FORMAT}
        del content["parts"]
        narrow = self.parts.to("cpu", torch.from_numpy(np.empty(0, np.min_scalar_type(-self.ranks))).dtype)
        header = {"plan": json.dumps(content)}
        written = save({"parts": narrow.contiguous()}, header)  # not save_file, whose files only their owner may read
        target = Path(path)
        if target.exists() and not target.is_file():  # a device, such as /dev/null, is written to
            target.write_bytes(written)
            return
        # A file that is there may be mapped by a loaded plan, so it is replaced, not overwritten.
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(written)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path, expected_hash: str | None = None) -> Plan:
        """Read a plan that :meth:`save` wrote; ``DistributedData(data, partition=plan)`` uses it again.

        Args:
            path: the file.
            expected_hash: the hash of the plan for the graph, parts and options at hand.

        Raises:
            DataError: The file is not a plan.
            AgreementError: It was made for another graph, other parts or other options.

        Example:
            >>> data.plan.save("karate.plan")
            >>> again = DistributedData(KarateClub()[0], partition=Plan.load("karate.plan"))
            >>> again.plan.hash == data.plan.hash
            True
        """
        import safetensors

        with refusing(DataError, f"a plan in {path}", "plan again", *DAMAGED, OSError, safetensors.SafetensorError):
            with safetensors.safe_open(path, "pt") as file:
                content, parts = json.loads(file.metadata()["plan"]), file.get_tensor("parts")
            if content.pop("format") != _FORMAT:
                raise DataError(f"Expected a plan of format {_FORMAT} in {path}: plan again")
            plan = replace(typed(Plan, content, "plan"), parts=parts)
        if expected_hash is not None and plan.hash != expected_hash:
            raise AgreementError(
                f"Expected the plan in {path} to be for this graph, these parts and options (it is {plan.hash[:12]}, "
                f"they are {expected_hash[:12]}): plan again"
            )
        return plan

    def parts_for(
        self,
        edge_index: Tensor,
        num_nodes: int,
        num_ranks: int,
        exchange: ExchangeKind,
        bits: tuple[int, int] = (32, 32),
    ) -> Tensor:
        """The parts, if the plan was made for just this: int64 ``[N]``. Not collective.

        Raises:
            AgreementError: It was made for other ranks, another exchange, other bits, or another graph.
            DataError: It has no parts.
        """
        if self.parts is None:
            raise DataError("Expected a plan with its parts (got one without): Plan.load(path) has them")
        for name, made_for, wanted in (
            ("ranks", self.ranks, num_ranks),
            ("exchange", self.exchange, exchange),
            ("bits", self.bits, bits),
            ("nodes", self.parts.numel(), num_nodes),
        ):
            if made_for != wanted:
                raise AgreementError(f"Expected a plan with {name} {wanted} (got {made_for}): plan again")
        if plan_hash(edge_index, self.parts, num_ranks, exchange) != self.hash:
            raise AgreementError(
                f"Expected a plan for this graph (got plan {self.hash[:12]} of another one): plan again"
            )
        return self.parts.long()

    def plot(self, path: str | Path, width: int = 256) -> None:
        """Draw bytes between ranks, and each rank's work and bytes, of an aggregation of ``width`` columns."""
        mebibyte, sizes = self.row_bytes(width) / 2**20, self.sizes
        title = f"{self.partition} partition, {self.exchange} exchange, plan {self.hash[:12]}"
        sent, received = ([getattr(s, rows) * mebibyte for s in sizes] for rows in ("rows_sent", "rows_received"))
        between = (self.rows_between() * mebibyte).tolist()
        pairs = HeatMap(f"sent in one aggregation of {width} columns", between, "MiB", "to rank", "from rank")
        work = Bars("work: rows read and added", {"work": [s.work for s in sizes]})
        draw(path, title, pairs, work, Bars("traffic of one aggregation", {"sent": sent, "received": received}, "MiB"))


def machine_with(machine: Machine | None, ranks_per_node: int | None) -> Machine:
    """The given one, or the one measured here, with so many ranks on each node, where that is known."""
    machine = Machine.load() if machine is None else machine
    return machine if ranks_per_node is None else machine.with_ranks_per_node(ranks_per_node)


def plan_hash(edge_index: Tensor, parts: Tensor, num_ranks: int, exchange: ExchangeKind) -> str:
    """Digest of all that a plan depends on: edges, parts, number of ranks and exchange. Not collective."""
    return hash_of_digests(digest(edge_index), digest(parts.to(torch.int32)), num_ranks, exchange)


def hash_of_digests(edges: str, parts: str, num_ranks: int, exchange: ExchangeKind) -> str:
    """:func:`plan_hash` of edges and parts (int32) whose digests are known."""
    return digest(repr((edges, parts, num_ranks, exchange)))


def pairs_of(rows: Tensor) -> tuple[tuple[int, int, int], ...]:
    """The entries above zero of a ``[P, P]`` matrix as (sender, receiver, rows)."""
    sender, receiver = rows.nonzero(as_tuple=True)
    return tuple(zip(sender.tolist(), receiver.tolist(), rows[sender, receiver].tolist(), strict=True))
