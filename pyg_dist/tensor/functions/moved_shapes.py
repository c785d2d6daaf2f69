"""Other shapes and products of rows in other dimensions than the first (``MovedRows``).

``x.T @ y`` and ``k.transpose(-2, -1) @ v`` sum over rows and give plain matrices; ``x @ y.T`` and what is multiplied by
it, as attention is written out, have a row for each row of x and gather those of y (collective).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor.functions.moved_rows import HANDLERS, MovedRows, moved_in, named, on_last, refuse_moved
from pyg_dist.tensor.functions.shapes import dims_of, flat_sizes, view
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.selection import ConcatenatedRows
from pyg_dist.tensor.sharding import RowSharding


@implements("view", "reshape")
def reshape(function: Function, args: Args, kwargs: Kwargs) -> object:
    """As :func:`~pyg_dist.tensor.functions.shapes.view`; dimensions of size one may also come before the rows."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    batch = _as_batch(x, sizes) if isinstance(x._sharding, ConcatenatedRows) else None
    if batch is not None:
        return batch
    place = next((k for k, size in enumerate(sizes) if size != 1), 0)
    if place > 0 and sizes[place] in (-1, x.shape[0]):
        return MovedRows.make(x.reshape(sizes[place], *[1] * place, *sizes[place + 1 :]), place)
    return view(function, args, kwargs)


def _as_batch(x: RowTensor, sizes: tuple[Any, ...]) -> Any:
    """``[B, N, F]`` of the ``[B N, F]`` that :func:`_reshape` has made of it; ``None``: it is something else."""
    parts: tuple[RowSharding, ...] = x._sharding.parts  # type: ignore[attr-defined]
    rows, whole = parts[0], _sizes(x, sizes)
    place = next((k for k in range(1, len(whole)) if (prod(whole[:k]), whole[k]) == (len(parts), rows.size)), None)
    if place is None or any(part is not rows for part in parts):
        return None
    with local_tensors():
        of = x.reshape(len(parts), rows.num_local, *x.shape[1:]).movedim(0, 1)
        of = as_row_tensor_(of.reshape(rows.num_local, *whole[:place], *whole[place + 1 :]), rows)
        return MovedRows.make(of, place)


def _sizes(x: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a shape of ``x`` stands for, one of which may be -1."""
    known = prod(size for size in sizes if size != -1)
    return tuple(x.numel() // max(known, 1) if size == -1 else size for size in sizes)


def _squeeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions of size one other than the rows'."""
    x = args[0]
    dims = [d for d in dims_of(bind("x dim", args, kwargs).get("dim"), x.dim()) if d != x.place and x.shape[d] == 1]
    return x[tuple(0 if d in dims else slice(None) for d in range(x.dim()))]


def _reshape(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions before the rows', and those behind it, are reshaped apart; ``[B, N, F]`` may become ``[B N, F]``."""
    x = args[0]
    sizes = _sizes(x, flat_sizes(args, kwargs))
    before, behind = x.shape[: x.place], x.shape[x.place + 1 :]
    for place, size in enumerate(sizes):
        if (
            size == x.shape[x.place]
            and prod(sizes[:place]) == prod(before)
            and prod(sizes[place + 1 :]) == prod(behind)
        ):
            return MovedRows.make(x.of.reshape(size, *sizes[:place], *sizes[place + 1 :]), place)
    if (sizes[0], prod(sizes[1:])) == (prod(before) * x.shape[x.place], prod(behind)):
        of = x.of.reshape(x.of.shape[0], prod(before), *sizes[1:])
        return torch.cat([of[:, k] for k in range(prod(before))])
    raise refuse_moved(function, x)


def _flatten(function: Function, args: Args, kwargs: Kwargs) -> object:
    x, bound = args[0], bind("x start_dim end_dim", args, kwargs)
    start, end = dims_of((bound.get("start_dim", 0), bound.get("end_dim", -1)), x.dim())
    return _reshape(function, (x, *x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]), {})


def _expand(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Expand or repeat other dimensions; new ones come before all."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    new, repeats = len(sizes) - x.dim(), function is Tensor.repeat
    place, keeps = x.place + new, (1,) if repeats else (-1, x.shape[x.place])
    if new < 0 or sizes[place] not in keeps:
        raise refuse_moved(function, x)
    of = x.of.reshape(x.of.shape[0], *[1] * new, *x.of.shape[1:])
    sizes = (keeps[0], *sizes[:place], *sizes[place + 1 :])
    return MovedRows.make(of.repeat(sizes) if repeats else of.expand(sizes), place)


HANDLERS.update(dict.fromkeys(named("squeeze"), _squeeze))
HANDLERS.update(dict.fromkeys(named("view", "reshape"), _reshape))
HANDLERS.update(dict.fromkeys(named("flatten"), _flatten))
HANDLERS.update(dict.fromkeys(named("expand", "repeat"), _expand))


class _Term(NamedTuple):
    """An operand of ``einsum`` and its letters."""

    operand: Any  # the tensor
    letters: str  # of its dimensions
    rows: str  # the letter of its rows; ``""`` for a plain tensor

    @staticmethod
    def of(operand: object, letters: str) -> _Term:
        place = operand.place if type(operand) is MovedRows else 0
        has_rows = isinstance(operand, (RowTensor, MovedRows))
        return _Term(operand, letters, letters[place] if has_rows else "")

    def with_first(self, rows: str) -> _Term:
        """The same with the dimension of this letter first, if it has one."""
        place = self.letters.find(rows)
        if place <= 0:
            return self
        letters = rows + self.letters.replace(rows, "")
        is_moved = type(self.operand) is MovedRows and self.rows == rows
        return _Term(self.operand.of if is_moved else self.operand.movedim(place, 0), letters, self.rows)

    def gathered(self) -> _Term:
        """The whole tensor (collective)."""
        return _Term(self.operand.full_tensor(), self.letters, "")


def _product(function: Function, terms: list[_Term], output: str) -> object:
    """The sum of products that an equation stands for, with the rows of the result where ``output`` has their letter.

    Rows stay those of a letter in the result, or else of the first operand with rows; operands with rows of another
    letter are gathered (collective).
    """
    sizes: dict[str, int] = {}
    for term in terms:
        for letter, size in zip(term.letters, term.operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                shapes = " and ".join(str(list(t.operand.shape)) for t in terms)
                raise LayoutMismatchError(f"{public_name(function)} got shapes that do not fit ({shapes}): reshape one")
    letters = [term.rows for term in terms if term.rows]
    rows = next((letter for letter in letters if letter in output), letters[0])
    terms = [term if term.rows in ("", rows) else term.gathered() for term in terms]
    terms = [term.with_first(rows) for term in terms]
    place = output.find(rows)
    result = output if place < 0 else rows + output.replace(rows, "")
    equation = f"{','.join(term.letters for term in terms)}->{result}"
    out = torch.einsum(equation, *(term.operand for term in terms))
    return out if place < 0 else MovedRows.make(out, place)


def _matmul(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``x @ other`` of any dimensions, of which one at least has its rows moved."""
    x, other = (*args, *kwargs.values())
    if function is Tensor.__rmatmul__:
        x, other = other, x
    is_map = type(x) is MovedRows and not isinstance(other, (RowTensor, MovedRows)) and other.dim() == 2
    if is_map and x.place < x.dim() - 1:
        return on_last(torch.matmul, (x, other), {})
    left, right = "ik" if x.dim() > 1 else "k", "kj" if other.dim() > 1 else "k"
    num_batch = max(x.dim(), other.dim(), 2) - 2
    shared, own = ascii_letters[26 : 26 + num_batch], iter(ascii_letters[26 + num_batch :])
    sizes = [[1] * (num_batch - max(t.dim() - 2, 0)) + list(t.shape[:-2]) for t in (x, other)]
    terms = []
    for operand, its, others, inner in ((x, *sizes, left), (other, *sizes[::-1], right)):
        # What is broadcast has a letter of its own, over which the sum has one term.
        batch = [next(own) if i == 1 < o else b for i, o, b in zip(its, others, shared, strict=True)]
        terms.append(_Term.of(operand, "".join(batch[num_batch - max(operand.dim() - 2, 0) :]) + inner))
    return _product(function, terms, shared + left.replace("k", "") + right.replace("k", ""))


def _einsum(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Any equation with an arrow; three dots stand for the dimensions that an operand has beside its letters."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    letters = inputs.split(",")
    if not arrow or len(letters) != len(operands):
        raise refuse_moved(function, moved_in(operands)[0])
    free = "".join(letter for letter in ascii_letters if letter not in equation)
    beside = [t.dim() - len(own.replace("...", "")) for t, own in zip(operands, letters, strict=True)]
    dots = free[: max((n for n, own in zip(beside, letters, strict=True) if "..." in own), default=0)]
    spelt = [own.replace("...", dots[len(dots) - n :]) for n, own in zip(beside, letters, strict=True)]
    terms = [_Term.of(operand, own) for operand, own in zip(operands, spelt, strict=True)]
    return _product(function, terms, output.replace("...", dots))


HANDLERS.update(dict.fromkeys(named("matmul", "mm", "mv", "bmm", "__matmul__", "__rmatmul__"), _matmul))
HANDLERS.update(dict.fromkeys(named("einsum"), _einsum))
