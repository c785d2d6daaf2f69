"""Messages under way: whose memory is whose."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from pyg_dist.backend.comm.transport import Messages


class OnGpu:
    """Takes part as a tensor of a GPU, allocated on some stream."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.used_by: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.used_by.append(stream)


def test_the_stream_that_waits_uses_the_memory() -> None:
    """Else what it reads, freed, is given to others on the stream that it was allocated on."""
    received: Any = OnGpu()
    sent: Any = OnGpu()
    with patch("torch.cuda.current_stream", lambda device: f"second of {device}"):
        Messages(received, sent).wait()
    assert received.used_by == sent.used_by == ["second of cuda:0"]
