"""Matrix and tensor products: row by row, or summed over the rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.functions.layers import sparse_rows, with_parameters
from pyg_dist.tensor.functions.pointwise import pointwise
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.functions.shapes import dims_of, refuse
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, copied_slice, like_rows, local_tensors


@implements("matmul", "mm", "mv", "bmm", "__matmul__", "__rmatmul__")
def matmul(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``rows @ plain matrix``, a product of two matrices per row, or ``(x @ y.T) @ z``, which gathers z's (collective).

    Whatever else would mix rows.
    """
    x, other = (*args, *kwargs.values())
    if function is Tensor.__rmatmul__:
        function, x, other = torch.matmul, other, x
    if x.dim() == other.dim() > 2:
        return pointwise(function, (x, other), {})
    if isinstance(x, RowTensor) and not isinstance(other, RowTensor) and x.dim() > 1 and other.dim() < max(x.dim(), 3):
        return with_parameters(function, (x, other), {}, run=partial(_times, function))
    if isinstance(x, RowTensor) and isinstance(other, RowTensor) and x.dim() == 2 and x.shape[1] == other.shape[0]:
        return torch.matmul(x, other.full_tensor())  # a row of `x` has a column for each row of `other`
    raise MixedRowsError(
        f"{public_name(function)} of row tensors is row-wise only as rows @ plain matrix: for a product over rows use "
        f"x.T @ y, for all pairs x @ y.T, for neighbours data.adj_t @ x, else .full_tensor()"
    )


def _times(function: Function, x: RowTensor, other: Tensor) -> Tensor:
    """The product of this rank's rows."""
    matrix = sparse_rows(x, other) if x.shape[-1] == other.shape[0] else None
    product: Tensor = function(x, other) if matrix is None else matrix.product(other)
    return product


@implements("addmm")
def addmm(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``beta x + alpha rows @ plain matrix``."""
    bound = {"beta": 1, "alpha": 1, **bind("x mat1 mat2", args, kwargs)}
    product = bound["mat1"] @ bound["mat2"]
    product = product if bound["alpha"] == 1 else bound["alpha"] * product
    return product if bound["beta"] == 0 else bound["beta"] * bound["x"] + product  # as torch, without 0 x


@implements("dot", "vdot", "inner")
def dot(function: Function, args: Args, kwargs: Kwargs) -> object:
    """The sum over rows of one-dimensional products (collective)."""
    x, other = (*args, *kwargs.values())
    if x.dim() != 1 or other.dim() != 1:
        raise MixedRowsError(
            f"{public_name(function)} of row tensors expected one dimension (got {x.dim()}): use torch.einsum"
        )
    return (x * other).sum()


@implements("cross")
def cross(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Of the three columns of each row."""
    bound = bind("x other dim", args, kwargs)
    x, other, dim = bound["x"], bound["other"], bound.get("dim")
    if dim is None and function is not torch.linalg.cross:
        raise MixedRowsError(f"{public_name(function)} without 'dim' may take the rows for vectors: pass dim=-1")
    dim = -1 if dim is None else dim
    if 0 in (*dims_of(dim, x.dim()), *dims_of(dim, other.dim())):
        raise refuse(function, f"along {dim} would mix rows")
    return pointwise(torch.linalg.cross, (x, other), {"dim": dim})


@implements("dist")
def dist(function: Function, args: Args, kwargs: Kwargs) -> object:
    """The p-norm of the difference of all elements (collective)."""
    x, other, *order = (*args, *kwargs.values())
    return torch.linalg.vector_norm(x - other, *order)


@implements("diag", "diagonal", "trace")
def diagonal(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Of a square matrix, such as ``x @ y.T``: an element of each row; ``trace`` sums them (collective)."""
    x = args[0]
    if len(args) + len(kwargs) > 1 or x.dim() != 2 or x.shape[0] != x.shape[1]:
        raise refuse(function, f"of shape {list(x.shape)} or with options would mix rows")
    with local_tensors():
        place = on_device(x._sharding.position, x.device).view(-1, 1)
        elements = as_row_tensor_(x.as_subclass(Tensor).gather(1, place).view(-1), x._sharding)
    return elements.sum() if function.__name__ == "trace" else copied_slice(elements)


@implements("einsum", namespaces=(torch,))
def einsum(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Row-wise where the result has the rows' letter first, a sum over rows where it does not have it (collective).

    The rows' letter is the first one of each operand with rows. Plain operands may have it too, first.
    """
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    terms = inputs.split(",")
    pairs = list(zip(terms, operands, strict=True)) if len(terms) == len(operands) else []
    letters = {term[:1] for term, operand in pairs if isinstance(operand, RowTensor)}
    letter = letters.pop() if len(letters) == 1 else "."
    if not letter.isalpha() or "->" not in equation or any(letter in term[1:] for term in (*terms, output)):
        raise MixedRowsError(
            f"torch.einsum of row tensors expected an equation like 'nf,ng->fg' or 'nf,fg->ng', with the rows' letter "
            f"first wherever it stands (got {equation!r}): use .full_tensor()"
        )
    with local_tensors():
        like, rows = like_rows(function, *operands)
        operands = list(like)
        for k, (term, operand) in enumerate(pairs):
            if not isinstance(operand, RowTensor):
                if term[:1] == letter and operand.shape[0] != rows.size:
                    raise LayoutMismatchError(
                        f"torch.einsum expected operand {k} to have {rows.size} rows (got shape {list(operand.shape)})"
                    )
                operands[k] = rows.slice(operand) if term[:1] == letter else rows.copy_to_ranks(operand)
        out = function(equation, *operands)
        return (
            as_row_tensor_(out, rows)
            if output[:1] == letter
            else rows.reduce_from_ranks(out.to(accumulation_dtype(out.dtype))).to(out.dtype)
        )
