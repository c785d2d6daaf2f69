"""torchmetrics' metrics that are given distributed rows: their counts are those of all ranks' rows from the start.

A metric sums its counts over all processes before it computes. Where its ``update`` leads to a sum over ranks, they are
of all rows already, so that metric is told not to. No other metric changes, nor torchmetrics itself.
"""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any


def keep_counts() -> None:
    """Tell the metrics whose ``update`` leads here that each process has the counts of all rows. Not collective."""
    torchmetrics = sys.modules.get("torchmetrics.metric")
    if torchmetrics is None:
        return
    update = _code_around_update(torchmetrics.Metric)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is update:
            metric = frame.f_locals["self"]
            metric.sync_on_compute = metric.dist_sync_on_step = metric._to_sync = False
        frame = frame.f_back


@cache
def _code_around_update(metric: Any) -> CodeType | None:
    """What torchmetrics puts in the place of each metric's ``update``."""
    return next((part for part in metric._wrap_update.__code__.co_consts if isinstance(part, CodeType)), None)
