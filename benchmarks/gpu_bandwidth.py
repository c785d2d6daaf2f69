"""Ops that a GPU's memory bounds, beside a copy: bytes read and written a second, as a share of the copy's."""

from __future__ import annotations

from typing import Any

import torch
from gpu_measure import Log, Place

from pyg_dist.backend import ops
from pyg_dist.backend.ops.quantize import packed_row_bytes
from pyg_dist.backend.sparse.csr import CSR


def run(place: Place, log: Log) -> None:
    """Packing in two and eight bits and adding what was packed, gathered rows, norm + ReLU + dropout, its gradient."""
    num_rows, width = (300, 128) if place.is_trial else (4_000_000, 128)
    x = torch.randn(num_rows, width, device=place.device)
    out = torch.empty_like(x)
    row = 4 * width
    copy = 2 * num_rows * row / place.seconds(lambda: out.copy_(x))
    log.add("copy GB/s", copy / 1e9)
    own = CSR.identity(num_rows, place.device)
    key = torch.arange(num_rows, device=place.device)
    index = torch.randperm(num_rows, device=place.device)
    weight = torch.ones(width, device=place.device)

    def add(name: str, num_bytes: int, call: Any) -> None:
        def measured() -> dict[str, float]:
            rate = num_rows * num_bytes / place.seconds(call)
            return {"GB/s": rate / 1e9, "of a copy": rate / copy}

        log.attempt(name, measured)

    pattern = 12  # rowptr and col of a row

    def pack(bits: int) -> None:
        packed = ops.quantize_csr(own.rowptr, own.col, x, bits, key=key, seed=1)
        packed_bytes = packed_row_bytes(width, bits)
        add(f"pack, {bits} bits", row + packed_bytes + 8 + pattern,
            lambda: ops.quantize_csr(own.rowptr, own.col, x, bits, key=key, seed=1, out=packed))  # fmt: skip
        add(f"unpack and add, {bits} bits", 2 * row + packed_bytes + pattern,
            lambda: ops.dequantize_csr_add(out, own.rowptr, own.col, packed, bits))  # fmt: skip

    for bits in (2, 8):
        pack(bits)
    add("gather_rows", 2 * row + 8, lambda: ops.gather_rows(x, index, out=out))
    spec, factors = ops.NormReLUDropoutSpec("layer", 1e-5, True, 0.5, 7), (weight, weight, key)
    add("norm_relu_dropout", 2 * row + 16, lambda: ops.norm_relu_dropout(x, factors, spec))
    _, moments = ops.norm_relu_dropout(x, factors, spec)
    add("norm_relu_dropout, backward", 3 * row + 16,
        lambda: ops.norm_relu_dropout_grad(x, x, factors, spec, moments))  # fmt: skip
