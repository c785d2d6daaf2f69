"""Codecs: how rows become messages and back, the one place between products and traffic.

A codec writes the rows of a product straight into the buffer that is sent, and adds what another rank's codec wrote
straight to the output. A row takes the same number of bytes wherever it goes, so a buffer is a matrix of bytes, one row
per slot, of which each neighbour gets a range of rows as *one* message. The parameters of a
quantized row, its zero point and its scale, stand in front of its numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops.quantize import SUM_KEY, is_packed, node_of, row_bytes
from pyg_dist.backend.session.settings import Bits
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import phase
from pyg_dist.errors import DataError, NotFiniteError


@dataclass(frozen=True, eq=False)
class Codec:
    """How rows travel: here as they are, in the dtype of x. Nothing is collective, and every rank has the same codec.

    Legend: R slots, F features, B bytes of a row (:meth:`row_bytes`). A message may hold the slots of all neighbours or
    of one.
    """

    def row_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        """Bytes of one row, parameters included, of ``num_features`` values of ``dtype``."""
        return num_features * dtype.itemsize

    def pack(self, message: Tensor, matrix: Matrix, x: Tensor, col_scale: Tensor | None = None) -> None:
        """Write the rows of ``matrix diag(col_scale) x``: sums are in full precision, and rounded once if at all.

        Shapes: message uint8 ``[R, B]``, contiguous, overwritten; matrix ``[R, M]``; a row with one entry of value one
        is a row as it is, another one a partial sum; x ``[M, F]``; col_scale ``[M]``.
        """
        if x.shape[1]:  # a tensor without columns cannot be viewed in another dtype
            matrix.multiply(x, col_scale=col_scale, out=message.view(x.dtype), accumulate=False)

    def unpack_add(self, message: Tensor, matrix: Matrix, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Add ``diag(row_scale) matrix`` times the rows of the message to ``out``.

        Shapes: message uint8 ``[R, B]``, contiguous; matrix ``[N, R]``; out ``[N, F]``, the last rows of a larger
        tensor; row_scale ``[N]``.
        """
        if out.shape[1]:
            matrix.multiply(message.view(out.dtype), row_scale=row_scale, out=out)


EXACT = Codec()


_BACKWARD = 1 << 63  # seeds are drawn below it

_LOOKS_IN, _ROWS = 16, 256
"""One aggregation in so many has a look at so many rows of its messages: 40 microseconds."""

_COARSE = 0.25
"""Of a row's range: bfloat16 rounds the zero point down by up to |Z| / 128, on average by half of that."""


@dataclass(frozen=True, eq=False)
class Quantized(Codec):
    """The codec of one aggregation's messages in one direction: see :func:`~pyg_dist.backend.ops.quantize_csr`.

    Sums are in full precision and rounded once. Approximate: with keys, the mean over seeds is exact (SuperGCN, 2.4).
    Rows that packing would not shorten go as they are (:func:`~pyg_dist.backend.ops.quantize.row_bytes`).

    One object serves one aggregation, and rounds alike whenever it is used: a second backward pass through it
    (``retain_graph``) repeats the first one's rounding, and the messages of a derivative of the gradient, which go the
    way of the forward ones, repeat theirs. Each is unbiased; what is made of two of them is not independent.
    """

    bits: int  # 2, 4, 8, or 16 (bfloat16, rounded to nearest)
    # int64 ``[R]``, what stands for each row that this rank sends (SUM_KEY); None: rounded to nearest
    key: Tensor | None
    seed: int  # of this aggregation and direction
    layer: Callable[[], str]  # names the layer, for errors

    def row_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        return row_bytes(num_features, dtype.itemsize, self.bits)

    def pack(self, message: Tensor, matrix: Matrix, x: Tensor, col_scale: Tensor | None = None) -> None:
        """As of any codec.

        Raises:
            DataError: A value is not finite, or a row's range too wide; of tensors on a device, a later call raises it.
        """
        if not self._packs(x):
            super().pack(message, matrix, x, col_scale)
            return
        pattern = matrix.pattern
        with phase("quantize"):
            ops.quantize_csr(
                pattern.rowptr, pattern.col, x, self.bits, matrix.value,
                col_scale=col_scale, key=self.key, seed=self.seed, out=message, explain=self._refusal,
            )  # fmt: skip
        if self.seed % _LOOKS_IN == 0 and message.is_cpu:  # a look at a device's would wait for it
            self._warn_of_offsets(message)

    def unpack_add(self, message: Tensor, matrix: Matrix, out: Tensor, row_scale: Tensor | None = None) -> None:
        if not self._packs(out):
            super().unpack_add(message, matrix, out, row_scale)
            return
        pattern = matrix.pattern
        with phase("quantize"):
            ops.dequantize_csr_add(
                out, pattern.rowptr, pattern.col, message, self.bits, matrix.value, row_scale=row_scale
            )

    def _warn_of_offsets(self, message: Tensor) -> None:
        if self.bits == 16 or not message.numel():
            return
        zero, scale = message[:_ROWS, :4].contiguous().view(torch.bfloat16).float().unbind(1)
        is_coarse = (zero.abs() / 256 > _COARSE * scale * (2**self.bits - 1)) & (scale > 0)
        if bool(is_coarse.float().mean() > 0.5):
            warnings.warn(
                f"Most {self._what} in the messages of {self.layer()} lie so far from zero that {self.bits} bits hold "
                f"them more coarsely than their spread asks for: centre them (a norm in front), or use more bits",
                stacklevel=2,
            )

    @property
    def _what(self) -> str:
        return "gradients" if self.seed & _BACKWARD else "features"

    def _packs(self, rows: Tensor) -> bool:
        return is_packed(rows.shape[1], rows.dtype.itemsize, self.bits)

    def _refusal(self, error: NotFiniteError) -> DataError:
        what = self._what
        where = f"row {error.row} of the message"
        if self.key is not None:
            key = int(self.key[error.row])
            where = f"{'a sum for ' if key >= SUM_KEY else ''}node {node_of(key)}"
        if error.is_finite:
            held = "bfloat16 holds up to 3.3895e+38" if self.bits == 16 else "float32 holds a range of 3.4028e+38"
            expected, remedy = f"{what} that {held}", "scale them down, or use bits=32"
        else:
            expected, remedy = f"finite {what}", "look for where it comes from, or use bits=32"
        return DataError(
            f"Expected {expected} in the messages of {self.layer()}, which go in {self.bits} bits (got {error.got} at "
            f"{where}): {remedy}"
        )


def quantized(
    bits: tuple[Bits, Bits], keys: tuple[Tensor | None, Tensor | None], seed: int, layer: Callable[[], str]
) -> tuple[Codec, Codec]:
    """The codecs of one aggregation: forward and backward, which round independently.

    ``keys`` stand for each row that this rank sends, by direction; ``None``: rounded to nearest. ``seed``: below 2^63,
    a new one for every aggregation.
    """
    seeds = seed, seed | _BACKWARD
    forward, backward = (
        EXACT if b == 32 else Quantized(b, key, s, layer) for b, key, s in zip(bits, keys, seeds, strict=True)
    )
    return forward, backward
