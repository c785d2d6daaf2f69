"""Rows in 16, 8, 4 or 2 bits a value: approximate messages, unbiased where they are rounded at random.

The parameters of a row, its zero point and its scale, travel in front of its numbers: one message per neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.codec import EXACT, Codec
from pyg_dist.backend.matrix import Matrix
from pyg_dist.backend.phases import phase
from pyg_dist.errors import DataError

Bits = Literal[32, 16, 8, 4, 2]
"""Of a value in a message; 32 stands for values as they are, whatever their dtype."""

_BACKWARD = 1 << 63  # seeds are drawn below it


@dataclass(frozen=True, eq=False)
class Quantized:
    """The codec of one aggregation's messages in one direction: see :func:`~pyg_dist.backend.ops.quantize_csr`.

    Sums are in full precision and rounded once. Approximate: with keys, the mean over seeds is exact (SuperGCN, 2.4).

    Attributes:
        bits: 2, 4, 8, or 16 (bfloat16, rounded to nearest).
        key: int64 ``[R]``, what stands for each row that this rank sends; None: rounded to nearest.
        seed: of this aggregation and direction.
        layer: names the layer, for errors.
    """

    bits: int
    key: Tensor | None
    seed: int
    layer: Callable[[], str]

    def row_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        """See :class:`~pyg_dist.backend.codec.Codec`."""
        return ops.packed_row_bytes(num_features, self.bits)

    def pack(self, message: Tensor, matrix: Matrix, x: Tensor, col_scale: Tensor | None = None) -> None:
        """See :class:`~pyg_dist.backend.codec.Codec`.

        Raises:
            DataError: A value is not finite (16 bits hold it, fewer do not).
        """
        pattern = matrix.pattern
        try:
            with phase("quantize"):
                ops.quantize_csr(
                    pattern.rowptr, pattern.col, x, self.bits, matrix.value,
                    col_scale=col_scale, key=self.key, seed=self.seed, out=message,
                )  # fmt: skip
        except DataError as error:
            if "expected finite" not in error.message:
                raise
            what = "gradients" if self.seed & _BACKWARD else "features"
            raise DataError(
                f"Expected finite {what} in the messages of {self.layer()}, which go in {self.bits} bits "
                f"({error.message.partition('got ')[2]} of the message): look for the NaN or infinity, or use bits=32"
            ) from None

    def unpack_add(self, message: Tensor, matrix: Matrix, out: Tensor, row_scale: Tensor | None = None) -> None:
        """See :class:`~pyg_dist.backend.codec.Codec`."""
        pattern = matrix.pattern
        with phase("quantize"):
            ops.dequantize_csr_add(
                out, pattern.rowptr, pattern.col, message, self.bits, matrix.value, row_scale=row_scale
            )


def quantized(
    bits: tuple[Bits, Bits], keys: tuple[Tensor | None, Tensor | None], seed: int, layer: Callable[[], str]
) -> tuple[Codec, Codec]:
    """The codecs of one aggregation: forward and backward, which round independently.

    Args:
        bits: by direction.
        keys: what stands for each row that this rank sends, by direction; None: rounded to nearest.
        seed: below 2^63, a new one for every aggregation.
        layer: names it, for errors.
    """
    seeds = seed, seed | _BACKWARD
    forward, backward = (
        EXACT if b == 32 else Quantized(b, key, s, layer) for b, key, s in zip(bits, keys, seeds, strict=True)
    )
    return forward, backward
