"""Sharding spec of the rows of a tensor: how many there are, and which of them this rank holds; also of selections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm import replicas
from pyg_dist.backend.comm.calls import line_in_words, user_line
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.dense.norm_relu_dropout import SplitRows
from pyg_dist.backend.on_device import copied_to, on_device
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import AgreementError

# Caches that are filled under inference mode are used in training, too.
lasting = torch.inference_mode(False)

Kind = Literal["node", "edge", "tile"]
"""What a row stands for; a tile's rows are nodes, and its columns are distributed, too."""


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


class RowSharding:
    """A distribution of ``size`` rows over the ranks of an axis: every row lives on one rank.

    Its own tensors are on the host, wherever tensors of such rows are (:func:`~pyg_dist.backend.on_device.on_device`).

    Attributes:
        group: the ranks.
        kind: what the rows are, for messages.
        size: number of rows over all ranks.
        num_local: rows on this rank.
        rng_key: int64 ``[num_local]``: the key of each local row in dropout and random tensors, the same at every world
            size and partition: its global id, or its position in a list of ids.
    """

    counts_selections = True
    """Whether rows picked by a mask are counted at once (collective), or when their number is first read."""

    is_indexed = False
    """Whether a list of indices made these rows: other rows then align with them by position."""

    @property
    def derives_from_index(self) -> bool:
        """Whether these were selected, directly or not, by a list of indices."""
        return self.is_indexed

    def __init__(self, group: Group, kind: Kind, size: int, rng_key: Tensor) -> None:
        self.group = group
        self.kind: Kind = kind
        self.size = size
        self.num_local = rng_key.numel()
        self.rng_key = rng_key
        # Scripts use the same few splits for outputs and labels in every epoch.
        self._listed: deque[Selection] = deque(maxlen=8)
        self._elements: WeakValueDictionary[int, RowSharding] = WeakValueDictionary()
        self._compared = WeakIdKeyDictionary()  # by list: (version, selection)
        self._moves: WeakKeyDictionary[RowSharding, Redistribution] = WeakKeyDictionary()
        living.add(self)

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
        """The local columns (last dimension) of a replicated tensor that meets these rows; differentiable."""
        return self.copy_to_ranks(tensor)

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
    def _by_position(self) -> tuple[Tensor, Tensor]:
        ordered, local = torch.sort(self.position)
        return ordered, local

    def gather(self, local: Tensor) -> Tensor:
        """All rows, in the global order, on every rank; differentiable (collective)."""
        self.group.meet("gather")  # it compares, as all small sums do, what plain tensors went into the rows
        order, mine = (on_device(position, local.device) for position in (self._gathered_position, self.position))
        return replicated.all_gather_rows(local, self.group, self.counts, order, mine)

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a replicated tensor with ``size`` rows; differentiable."""
        return self.copy_to_ranks(full).index_select(0, on_device(self.position, full.device))

    def copy_to_ranks(self, tensor: Tensor) -> Tensor:
        """:func:`~pyg_dist.backend.autograd.replicated.copy_to_ranks` of a tensor that a script has given.

        The next small sum checks that it is the same on every rank (:mod:`pyg_dist.backend.comm.replicas`).
        """
        entered = replicated.copy_to_ranks(tensor, self.group)
        self.meet(tensor)
        return entered

    def meet(self, tensor: Tensor) -> None:
        """Note a plain tensor that a script has given (:mod:`pyg_dist.backend.comm.replicas`)."""
        if self.group.size > 1:
            replicas.meet(tensor)

    def reduce_from_ranks(self, tensor: Tensor) -> Tensor:
        """See :func:`~pyg_dist.backend.autograd.replicated.reduce_from_ranks` (collective)."""
        return replicated.reduce_from_ranks(tensor, self.group)

    @lasting
    def by_mask(self, mask: Tensor) -> Selection:
        """The rows where ``mask`` (bool ``[num_local]``, this rank's piece) holds.

        Collective where :attr:`counts_selections`.
        """
        picked = mask.nonzero().view(-1)
        return Selection(MaskedRows(self, picked.cpu()), picked)

    @lasting
    def by_places(self, places: Tensor, device: torch.device) -> Selection:
        """:meth:`by_mask`, given where the mask holds: ascending, on the host, for tensors on ``device``."""
        return Selection(MaskedRows(self, places), copied_to(places, device))

    @lasting
    def by_whole_mask(self, mask: Tensor) -> Selection:
        """The rows where ``mask`` (bool ``[size]``, equal on every rank) holds (collective).

        Raises:
            AgreementError: The ranks were given different masks.
        """
        return self.by_mask(self.slice_alike(mask))

    def slice_alike(self, mask: Tensor) -> Tensor:
        """This rank's rows of a mask, bool ``[size, ...]``, which has to be equal on every rank (collective).

        Raises:
            AgreementError: It is not.
        """
        self._require_equal(mask, "mask")
        return mask.index_select(0, on_device(self.position, mask.device))

    @lasting
    def by_index(self, index: Tensor) -> Selection:
        """The rows at the positions ``index`` (int64 ``[k]``, equal on every rank), repeats and any order allowed.

        Row k of the result lives where row ``index[k]`` lives. The latest selections are cached by value
        (collective, unless the same tensor object is used again, unchanged).

        Raises:
            IndexError: A position is out of bounds.
            AgreementError: The ranks were given different lists.
        """
        version = None if index.is_inference() else index._version
        # Ranks skip the comparison only where this very object has been seen: equal values might be cached on one rank
        # and not on another. Values are compared as well, since NumPy can change them without a new version: only on
        # the host, where reading them does not synchronise with a device.
        known = self._compared.get(index)  # type: ignore[no-untyped-call]
        is_known = known is not None and known[0] == version
        if is_known and version is not None and not index.is_cpu:
            return known[1]  # type: ignore[no-any-return]
        wanted = torch.where(index < 0, index + self.size, index).cpu()
        if is_known and torch.equal(known[1].rows._index, wanted):
            return known[1]  # type: ignore[no-any-return]
        self._require_equal(wanted, "list")
        equal = (s for s in self._listed if torch.equal(s.rows._index, wanted))  # type: ignore[attr-defined]
        selection = next(equal, None) or self._select(wanted)
        self._compared[index] = (version, selection)
        return selection

    def _select(self, wanted: Tensor) -> Selection:
        """:meth:`by_index` of a list that is not among the latest."""
        outside = (wanted < 0) | (wanted >= self.size)
        if outside.any():
            first = int(wanted[outside][0])
            raise IndexError(
                f"index {first - self.size * (first < 0)} is out of bounds for {self}: "
                f"expected {-self.size} <= index < {self.size}"
            )
        ordered, local = self._by_position
        # Where this rank has no rows there is nothing to compare with.
        place = torch.searchsorted(ordered, wanted).clamp_(max=max(self.num_local - 1, 0))
        mine = ordered[place] == wanted if self.num_local else torch.zeros_like(outside)
        position = mine.nonzero().view(-1)
        selection = Selection(IndexedRows(self, position, wanted), local[place[position]])
        self._listed.append(selection)
        return selection

    def _require_equal(self, index: Tensor, what: str) -> None:
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
        """Rows of ``other`` beside these, by position (collective); ``None`` where that is likely a mistake.

        One of them has to be a list, as the two ends of edges are, ``z[source] * z[target]``, or nodes stand beside
        edges that a mask selects, such as the self loops (``ClusterGCNConv``). Differentiable.
        """
        if not self._pairs_with(other):
            return None
        if other not in self._moves:
            everyone = (torch.split(r._gathered_position, r.counts) for r in (other, self))
            self._moves[other] = Redistribution.by_position(self.group, *everyone)
        return apply(self._moves[other], local)

    def _pairs_with(self, other: RowSharding) -> bool:
        kinds_differ = self.kind != other.kind
        is_picked = any(r.derives_from_index or (isinstance(r, MaskedRows) and kinds_differ) for r in (self, other))
        are_whole = "tile" not in (self.kind, other.kind)
        is_one_axis = self.group is other.group or self.group.size == other.group.size == 1
        return is_picked and are_whole and self.size == other.size and is_one_axis

    @property
    def undivided(self) -> tuple[RowSharding, int]:
        """The rows that these are the :meth:`elements` of, and how many of these a row has."""
        return self, 1

    def elements(self, width: int) -> RowSharding:
        """A row for each of ``width`` elements of every row, those of one row one after another."""
        if width == 1:
            return self
        known = self._elements.get(width)
        if known is None:
            known = self._elements[width] = ElementRows(self, width)
        return known

    def block_sharding(self, size: int) -> RowSharding:
        """As many rows of the same kind, in runs of equal length by rank."""
        first, last = (size * (self.group.rank + k) // self.group.size for k in (0, 1))
        return RowSharding(self.group, self.kind, size, torch.arange(first, last))

    def to_sharding(self, local: Tensor, after: RowSharding) -> Tensor | None:
        """:meth:`from_sharding` from the other side, for distributions of more than rows."""
        return None

    def is_equivalent(self, other: RowSharding) -> bool:
        """Whether ``other`` distributes the same rows in the same way (collective for two selections by mask)."""
        return self is other or self._equals(other)

    def _equals(self, other: RowSharding) -> bool:
        return False


class MaskedRows(RowSharding):
    """Rows picked by a mask. Their positions cost a gather, which is made at the first use."""

    def __init__(self, parent: RowSharding, picked: Tensor) -> None:
        super().__init__(parent.group, parent.kind, 0, parent.rng_key[picked])
        del self.size
        self._parent = parent
        self._picked = picked
        self.counts_selections = parent.counts_selections
        if self.counts_selections:
            self.size  # noqa: B018

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        """Number of rows over all ranks (collective at the first use)."""
        return sum(self.counts)

    def __repr__(self) -> str:
        return f"{self.size} {self.kind}s" if "size" in vars(self) else f"{self.kind}s picked by a mask"

    @property
    def derives_from_index(self) -> bool:
        """See :class:`RowSharding`."""
        return self._parent.derives_from_index

    @property
    def num_rng_keys(self) -> int:
        """See :class:`RowSharding`."""
        return self._parent.num_rng_keys

    @property
    def whole(self) -> RowSharding:
        """See :class:`RowSharding`."""
        return self._parent.whole

    @property
    def position(self) -> Tensor:
        """See :class:`RowSharding`."""
        return self._position

    @cached_property
    @lasting
    def _position(self) -> Tensor:
        mine = self._parent.position[self._picked]
        everyone = self.group.gather_rows(mine, self.counts)
        return torch.searchsorted(everyone.sort().values, mine)

    def _equals(self, other: RowSharding) -> bool:
        # All ranks reach the collective `all_true`, or none: the conditions before it are equal on all ranks.
        if (
            not isinstance(other, MaskedRows)
            or self.size != other.size
            or not self._parent.is_equivalent(other._parent)
        ):
            return False
        return self.group.all_true(torch.equal(self._picked, other._picked))


class ElementRows(RowSharding):
    """The elements of rows that have several."""

    def __init__(self, parent: RowSharding, width: int) -> None:
        super().__init__(parent.group, parent.kind, parent.size * width, parent.rng_key)
        del self.rng_key
        self.num_local = parent.num_local * width
        self._parent = parent
        self._width = width

    def __repr__(self) -> str:
        return f"{self.size} elements of {self._parent}"

    @cached_property
    @lasting
    def rng_key(self) -> Tensor:  # type: ignore[override]
        """See :class:`RowSharding`."""
        return _numbered(self._parent.rng_key, self._width)

    @property
    def undivided(self) -> tuple[RowSharding, int]:
        """See :class:`RowSharding`."""
        return self._parent, self._width

    def elements(self, width: int) -> RowSharding:
        """See :class:`RowSharding`."""
        return self._parent.elements(self._width * width)

    @property
    def derives_from_index(self) -> bool:
        """See :class:`RowSharding`."""
        return self._parent.derives_from_index

    @property
    def num_rng_keys(self) -> int:
        """See :class:`RowSharding`."""
        return self._parent.num_rng_keys * self._width

    @property
    def whole(self) -> RowSharding:
        """See :class:`RowSharding`."""
        return self._parent.whole

    @property
    def position(self) -> Tensor:
        """See :class:`RowSharding`."""
        return self._position

    @cached_property
    @lasting
    def _position(self) -> Tensor:
        return _numbered(self._parent.position, self._width)

    def _equals(self, other: RowSharding) -> bool:
        is_alike = isinstance(other, ElementRows) and other._width == self._width
        return is_alike and self._parent.is_equivalent(other._parent)  # type: ignore[attr-defined]


def _numbered(row: Tensor, width: int) -> Tensor:
    return (row.view(-1, 1) * width + torch.arange(width, device=row.device)).view(-1)


class IndexedRows(RowSharding):
    """Rows picked by a list of positions, which is the same on every rank."""

    is_indexed = True

    def __init__(self, parent: RowSharding, position: Tensor, index: Tensor) -> None:
        super().__init__(parent.group, parent.kind, index.numel(), position)
        self._parent = parent
        self._index = index

    @property
    def whole(self) -> RowSharding:
        """See :class:`RowSharding`."""
        return self._parent.whole

    def _equals(self, other: RowSharding) -> bool:
        if not isinstance(other, IndexedRows) or not self._parent.is_equivalent(other._parent):
            return False
        return torch.equal(self._index, other._index)


class ConcatenatedRows(RowSharding):
    """The rows of several distributions over one axis, one after another; each stays where it is.

    Collective at the first use of a mask's rows.
    """

    is_indexed = True

    def __init__(self, parts: tuple[RowSharding, ...]) -> None:
        starts = [0, *accumulate(part.size for part in parts)]
        position = torch.cat([part.position + start for part, start in zip(parts, starts, strict=False)])
        super().__init__(parts[0].group, parts[0].kind, starts[-1], position)
        self._parts = parts

    def _equals(self, other: RowSharding) -> bool:
        if not isinstance(other, ConcatenatedRows) or len(self._parts) != len(other._parts):
            return False
        return all(mine.is_equivalent(its) for mine, its in zip(self._parts, other._parts, strict=True))


class Selection(NamedTuple):
    """The result of selecting: the new distribution, and which local rows go into it.

    They are on the mask's device, or for a list on the host: :func:`~pyg_dist.backend.on_device.on_device`.
    """

    rows: RowSharding
    local_index: Tensor


def require_same(group: Group, mine: str, what: str) -> None:
    """Check that every rank has the same of what a script may draw (collective).

    Args:
        group: the ranks.
        mine: its digest on this rank.
        what: its name.

    Raises:
        AgreementError: On every rank.
    """
    digests = group.gather_counts(int(mine[:15], 16))  # of 60 bits
    if len(set(digests)) > 1:
        raise AgreementError(
            f"Expected the same {what} on every rank (got another on {replicas.others(digests, group)}) at "
            f"{line_in_words(*user_line()[:2])}: seed the generator that draws it, or draw it after pyg_dist.init()"
        )
