"""Sharding spec of the rows of a tensor: how many there are, and which of them this rank holds.

Selections of rows are in :mod:`pyg_dist.tensor.selection`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_dist.backend import host
from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.checks import replicas
from pyg_dist.backend.comm.checks.calls import line_in_words, user_line
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.dense.norm_relu_dropout import SplitRows
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import AgreementError
from pyg_dist.tensor.calling_code import how_to_draw_alike

# Caches that are filled under inference mode are used in training, too.
lasting = torch.inference_mode(False)

Kind = Literal["node", "edge", "tile"]
"""Kinds of rows; a tile's rows are nodes, and its columns are distributed, too."""


class Living:
    """Which shardings are alive; calls its watchers when the first one is made and when the last one is gone."""

    def __init__(self) -> None:
        self._references: set[ReferenceType[RowSharding]] = set()
        self._watchers: dict[Callable[[], None], Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._references)

    def watch(self, on_first: Callable[[], None], on_last: Callable[[], None]) -> None:
        """Call ``on_first`` when the first one is made (at once if there is one), ``on_last`` when the last is gone."""
        if on_first not in self._watchers and self._references:
            on_first()
        self._watchers[on_first] = on_last

    def add(self, rows: RowSharding) -> None:
        """Note a new one."""
        if not self._references:
            for on_first in self._watchers:
                on_first()
        self._references.add(ref(rows, self._remove))

    def _remove(self, reference: ReferenceType[RowSharding]) -> None:
        self._references.discard(reference)
        if not self._references:
            for on_last in self._watchers.values():
                on_last()


living = Living()


@dataclass(eq=False)
class KnownSelections:
    """Earlier selections from some rows, for :mod:`pyg_dist.tensor.selection`.

    Attributes:
        by_list: the latest lists and their selections: scripts use the same few splits in every epoch.
        compared: by list, its version and selection, once the ranks have compared it.
        elements: rows of elements, by their number in a row; with what was selected from them, on all ranks alike.
        edges: those whose ends a script has looked at, where the rows are edges.
    """

    by_list: deque[Any] = field(default_factory=lambda: deque(maxlen=8))
    compared: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    elements: dict[int, RowSharding] = field(default_factory=dict)
    edges: ReferenceType[Any] | None = None


class RowSharding(OfThisRun):
    """A distribution of ``size`` rows over the ranks of an axis: every row lives on one rank.

    Its own tensors are on the host, wherever tensors of such rows are (:func:`~pyg_dist.backend.on_device.on_device`).

    Attributes:
        group: the ranks.
        is_on_one_rank: whether this rank has all rows.
        kind: what the rows are, for messages.
        num_local: rows on this rank.
        rng_key: int64 ``[num_local]``: the key of each local row in dropout and random tensors, the same at every world
            size and partition: its global id, or its position in a list of ids.
    """

    counts_selections = True
    """Whether rows picked by a mask are counted at once (collective), or when their number is first read."""

    is_indexed = False
    """Whether a list of indices made these rows: other rows then align with them by position."""

    is_masked = False
    """Whether a mask picked these."""

    pieces: Sequence[RowSharding] = ()
    """The parts of joined rows."""

    order_in_pieces: Tensor | None = None
    """Where each local row stands among those of all pieces, one piece after another; ``None``: in this order."""

    @property
    def derives_from_index(self) -> bool:
        """Whether these were selected, directly or not, by a list of indices."""
        return self.is_indexed

    def __init__(self, group: Group, kind: Kind, size: int | None, rng_key: Tensor) -> None:
        self.group = group
        self.is_on_one_rank = group.size == 1
        self.kind: Kind = kind
        if size is not None:
            self.size = size
        self.num_local = rng_key.numel()
        self.rng_key = rng_key
        self.known = KnownSelections()
        self._moves: WeakKeyDictionary[RowSharding, Redistribution] = WeakKeyDictionary()
        living.add(self)

    @cached_property
    def size(self) -> int:
        """Number of rows over all ranks (collective at the first use, where it was not given)."""
        return sum(self.counts)

    def __deepcopy__(self, memo: object) -> RowSharding:
        return self  # immutable

    def __repr__(self) -> str:
        return f"{self.size} {self.kind}s"

    @property
    def global_id(self) -> Tensor:
        """The number of each local row in the input, int64 ``[num_local]``: of nodes and edges, not of selections."""
        return self.rng_key

    @property
    def position(self) -> Tensor:
        """Where each local row stands in the global order, int64 ``[num_local]`` (may be collective)."""
        return self.rng_key

    @property
    def num_rng_keys(self) -> int:
        """An upper bound of the keys, exclusive."""
        return self.size

    @property
    def whole(self) -> RowSharding:
        """The rows that these were selected from."""
        return self

    @property
    def split_rows(self) -> SplitRows | None:
        """How the columns of a row are spread over ranks; ``None`` where one has them all."""
        return None

    def slice_columns(self, tensor: Tensor) -> Tensor:
        """The local columns (last dimension) of a replicated operand beside these rows; differentiable."""
        return self.copy_to_ranks(tensor)

    def gather_columns(self, values: Tensor) -> Tensor:
        """Values of all columns, given those of the local ones: ``[k, F_local] -> [k, F]``."""
        return values

    @property
    def row_group(self) -> Group:
        """The ranks that hold other rows of the same columns."""
        return self.group

    @property
    def first_column(self) -> int:
        """The number of the first local column: what is drawn for a column depends on its number."""
        return 0

    def local_shape(self, width: int) -> tuple[int, int]:
        """The shape of this rank's piece of a matrix with ``width`` columns."""
        return self.num_local, width

    def global_shape(self, local: torch.Size) -> torch.Size:
        """The shape of the whole tensor of which a piece has shape ``local``."""
        return torch.Size((self.size, *local[1:]))

    @cached_property
    def counts(self) -> list[int]:
        """Rows by rank (collective at the first use)."""
        return self.group.gather_counts(self.num_local)

    @cached_property
    @lasting
    def _gathered_position(self) -> Tensor:
        """``position`` of every rank's rows, ranks one after another (collective at the first use)."""
        return self.group.gather_rows(self.position, self.counts)

    @cached_property
    @lasting
    def ordered_position(self) -> tuple[Tensor, Tensor]:
        """``position`` in ascending order, and the local row of each."""
        ordered, local = torch.sort(self.position)
        return ordered, local

    def gather(self, local: Tensor) -> Tensor:
        """All rows, in the global order, on every rank; differentiable (collective)."""
        self.group.barrier("gather")  # it compares, as all small sums do, what plain tensors went into the rows
        order, mine = (on_device(position, local.device) for position in (self._gathered_position, self.position))
        return replicated.all_gather_rows(local, self.group, self.counts, order, mine)

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a replicated tensor with ``size`` rows; differentiable."""
        return self.copy_to_ranks(full).index_select(0, on_device(self.position, full.device))

    def copy_to_ranks(self, tensor: Tensor) -> Tensor:
        """:func:`~.replicated.copy_to_ranks` of a script's tensor; the next small sum compares it with other ranks'."""
        entered = replicated.copy_to_ranks(tensor, self.group)
        self.note(tensor)
        return entered

    def note(self, tensor: Tensor) -> None:
        """Note a plain tensor that a script has given (:mod:`pyg_dist.backend.comm.checks.replicas`)."""
        if self.group.size > 1:
            replicas.noted().tensor(tensor)

    def reduce_from_ranks(self, tensor: Tensor) -> Tensor:
        """See :func:`~pyg_dist.backend.autograd.replicated.reduce_from_ranks` (collective)."""
        return replicated.reduce_from_ranks(tensor, self.group)

    def slice_alike(self, mask: Tensor) -> Tensor:
        """This rank's rows of a mask, bool ``[size, ...]``, equal on every rank; else all raise (collective)."""
        self.require_equal(mask, "mask")
        return mask.index_select(0, on_device(self.position, mask.device))

    def require_equal(self, index: Tensor, what: str) -> None:
        """Raise if the ranks were given different values, as an unseeded permutation would be (collective)."""
        if self.group.size > 1:
            require_same(self.group, digest(index), f"{what} of {self.kind}s")

    def from_sharding(self, local: Tensor, before: RowSharding) -> Tensor | None:
        """The local piece of a tensor distributed as ``before``; ``None`` if it has other rows (may be collective)."""
        if self.is_equivalent(before):
            return local
        paired = self.align_by_position(local, before)
        return before.to_sharding(local, self) if paired is None else paired

    def align_by_position(self, local: Tensor, other: RowSharding) -> Tensor | None:
        """``local``, of the rows ``other``, on the ranks of these rows by position; differentiable (collective).

        ``None`` where that is likely a mistake. It is none where one of the two was selected by a list, as both ends of
        edges are, ``z[source] * z[target]``; nor beside nodes as many edges: self loops (``ClusterGCNConv``), or a
        graph with as many edges as nodes, whose attributes' names do not tell of which they are.
        """
        if not self._pairs_with(other):
            return None
        if other not in self._moves:
            everyone = (torch.split(r._gathered_position, r.counts) for r in (other, self))
            self._moves[other] = Redistribution.by_position(self.group, *everyone)
        return apply(self._moves[other], local)

    def _pairs_with(self, other: RowSharding) -> bool:
        is_meant = self.kind != other.kind or self.derives_from_index or other.derives_from_index
        are_whole = "tile" not in (self.kind, other.kind)
        is_one_axis = self.group is other.group or self.group.size == other.group.size == 1
        return is_meant and are_whole and self.size == other.size and is_one_axis

    @property
    def undivided(self) -> tuple[RowSharding, int]:
        """The rows that these are the elements of, and how many of these a row has."""
        return self, 1

    def block_sharding(self, size: int) -> RowSharding:
        """As many rows of the same kind, in runs of equal length by rank."""
        first, last = (size * (self.group.rank + k) // self.group.size for k in (0, 1))
        return RowSharding(self.group, self.kind, size, host.arange(first, last))

    def to_sharding(self, local: Tensor, after: RowSharding) -> Tensor | None:
        """The inverse of :meth:`from_sharding`, for shardings of more than rows; ``None``: these are rows alone."""
        return None

    def is_equivalent(self, other: RowSharding) -> bool:
        """Whether ``other`` distributes the same rows in the same way (collective for selections by a mask)."""
        if self is other:
            return True
        return other._equals(self) if other.is_masked and not self.is_masked else self._equals(other)

    def _equals(self, other: RowSharding) -> bool:
        return False


def require_same(group: Group, mine: str, what: str) -> None:
    """Check that every rank has the same of what a script may draw; ``mine`` is this rank's digest (collective)."""
    digests = group.gather_counts(int(mine[:15], 16))  # of 60 bits
    if len(set(digests)) > 1:
        raise AgreementError(
            f"Expected the same {what} on every rank (got another on {replicas.others(digests, group)}) at "
            f"{line_in_words(*user_line()[:2])}: {how_to_draw_alike()}"
        )
