"""CUDA graphs: while one is captured, the host may neither wait for the device nor ask how far it is."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether what is queued on the current stream becomes part of a CUDA graph. No device is started by asking."""
    is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_started and torch.cuda.is_current_stream_capturing()
