"""Matrix and tensor products, ``torch.spmm`` and ``torch.sparse.mm`` too: row by row, or summed over the rows.

``x.T @ y`` and ``k.transpose(-2, -1) @ v`` sum over rows and give plain matrices; ``x @ y.T`` and what is multiplied by
it, as attention is written out, have a row for each row of x and gather those of y (collective).
"""

from __future__ import annotations

from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.functions.layers import linear_over_rows, sparse_rows, with_parameters
from pyg_dist.tensor.functions.moved_rows import MOVED, MovedRows, on_last, refuse_moved, rows_and_place
from pyg_dist.tensor.functions.pointwise import pointwise
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.operands import like_rows
from pyg_dist.tensor.registry import TABLE, Function, dims_of, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, copied_slice, local_tensors

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

_MATMUL = ("matmul", "mm", "mv", "spmm", "bmm", "__matmul__", "__rmatmul__")


def matrix_of_edges(matrix: Any, rows: Any) -> Any:
    """A plain sparse matrix as an ``adj_t`` over the nodes of ``rows``: :mod:`pyg_dist.graph.adjacency` sets it."""
    return None


@implements(*_MATMUL)
def matmul(function: Function, *args: Tensor, **kwargs: Tensor) -> object:
    """Products row by row, or sums over rows (collective); others, which would mix rows, are refused.

    ``rows @ plain matrix`` and a product of two matrices per row give rows; so does ``(x @ y.T) @ z``, which gathers z.
    ``plain @ rows`` gives rows, as of neighbours, where the plain matrix is square, else a sum over rows, as does
    ``v @ x`` with a number for each row.
    """
    x, other, *reduce = (*args, *kwargs.values())
    if reduce not in ([], ["sum"]):
        raise MixedRowsError(
            f"torch.sparse.mm with rows expected the sum (got {reduce[0]!r}): use a conv with this aggr"
        )
    if function is Tensor.__rmatmul__:
        function, x, other = torch.matmul, other, x
    if x.dim() == other.dim() > 2:
        return pointwise(function, x, other)
    if x.dim() == 1 and other.dim() < 3 and x.shape == other.shape[:1]:
        return torch.einsum("n,n->" if other.dim() == 1 else "n,nc->c", x, other)
    if isinstance(x, RowTensor) and not isinstance(other, RowTensor) and x.dim() > 1 and other.dim() < max(x.dim(), 3):
        return with_parameters(run=partial(_times, function))(function, x, other)
    is_square = x.dim() == 2 and x.shape[0] == x.shape[1]
    adjacency = matrix_of_edges(x, other) if is_square and not isinstance(x, RowTensor) else None
    if adjacency is not None:
        return adjacency @ other
    if x.dim() != 2 or other.dim() not in (1, 2) or x.shape[1] != other.shape[0]:
        raise LayoutMismatchError(
            f"{public_name(function)} of rows expected two matrices or vectors whose shapes fit (got {list(x.shape)} "
            f"and {list(other.shape)}): for a product over rows write x.T @ y, for all pairs x @ y.T"
        )
    rows_of: Any = other
    if isinstance(x, RowTensor) or x.layout != torch.strided:
        return torch.matmul(x, rows_of.full_tensor())  # a row of `x` has a column for each row of `other`
    if is_square:
        rows = rows_of.to_rows()._sharding
        return torch.matmul(RowTensor.from_local(rows.slice(x), rows), other)
    return torch.einsum("nm,n->m" if other.dim() == 1 else "nm,nf->mf", x.t(), other)


TABLE[torch.sparse.mm] = matmul


def _times(function: Function, x: RowTensor, other: Tensor) -> Tensor:
    matrix = sparse_rows(x, other) if x.shape[-1] == other.shape[0] else None
    product: Tensor = function(x, other) if matrix is None else apply(matrix, other)
    return product


@implements("addmm")
def addmm(function: Function, x: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta x + alpha rows @ plain matrix``."""
    product = mat1 @ mat2
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else beta * x + product  # as torch, without 0 x


@implements("dot", "vdot", "inner")
def dot(function: Function, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """The sum over rows of one-dimensional products (collective)."""
    x, other = (*args, *kwargs.values())
    if x.dim() != 1 or other.dim() != 1:
        raise MixedRowsError(
            f"{public_name(function)} of row tensors expected one dimension (got {x.dim()}): use torch.einsum"
        )
    return (x * other).sum()


@implements("cross")
def cross(function: Function, x: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Cross products over the three columns of each row."""
    if dim is None and function is not torch.linalg.cross:
        raise MixedRowsError(f"{public_name(function)} without 'dim' may take the rows for vectors: pass dim=-1")
    dim = -1 if dim is None else dim
    if 0 in (*dims_of(dim, x.dim()), *dims_of(dim, other.dim())):
        raise refuse(function, f"along {dim} would mix rows")
    return pointwise(torch.linalg.cross, x, other, dim=dim)


@implements("dist")
def dist(function: Function, x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """The p-norm of the difference of all elements (collective)."""
    distance: Tensor = torch.linalg.vector_norm(x - other, p)
    return distance


@implements("diag", "diagonal", "trace")
def diagonal(function: Function, x: RowTensor, *options: object, **named: object) -> Tensor:
    """Diagonal of a square matrix, such as ``x @ y.T``: an element of each row; ``trace`` is their sum (collective)."""
    if options or named or x.dim() != 2 or x.shape[0] != x.shape[1]:
        raise refuse(function, f"of shape {list(x.shape)} or with options would mix rows")
    with local_tensors():
        place = on_device(x._sharding.position, x.device).view(-1, 1)
        elements = as_row_tensor_(x.as_subclass(Tensor).gather(1, place).view(-1), x._sharding)
    return elements.sum() if function.__name__ == "trace" else copied_slice(elements)


@implements("fill_diagonal_")
def fill_diagonal(function: Function, x: RowTensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Fill the element of each row at the row's own number; ``wrap``: a tall matrix begins anew, as torch has it."""
    if x.dim() != 2:
        raise refuse(function, f"of shape {list(x.shape)} would mix rows")
    rows, width = x._sharding, x.shape[1]
    with local_tensors():
        place = on_device(rows.position, x.device).view(-1, 1)
        column = torch.arange(x.shape[1], device=x.device) + rows.first_column
        return x.masked_fill_((place % (width + 1) if wrap else place) == column, fill_value)


def _terms(equation: str, operands: tuple[object, ...]) -> tuple[list[str], str | None, list[Tensor]]:
    """The letters of each operand, those of the result, ``None`` without an arrow, and the operands of ``einsum``."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    return inputs.split(","), output if arrow else None, list(given)


@implements("einsum", namespaces=(torch,))
def einsum(function: Function, equation: str, *given: object) -> object:
    """Row by row where the result has the rows' letter first; a sum over rows where it lacks it (collective).

    Rows of a second letter are gathered. Plain operands may have the rows' letter, too.
    """
    terms, output, operands = _terms(equation, given)
    letters = {term[:1] for term, operand in zip(terms, operands, strict=False) if isinstance(operand, RowTensor)}
    letter = letters.pop() if len(letters) == 1 else "."
    if (
        len(terms) != len(operands)
        or output is None
        or not letter.isalpha()
        or any(letter in term[1:] for term in (*terms, output))
    ):
        return _of_any_letters(function, equation, *given)
    with local_tensors():
        like, rows = like_rows(function, *operands)
        local = list(like)
        for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
            if not isinstance(operand, RowTensor):
                if term[:1] == letter and operand.shape[0] != rows.size:
                    raise LayoutMismatchError(
                        f"torch.einsum expected operand {k} to have {rows.size} rows (got shape {list(operand.shape)})"
                    )
                local[k] = rows.slice(operand) if term[:1] == letter else rows.copy_to_ranks(operand)
        out: Tensor = function(equation, *local)
        if output[:1] == letter:
            return as_row_tensor_(out, rows)
        return rows.reduce_from_ranks(out.to(accumulation_dtype(out.dtype))).to(out.dtype)


class _Term(NamedTuple):
    operand: Tensor
    letters: str  # of its dimensions
    rows: str  # the letter of its rows; ``""`` for a plain tensor

    @staticmethod
    def of(operand: Tensor, letters: str) -> _Term:
        has_rows = isinstance(operand, (RowTensor, MovedRows))
        return _Term(operand, letters, letters[rows_and_place(operand)[1]] if has_rows else "")

    def with_first(self, rows: str) -> _Term:
        """The same with the dimension of this letter first, if it has one."""
        place = self.letters.find(rows)
        if place <= 0:
            return self
        is_moved = isinstance(self.operand, MovedRows) and self.rows == rows
        first = rows_and_place(self.operand)[0] if is_moved else self.operand.movedim(place, 0)
        return _Term(first, rows + self.letters.replace(rows, ""), self.rows)

    def gathered(self) -> _Term:
        of, place = rows_and_place(self.operand)
        return _Term(of.full_tensor().movedim(0, place), self.letters, "")


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


@MOVED.implements(*_MATMUL)
def _matmul_of_moved(function: Function, *args: Any, **kwargs: Any) -> object:
    """``x @ other`` of any dimensions, of which one at least has its rows moved."""
    x, other = (*args, *kwargs.values())
    if function is Tensor.__rmatmul__:
        x, other = other, x
    if type(x) is MovedRows and x.dim() == 2 and x.place == 1 and getattr(other, "layout", None) in _SPARSE:
        return (other.t() @ x.of).t()
    is_map = type(x) is MovedRows and not isinstance(other, (RowTensor, MovedRows)) and other.dim() == 2
    if is_map and x.place < x.dim() - 1:
        return on_last(torch.matmul, x, other)
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


@MOVED.implements("linear")
def _linear_of_moved(function: Function, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Row by row, or where the rows are the last dimension, ``nn.Linear(N, channels)(x.T)``, a sum over rows."""
    if type(x) is not MovedRows or x.place < x.dim() - 1:
        return on_last(function, x, weight, bias)
    return linear_over_rows(x, weight, bias)


@MOVED.implements("cov", "corrcoef")
def _covariance_of_moved(function: Function, x: MovedRows, *, correction: int = 1, **weights: object) -> Tensor:
    """The covariance of columns of rows, ``torch.cov(x.T)``: a plain matrix, of one column a number (collective)."""
    if x.dim() != 2 or any(weight is not None for weight in weights.values()):
        raise refuse_moved(function, x)
    of = x.of if x.dtype.is_floating_point else x.of.to(torch.get_default_dtype())
    centered = of - of.mean(0)
    products = centered.T @ centered
    if function.__name__ == "corrcoef":
        scale = products.diagonal().sqrt()
        return (products / scale.view(-1, 1) / scale).clamp(-1, 1).squeeze()
    return (products / max(len(of) - correction, 0)).squeeze()


@MOVED.implements("baddbmm")
def _baddbmm_of_moved(function: Function, x: Tensor, batch1: Tensor, batch2: Tensor) -> Tensor:
    """``x + batch1 @ batch2``, without factors."""
    return torch.bmm(batch1, batch2) + x


@MOVED.implements("einsum")
def _of_any_letters(function: Function, equation: str, *given: object) -> object:
    """Rows in any place; three dots stand for the dimensions that an operand has beside its letters."""
    letters, output, operands = _terms(equation, given)
    once = [len(set(own)) == len(own) for own in (term.replace("...", "") for term in letters)]
    if len(letters) != len(operands) or not all(once):
        raise MixedRowsError(
            f"torch.einsum of row tensors expected a term for each operand, and a letter for each of its dimensions "
            f"(got {equation!r}): use .full_tensor()"
        )
    free = "".join(letter for letter in ascii_letters if letter not in equation)
    beside = [t.dim() - len(own.replace("...", "")) for t, own in zip(operands, letters, strict=True)]
    dots = free[: max((n for n, own in zip(beside, letters, strict=True) if "..." in own), default=0)]
    spelt = [own.replace("...", dots[len(dots) - n :]) for n, own in zip(beside, letters, strict=True)]
    if output is None:  # as torch: the letters that stand once, in order, behind the dots
        given_once = sorted(letter for letter in set(equation) if letter.isalpha() and equation.count(letter) == 1)
        output = "..." + "".join(given_once)
    terms = [_Term.of(operand, own) for operand, own in zip(operands, spelt, strict=True)]
    return _product(function, terms, output.replace("...", dots))
