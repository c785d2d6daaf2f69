"""One level or two: what every rank has, sends and receives in both, by counting alone, and which is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from pyg_dist.halo.plan.cost import HaloLoad, halo_price, sent_by_rank
from pyg_dist.halo.plan.cover import BothEnds, ExchangeKind, RemoteEdges, both_ends
from pyg_dist.halo.plan.sizes import BlockNumbers, ShareSizes, machine_of_rank, rows_across
from pyg_dist.halo.plan.two_level import MachineEdges
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price

Hierarchy = Literal["auto", "off", "on"]
"""Whether what crosses machines crosses once for all ranks of one; "auto": where that is cheaper."""
HIERARCHIES: tuple[Hierarchy, ...] = get_args(Hierarchy)


# Above this share of all pairs of ranks, one all-to-all-v replaces the messages: where all pairs of 4 or 8 ranks
# exchange over gloo on one machine, messages take as long or longer (up to 1.4 times at 8).
_DENSE = 0.75


def is_dense(messages: int, ranks: int) -> bool:
    """Whether of ``messages`` pairs of ranks so many exchange that an all-to-all-v is cheaper than a message each."""
    return ranks > 2 and messages >= _DENSE * ranks * (ranks - 1)


def shares_machines(num_ranks: int, ranks_per_node: int | None) -> bool:
    """Whether there are several machines, and ranks share one."""
    return ranks_per_node is not None and 1 < ranks_per_node < num_ranks


class Counted(NamedTuple):
    """An exchange in one level, or in two."""

    sizes: tuple[ShareSizes, ...]  # by rank
    rows: Tensor  # that go from each rank to each, int64 ``[P, P]``
    two_levels: bool

    def price(self, model: Model, machine: Machine, bits: tuple[int, int] = (32, 32)) -> Price:
        """The price of a training step, with the machine's ``ranks_per_node``."""
        loads, sent = [], sent_by_rank(self.rows, machine.ranks_per_node)
        for s, (near, far, inside, between) in zip(self.sizes, sent, strict=True):
            if self.two_levels:
                inside, between = s.messages - s.link_messages, s.link_messages
            local, made = s.edges - s.halo_edges, s.rows_sent + self._rows_added_to(s)
            loads.append(HaloLoad(s.nodes, s.work, near, far, inside, between, 1 + self.two_levels, local, made))
        return halo_price(model, loads, machine, len(loads), bits)

    def _rows_added_to(self, sizes: ShareSizes) -> int:
        """An upper bound on the rows that arriving rows are added to: counted once for each message or all-to-all-v.

        In two levels a third of the messages inside machines are addends for other machines, which are not multiplied.
        """
        pieces = sizes.messages
        if self.two_levels:
            pieces = 2 + 2 * (sizes.messages - sizes.link_messages) // 3
        elif is_dense(sum(s.messages for s in self.sizes), len(self.sizes)):
            pieces = 1
        return min(pieces * (sizes.nodes - sizes.inner), sizes.work - sizes.edges + sizes.halo_edges)


@dataclass(frozen=True)
class LevelCounts:
    """The traffic of a graph's exchanges between given parts."""

    numbers: BlockNumbers
    between: MachineEdges | None  # the edges between machines; ``None``: no ranks share one

    @staticmethod
    def of(edge_index: Tensor, parts: BothEnds, num_ranks: int, ranks_per_node: int | None) -> LevelCounts:
        """The traffic among any number of ranks, counted in this process. Not collective, O(E log E) time."""
        remote = RemoteEdges.of(edge_index, parts, num_ranks)
        numbers = BlockNumbers.of(remote, both_ends(parts)[1])
        if ranks_per_node is None or not shares_machines(num_ranks, ranks_per_node):
            return LevelCounts(numbers, None)
        return LevelCounts(numbers, MachineEdges.of(remote, ranks_per_node))

    def counted(self, exchange: ExchangeKind, two_levels: bool = False) -> Counted:
        """In these levels."""
        machines = self.between if two_levels else None
        return Counted(*self.numbers.sizes(exchange, machines), two_levels=machines is not None)

    def chosen(
        self,
        exchange: ExchangeKind,
        hierarchy: Hierarchy,
        model: Model,
        machine: Machine,
        bits: tuple[int, int] = (32, 32),
    ) -> Counted:
        """In the levels of ``hierarchy``, or the cheaper ones; ``bits``: of a number in the messages, by direction."""
        if hierarchy != "auto" or self.between is None:
            return self.counted(exchange, hierarchy == "on")
        both = self.counted(exchange), self.counted(exchange, two_levels=True)
        return min(both, key=lambda one: one.price(model, machine, bits).seconds)

    @property
    def across(self) -> tuple[int, int] | None:
        """Rows of the hybrid exchange that cross machines, in one level and in two; ``None``: no ranks share one."""
        if self.between is None:
            return None
        one = rows_across(self.numbers.post_rows + self.numbers.pre_sums, self.between.ranks_per_machine)
        return one, sum(int(side.sum()) for side in self.between.hybrid)


class Crossings(NamedTuple):
    """Rows of one aggregation and its messages, inside machines and between them."""

    inside: int
    between: int
    messages: tuple[int, int]  # inside, between
    of_rank: list[int]  # that each rank sends to other machines
    of_machines: list[list[int]]  # from each machine to each; inside on the diagonal

    @staticmethod
    def of(rows: Tensor, num_messages: int, ranks_per_node: int) -> Crossings:
        """The crossings of rows from each rank to each, ``[P, P]``."""
        machine = machine_of_rank(len(rows), ranks_per_node)
        crossing = rows * (machine[:, None] != machine)
        size = 2 * (int(machine[-1]) + 1,)
        of_machines = rows.new_zeros(size).index_put_((machine[:, None], machine), rows, accumulate=True)
        between, num_crossing = int(crossing.sum()), int((crossing > 0).sum())
        messages = num_messages - num_crossing, num_crossing
        return Crossings(int(rows.sum()) - between, between, messages, crossing.sum(1).tolist(), of_machines.tolist())

    @property
    def most_between_two(self) -> int:
        """Rows from one machine to another, where they are most."""
        return max(count for k, counts in enumerate(self.of_machines) for m, count in enumerate(counts) if k != m)
