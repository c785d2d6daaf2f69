"""Which GPU a rank uses, and whether two ranks share one. No GPU is initialised here."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pyg_dist.backend.session import launch
from pyg_dist.errors import LaunchError, OptionError, describe_ranks

NCCL = "cpu:gloo,cuda:nccl"  # what "auto" stands for where each rank has a GPU of its own
_NUM_UUID_BYTES = 16


def choose_when_started() -> None:
    """Make this rank's GPU the current one when torch starts CUDA: "cuda" then means it, as nccl demands.

    The import of pyg_dist calls it. Nothing happens in processes that a rank starts, or where CUDA runs already. What a
    script chooses afterwards holds. Not collective.
    """
    if multiprocessing.parent_process() is not None or torch.cuda.is_initialized():
        return
    try:
        found = launch.detect(os.environ)
    except LaunchError:  # init raises it
        return
    if found.launcher != "alone":
        # It runs before whatever a script does first on a GPU, and not at all where it uses none.
        torch.cuda._lazy_call(lambda: _choose(found.local_rank))


def _choose(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if count > 1:
        torch.cuda.set_device(local_rank % count)


def own_gpu(local_rank: int) -> str:
    """The host and the UUID of this rank's GPU; "" if it has none. Not collective."""
    if not torch.cuda.is_available():
        return ""
    is_chosen = torch.cuda.is_initialized()
    index = torch.cuda.current_device() if is_chosen else local_rank % torch.cuda.device_count()
    # torch's own way to it would start the device.
    uuid, handle = ctypes.create_string_buffer(_NUM_UUID_BYTES), ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        errors = [
            driver.cuInit(0),
            driver.cuDeviceGet(ctypes.byref(handle), index),
            driver.cuDeviceGetUuid(uuid, handle),
        ]
    except (OSError, AttributeError):  # no CUDA: another kind of GPU behind its name
        errors = [1]
    return f"{socket.gethostname()} {index if any(errors) else uuid.raw.hex()}"


def gpus_of_all(store: dist.Store, rank: int, world_size: int, own: str) -> list[str]:
    """Every rank's :func:`own_gpu`, by rank; collective, but only ranks with a GPU wait for the others."""
    store = dist.PrefixStore("gpu", store)
    store.set(str(rank), own)
    if not own:
        return [""] * world_size
    return [gpu.decode() for gpu in store.multi_get([str(other) for other in range(world_size)])]


def sharing(gpus: Sequence[str]) -> list[int]:
    """The ranks whose GPU another rank has, too."""
    ranks_of = Counter(gpus)
    return [rank for rank, gpu in enumerate(gpus) if gpu and ranks_of[gpu] > 1]


def backend_for(asked: str, default: str, gpus: Sequence[str]) -> str:
    """The torch.distributed backend for ranks with these GPUs ("" for none), where the script asks for one.

    ``default`` stands for a choice made here: nccl for GPUs where each rank has its own, gloo for the rest.

    Raises:
        OptionError: nccl is asked for, and ranks share a GPU or lack one.
    """
    shared = sharing(gpus)
    if asked == default:
        return NCCL if all(gpus) and not shared else "gloo"
    if "nccl" in asked and shared:
        raise OptionError(
            f"Expected a GPU for each rank with backend {asked!r} (got {describe_ranks(shared)} on shared ones): start "
            f"fewer ranks on a machine, or take backend={default!r}, whose messages pass host memory"
        )
    return asked
