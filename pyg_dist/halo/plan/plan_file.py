"""The file of a plan: safetensors with the parts, and the rest as JSON in the header."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import DAMAGED, DataError, refusing

_FORMAT = 3

P = TypeVar("P")


def write_plan(path: str | Path, content: dict[str, Any], parts: Tensor, num_ranks: int) -> None:
    """Write what JSON can say, and parts below ``num_ranks``."""
    from safetensors.torch import save

    narrow = parts.to("cpu", torch.from_numpy(np.empty(0, np.min_scalar_type(-num_ranks))).dtype)
    header = {"plan": json.dumps(content | {"format": _FORMAT})}
    written = save({"parts": narrow.contiguous()}, header)  # not save_file, whose files only their owner may read
    target = Path(path)
    if target.exists() and not target.is_file():  # a device, such as /dev/null, is written to
        target.write_bytes(written)
        return
    # A file that is there may be mapped by a loaded plan, so it is replaced, not overwritten.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(written)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_plan(path: str | Path, plan_of: Callable[[dict[str, Any], Tensor], P]) -> P:
    """What ``plan_of`` makes of a file's content and parts.

    Raises:
        DataError: It is not the file of a plan.
    """
    import safetensors

    with refusing(DataError, f"a plan in {path}", "plan again", *DAMAGED, OSError, safetensors.SafetensorError):
        with safetensors.safe_open(path, "pt") as file:
            content, parts = json.loads(file.metadata()["plan"]), file.get_tensor("parts")
        if content.pop("format") != _FORMAT:
            raise DataError(f"Expected a plan of format {_FORMAT} in {path}: plan again")
        return plan_of(content, parts)
