"""Functions of layers: rows and plain parameters, on the local rows; batch norm with the statistics of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.autograd.replicated import copy_to_ranks, reduce_from_ranks
from pyg_dist.backend.dense import large_tensors
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.tensor.calling_code import running_layer
from pyg_dist.tensor.functions.moved_rows import MOVED, MovedRows, implements_anywhere, moved_in, refuse_moved
from pyg_dist.tensor.functions.pointwise import aligned
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.operands import like_rows, on_rows
from pyg_dist.tensor.registry import Function, bind, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors, version_of


def with_parameters(num_operands: int = 1, run: Function | None = None) -> Callable[..., Tensor]:
    """The handler of functions of rows and parameters: the first ``num_operands`` tensors have rows, no other has.

    ``run`` is called in place of the function, which messages name.
    """

    def handler(function: Function, *args: object, **kwargs: object) -> Tensor:
        parameters = (*args[num_operands:], *kwargs.values())
        if not args or not isinstance(args[0], RowTensor) or any(isinstance(p, RowTensor) for p in parameters):
            raise MixedRowsError(
                f"{public_name(function)} is row-wise only for distributed rows and plain parameters: "
                f"use .full_tensor() on the parameters"
            )
        with local_tensors():
            operands, _, rows = aligned(function, args[:num_operands], {}, broadcasts=False)
            entered = [rows.copy_to_ranks(p) if isinstance(p, Tensor) else p for p in args[num_operands:]]
            named = {name: rows.copy_to_ranks(p) if isinstance(p, Tensor) else p for name, p in kwargs.items()}
            out: Tensor = (run or function)(*operands, *entered, **named)
            return as_row_tensor_(out, rows)

    return handler


of_each_row = with_parameters()
implements("prelu", "isin", "bucketize")(of_each_row)  # slopes, or a plain set or list


@implements("searchsorted")
def searchsorted(
    function: Function, sorted_sequence: Tensor, input: Tensor, *, right: bool = False, side: str = "", **options: Any
) -> object:
    """Places of rows in one plain sequence, as ``bucketize`` has them."""
    if isinstance(sorted_sequence, RowTensor) or sorted_sequence.dim() > 1 or options.get("sorter") is not None:
        raise refuse(function, "in several sequences, or with a 'sorter', would mix rows")
    options.pop("sorter", None)
    places: object = torch.bucketize(input, sorted_sequence, right=right or side == "right", **options)
    return places


@implements("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "bilinear")
def of_pairs_of_rows(function: Function, *args: Any, **kwargs: object) -> Tensor:
    """Functions of an input's row and a state's, or another input's; torch takes one dimension for a single vector."""
    if args and args[0].dim() < 2:
        raise MixedRowsError(
            f"{public_name(function)} expected rows [N, F] (got {list(args[0].shape)}): use .view(-1, 1)"
        )
    return with_parameters(num_operands=2)(function, *args, **kwargs)


@implements("linear")
def linear(function: Function, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One operand with rows. The number of columns is checked here, since torch's error would name the local shape."""
    if not isinstance(input, RowTensor) or isinstance(weight, RowTensor) or isinstance(bias, RowTensor):
        return of_each_row(function, input, weight, bias)  # which refuses
    if input.dim() == 1:
        return linear_over_rows(input, weight, bias)
    return as_row_tensor_(local_linear(input, weight, bias), input._sharding)


def linear_over_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Where the rows are the last dimension, as in ``nn.Linear(N, channels)(x.T)``: a plain sum over them (collective).

    Its bias has the dtype of the products, which autocast may have narrowed.
    """
    out: Tensor = x @ weight.t()
    return out if bias is None else out + bias.to(out.dtype)


def local_linear(x: RowTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear map of this rank's rows."""
    with local_tensors():
        rows = x._sharding
        if x.shape[-1] != weight.shape[-1]:
            shape = rows.global_shape(x.shape)
            raise DataError(
                f"linear expected rows with {weight.shape[-1]} columns, got shape {list(shape)}: make "
                f"the layer with in_channels={shape[-1]}{running_layer()}"
            )
        return product(x, rows.copy_to_ranks(weight), None if bias is None else rows.copy_to_ranks(bias))


def product(x: RowTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of this rank's piece of x and parameters that have entered; under :data:`local_tensors`.

    Of constant rows that are mostly zeros, the other elements alone are multiplied.
    """
    matrix = sparse_rows(x, weight)
    if matrix is None:
        return large_tensors.linear(x.as_subclass(Tensor), weight, bias)
    out = apply(matrix, weight.t())
    return out if bias is None else large_tensors.add_into_(out, bias)


def sparse_rows(x: RowTensor, weight: Tensor) -> Matrix | None:
    """This rank's constant rows as a sparse matrix for a product with ``W``; ``None`` unless most elements are zero."""
    form = x._sparse_form
    if form is None:
        return None
    with local_tensors():
        is_usual = weight.dim() == 2 and weight.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)
        if not is_usual or large_tensors.is_transformed() or torch._C._get_tracing_state() is not None:
            return None
        return form.matrix(x.as_subclass(Tensor), version_of(x))


@implements("relu")
def relu(function: Function, *args: object, **kwargs: object) -> Tensor:
    """Element by element."""
    return on_rows(large_tensors.relu, *args, **kwargs)


@implements("group_norm")
def group_norm(function: Function, x: Tensor, num_groups: int, *args: object, **kwargs: object) -> Tensor:
    """Row by row. ``F.group_norm`` requires several values per channel over all rows, not over the local ones."""
    if isinstance(x, RowTensor) and x.numel() == num_groups:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    return with_parameters(run=torch.group_norm)(function, x, num_groups, *args, **kwargs)


@implements("conv1d", "conv2d")
def convolution(function: Function, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """A signal, or an image, for each row."""
    num_dims = 3 if "1d" in function.__name__ else 4
    if x.dim() != num_dims:
        raise MixedRowsError(
            f"{public_name(function)} is row-wise only for [N, C, ...] of {num_dims} dimensions (got {list(x.shape)}): "
            f"use .unsqueeze(1)"
        )
    return of_each_row(function, x, *args, **kwargs)


@implements("layer_norm", "rms_norm")
def norm_of_each_row(
    function: Function, x: Tensor, normalized_shape: Sequence[int], *args: object, **kwargs: object
) -> Tensor:
    """The normalised dimensions must not be all of them."""
    if len(normalized_shape) >= x.dim():
        raise MixedRowsError(f"{public_name(function)} over all dimensions would mix rows: normalise x.shape[1:]")
    run = large_tensors.layer_norm if function.__name__ == "layer_norm" else None
    return with_parameters(run=run)(function, x, normalized_shape, *args, **kwargs)


@implements_anywhere("lstm", "gru", "rnn_tanh", "rnn_relu")
def sequences(
    function: Function, x: Any, states: object, weights: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, training: bool, bidirectional: bool, *batch_first: bool,
) -> object:  # fmt: skip
    """One sequence per row, from a state for each, plain or with rows; last states have rows second."""
    rows_are_second = isinstance(x, MovedRows) and x.place == 1 and batch_first == (False,)
    if rows_are_second:
        x = x.of
    is_sequence = isinstance(x, RowTensor) and x.dim() == 3 and (rows_are_second or batch_first == (True,))
    states = states if isinstance(states, (tuple, list)) else (states,)
    if not is_sequence or not all(_is_state(state, x.shape[0]) for state in states):
        raise MixedRowsError(
            f"{public_name(function)} is row-wise only for one sequence per row, [N, L, F] with batch_first=True or "
            f"[L, N, F] without, and no initial state, or one for each row, [layers, N, H]"
        )
    if dropout and training and num_layers > 1:
        raise MixedRowsError(f"{public_name(function)} draws dropout for all rows: pass dropout=0, and use F.dropout")
    with local_tensors():
        rows = x._sharding
        given, rows = like_rows(function, x, *(s.of for s in states if isinstance(s, MovedRows)))
        local = iter(given[1:])
        first = tuple(
            next(local).as_subclass(Tensor).transpose(0, 1).contiguous()
            if isinstance(s, MovedRows)
            else rows.slice(s.transpose(0, 1)).transpose(0, 1).contiguous()
            if s.requires_grad or bool(s.any())
            else s.new_zeros(s.shape[0], rows.num_local, s.shape[2])
            for s in states
        )
        entered = [rows.copy_to_ranks(w) for w in weights]
        rest = (has_biases, num_layers, dropout, training, bidirectional, True)
        out, *last = function(x, first if len(first) > 1 else first[0], entered, *rest)
        of = [as_row_tensor_(state.transpose(0, 1).contiguous(), rows) for state in last]
        out = as_row_tensor_(out, rows)
        return (MovedRows.make(out, 1) if rows_are_second else out, *(MovedRows.make(state, 1) for state in of))


def _is_state(state: Any, num_rows: int) -> bool:
    """Whether a recurrent layer may start from it: a state for each row, in dimension 1."""
    has_rows_elsewhere = isinstance(state, RowTensor) or (isinstance(state, MovedRows) and state.place != 1)
    return not has_rows_elsewhere and state.dim() == 3 and state.shape[1] == num_rows


@implements("cdist")
def cdist(function: Function, x1: Tensor, x2: Tensor, *args: object, **kwargs: object) -> Tensor:
    """The distance to each row of a plain matrix, or of a matrix for each row of both.

    Distances of all pairs of rows have a row for each row of ``x1`` and gather those of ``x2`` (collective).
    """
    if x1.dim() != x2.dim():
        raise MixedRowsError(
            f"{public_name(function)} expected two matrices, or one for each row of both (got shapes {list(x1.shape)} "
            f"and {list(x2.shape)}): others would move rows"
        )
    if x1.dim() == 2 and isinstance(x1, RowTensor) and isinstance(x2, RowTensor):
        x2 = x2.full_tensor()
    if x1.dim() == 2 and function is torch.cdist and len(args) < 2 and "compute_mode" not in kwargs:
        uses = "use" if max(x1.shape[0], x2.shape[0]) > 25 else "donot_use"  # as torch, by the number of all rows
        kwargs["compute_mode"] = f"{uses}_mm_for_euclid_dist"
    return with_parameters(num_operands=2 if x1.dim() > 2 else 1)(function, x1, x2, *args, **kwargs)


@implements("embedding", namespaces=(F,))
def embedding(
    function: Function, x: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Row-wise for distributed indices into a plain table."""
    looks = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    for name, value in looks.items():  # they look at all indices, or change the table
        if value:
            raise MixedRowsError(f"F.embedding with {name} needs the indices of all rows: use .full_tensor()")
    return of_each_row(function, x, weight, padding_idx)


@implements("batch_norm", namespaces=(F,))
def batch_norm(
    function: Function, x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per channel (dimension 1).

    In training, mean and variance are global and differentiable, and the running ones follow them as in torch
    (collective); in evaluation the running ones are used (no communication).
    """
    if not isinstance(x, RowTensor):
        raise _refuse_channels(function)
    _require_plain(function, running_mean, running_var, weight, bias)
    rows = x._sharding
    with local_tensors():
        if (training and rows.group.size > 1) or rows.split_rows is not None:
            out = _normalise(x, running_mean, running_var, weight, bias, training, momentum, eps)
            return as_row_tensor_(out, rows)
        weight, bias = (None if t is None else rows.copy_to_ranks(t) for t in (weight, bias))
        for running in (running_mean, running_var):
            if running is not None:
                rows.note(running)
        return as_row_tensor_(function(x, running_mean, running_var, weight, bias, training, momentum, eps), rows)


def _require_plain(function: Function, *channels: Tensor | None) -> None:
    if any(isinstance(c, (RowTensor, MovedRows)) for c in channels):
        raise _refuse_channels(function)


def _refuse_channels(function: Function) -> MixedRowsError:
    return MixedRowsError(f"{public_name(function)} expects distributed rows and one plain value per channel")


def _normalise(
    x: RowTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Rows or columns on several ranks, to be called under :data:`local_tensors`."""
    rows, dims, shape = x._sharding, (0, *range(2, x.dim())), (1, -1, *[1] * (x.dim() - 2))
    # All four, and before the sums: where one does not fit, no rank may go on.
    given = (running_mean, running_var, weight, bias)
    mean, var, weight, bias = (None if t is None else rows.slice_columns(t) for t in given)
    local, group, number = x.to(accumulation_dtype(x.dtype)), rows.row_group, rows.size * math.prod(x.shape[2:])
    if training:
        if number <= 1:
            raise DataError(f"Expected more than 1 value per channel when training (got {rows}): use .eval()")
        mean = reduce_from_ranks(local.sum(dims), group) / number
        centred = local - copy_to_ranks(mean, group).view(shape)
        var = reduce_from_ranks(centred.square().sum(dims), group) / number
        if running_mean is not None or running_var is not None:
            with torch.no_grad():
                of_batch = rows.gather_columns(torch.stack([mean, var * (number / (number - 1))]))
                for running, batch in zip((running_mean, running_var), of_batch, strict=True):
                    if running is not None:
                        running.lerp_(batch.to(running.dtype), momentum)
    else:
        if mean is None or var is None:
            raise DataError("Expected running_mean and running_var in evaluation (got None): use training=True")
        centred, var = local - mean.to(local.dtype).view(shape), var.to(local.dtype)
    out = centred * copy_to_ranks(torch.rsqrt(var + eps), group).view(shape)
    out = out if weight is None else out * weight.view(shape)
    out = out if bias is None else out + bias.view(shape)
    return out.to(x.dtype).as_subclass(Tensor)


@MOVED.implements("conv2d")
def _conv2d_of_moved(function: Function, x: object, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``[B, C, T, N]`` and ``[B, C, N, T]`` along time: a kernel of size one along the nodes."""
    bound = bind(function, "bias stride padding dilation groups", args, kwargs)
    if type(x) is not MovedRows or x.place < 2 or x.dim() != 4:
        raise refuse_moved(function, moved_in((x, weight))[0])
    rest: dict[str, Any] = {}
    for name, neutral in (("stride", 1), ("padding", 0), ("dilation", 1)):
        given = bound.pop(name, neutral)
        by_dim = (given, given) if isinstance(given, (int, str)) else tuple(given) * (2 // len(given))
        if name != "dilation" and by_dim[x.place - 2] not in (neutral, "valid"):
            raise MixedRowsError(
                f"A convolution has no distributed form with {name}={by_dim[x.place - 2]} along rows, in dimension "
                f"{x.place} (of shape {list(x.shape)}): leave it out, or take x.full_tensor(), all rows"
            )
        rest[name] = by_dim[3 - x.place]
    if weight.shape[x.place] != 1:
        raise refuse_moved(function, x)
    size, batch = x.of.shape[:2]
    out = F.conv1d(x.of.flatten(0, 1), weight.squeeze(x.place), **bound, **rest)
    return MovedRows.make(out.view(size, batch, *out.shape[1:]), x.place)


@MOVED.implements("conv1d")
def _conv1d_of_moved(function: Function, x: object, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``[B, C, N]``: a kernel of size one along the nodes, as of an image one pixel wide."""
    if type(x) is not MovedRows or (x.dim(), x.place) != (3, 2) or weight.shape[2] != 1:
        raise refuse_moved(function, moved_in((x, weight))[0])
    options: dict[str, Any] = bind(function, "bias stride padding dilation groups", args, kwargs)
    for name in ("stride", "padding", "dilation"):
        if not isinstance(given := options.get(name, "valid"), str):
            options[name] = (*([given] if isinstance(given, int) else given), int(name != "padding"))
    return F.conv2d(x.unsqueeze(3), weight.unsqueeze(3), **options).squeeze(3)


@MOVED.implements("prelu")
def _prelu_of_moved(function: Function, x: object, weight: Tensor) -> Tensor:
    """One slope, or one for each channel of ``[B, C, N]``."""
    if type(x) is not MovedRows or (weight.numel() > 1 and x.place == 1):
        raise refuse_moved(function, moved_in((x, weight))[0])
    channels = 1 if weight.numel() == 1 else 2  # of the tensor with rows first
    return MovedRows.make(F.prelu(x.of.movedim(channels, 1), weight).movedim(1, channels), x.place)


@MOVED.implements("batch_norm", namespaces=(F,))
def _batch_norm_of_moved(
    function: Function, x: object, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """:func:`batch_norm` of ``[B, F, N]`` and the like; in ``[B, N, ...]`` each node has statistics of its own."""
    if type(x) is not MovedRows:
        raise _refuse_channels(function)
    _require_plain(function, running_mean, running_var, weight, bias)
    if x.place != 1:
        out: Tensor = function(x.of.movedim(2, 1), running_mean, running_var, weight, bias, training, momentum, eps)
        return MovedRows.make(out.movedim(1, 2), x.place)
    if training:
        F._verify_batch_size([*x.shape])  # type: ignore[attr-defined]
    rows: Any = x.of
    dims, shape = tuple(range(1, x.dim())), (-1, *[1] * (x.dim() - 1))
    if training or running_mean is None or running_var is None:
        centre, spread = rows.mean(dims, keepdim=True), rows.var(dims, correction=0, keepdim=True)
        number = x.shape[0] * math.prod(x.shape[2:])
        for running, batch in ((running_mean, centre), (running_var, spread * (number / max(number - 1, 1)))):
            if running is not None:
                running.lerp_(batch.detach().flatten().full_tensor(), momentum)
    else:
        centre, spread = running_mean.view(shape), running_var.view(shape)
    out = (rows - centre) * (spread + eps).rsqrt()
    out = out if weight is None else out * weight.view(shape)
    return MovedRows.make(out if bias is None else out + bias.view(shape), 1)


@MOVED.implements("instance_norm")
def _instance_norm_of_moved(
    function: Function, x: object, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """For one instance, ``[1, F, N]``, as PyG's ``InstanceNorm`` has it: :func:`batch_norm` of ``[N, F]``.

    In ``[B, N, ...]``, as torch takes ``[N, F]`` for one instance of N channels, each row has a norm of its own.
    """
    if type(x) is MovedRows and x.place == 1 and all(v is None for v in (running_mean, running_var, weight, bias)):
        return MovedRows.make(F.layer_norm(x.of, x.of.shape[2:], eps=eps), 1)
    if type(x) is not MovedRows or x.place != 2 or x.dim() != 3 or x.shape[0] != 1:
        raise refuse_moved(function, moved_in((x, running_mean, running_var, weight, bias))[0])
    out = F.batch_norm(x.of.squeeze(1), running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return MovedRows.make(out.unsqueeze(1), x.place)


class DistributedSyncBatchNorm(nn.SyncBatchNorm):
    """torch's :class:`~torch.nn.SyncBatchNorm`, whose own code asks for a GPU (exact).

    On distributed rows it is batch norm, which has the statistics of all ranks' rows; else it is the stock norm.
    Collective on distributed rows.

    Shapes: x ``[N, F]`` or ``[N, F, ...]``; output the same.

    Example:
        >>> norm = pyg_dist.distribute(torch.nn.SyncBatchNorm(34))
        >>> tuple(norm(data.x).shape)
        (34, 34)
    """

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, RowTensor):
            return super().forward(input)
        self._check_input_dim(input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input)
