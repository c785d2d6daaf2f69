"""The generators that scripts and PyG draw from, torch's, numpy's and Python's: alike on all ranks.

Torch has one for the CPU and one for each GPU, of which a rank has one.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from pyg_dist.backend import host, plain_json
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.on_device import is_capturing
from pyg_dist.backend.session import launch
from pyg_dist.backend.session.agreement import differences, digest
from pyg_dist.backend.session.state import current, is_main
from pyg_dist.errors import LaunchError

logger = logging.getLogger("pyg_dist")

# torch seeds itself with 53 random bits. A script's own seed is nearly always below, a random one is not (2^-21).
_LEAST_OWN_SEED = 2**32

_NAMES = ("torch", "numpy", "Python", "torch on the GPU")

_MT19937_BYTES = 625 * 4  # in numpy's memory: 624 words, then the place among them

# The generators that were alike on all ranks at the import, by this module or by the script; None before.
_alike: set[str] | None = None


class _Numpy:
    """numpy's generator, whose state takes as long to read as a small layer: only where it is not the one before."""

    def __init__(self) -> None:
        self._memory = b""
        self._last: object = None

    def state(self) -> Any:
        """``np.random.get_state()``.

        Something may have been drawn if the memory of MT19937 has changed, or if a normal number was held back. What is
        not seen is a script that sets a state with such a number at the very place where the last one had none.
        """
        generator = np.random.mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state()
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if self._last is None or self._memory != memory:
            state: Any = np.random.get_state()
            self._memory, self._last = memory, None if state[3] else state
            return state
        return self._last


def start_alike() -> None:
    """Seed the generators alike on all ranks of a run, by what the launcher sets on all of them. Not collective.

    The import of pyg_dist calls it. Nothing happens at one rank, in processes that a rank starts, and where a launcher
    sets nothing that is common. Generators that the script has seeded before are left alone; Python's, which cannot be
    checked, counts as seeded where torch's or numpy's is.
    """
    global _alike
    if _alike is not None or multiprocessing.parent_process() is not None:
        return
    _alike = set()
    try:
        run = launch.identify(os.environ)
    except LaunchError:  # init raises it
        return
    words = [] if run is None else [*run.words, *_launcher_process(run)]
    if not words:
        return
    seed = xxhash.xxh3_64_intdigest("\n".join(words).encode())
    is_torch_seeded = torch.initial_seed() < _LEAST_OWN_SEED
    is_numpy_seeded = np.random.mtrand.get_bit_generator().seed_seq is None
    _alike |= {"torch", "numpy"}
    if not is_torch_seeded:
        torch.manual_seed(seed)
    if not is_numpy_seeded:
        np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
    if not (is_torch_seeded or is_numpy_seeded):
        random.seed(seed)
        _alike.add("Python")


def share(group: Group) -> None:
    """Give every rank the states of rank 0's generators where they differ. Collective.

    What the ranks draw from here on, splits, negative samples, initial weights, is the same everywhere. Rank 0 warns of
    generators that were alike at the import: what the ranks have drawn with them since is not.
    """
    arrays = to_arrays(generator_states())
    different = differences({name: digest(plain_json.to_bytes(state)) for name, state in arrays.items()})
    if not different:
        return
    drawn = [name for name in different if name in (_alike or ())]
    if drawn and is_main():
        logger.warning(
            "what the ranks have drawn with %s differs between them; from here on they draw as rank 0",
            " and ".join(drawn),
        )
    mine = plain_json.to_bytes(arrays) if group.rank == 0 else b""
    set_generator_states(from_arrays(plain_json.from_bytes(group.gather_bytes(mine)[0])))


def to_arrays(states: list[Any]) -> dict[str, Any]:
    """Numbers, tuples and arrays for each of :func:`generator_states`, by the generator's name."""
    of_torch, of_numpy, (version, words, gauss), on_gpu = states
    words = np.frombuffer(bytearray(struct.pack(f"={len(words)}I", *words)), np.uint32)
    if isinstance(on_gpu, list):
        on_gpu = np.array(on_gpu, np.uint8)
    return dict(zip(_NAMES, (of_torch.numpy(), of_numpy, (version, words, gauss), on_gpu), strict=True))


def from_arrays(arrays: Mapping[str, Any]) -> list[Any]:
    """The reverse of :func:`to_arrays`; an array may have become a tensor.

    Raises:
        ValueError: They are no states; as all else that is wrong with them, a KeyError, TypeError or AttributeError.
    """
    of_torch, (kind, words, *others), (version, of_python, gauss), on_gpu = (arrays[name] for name in _NAMES)
    if on_gpu is not None and not isinstance(on_gpu, int):
        on_gpu = np.asarray(on_gpu).tolist()
    of_numpy = (kind, np.asarray(words), *others)
    return [host.as_tensor(of_torch), of_numpy, (version, tuple(np.asarray(of_python).tolist()), gauss), on_gpu]


def generator_states() -> list[Any]:
    """The states of torch's generator of the CPU, numpy's, Python's and the one of the rank's GPU. Nothing waits.

    ``None`` stands for the last one where there is no GPU, and while a CUDA graph is captured, which takes no state.
    """
    return [torch.get_rng_state(), current().of(_Numpy).state(), random.getstate(), _state_on_gpu()]


def set_generator_states(states: list[Any]) -> None:
    """Draw again what was drawn since :func:`generator_states`."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or states[3] is None:
        return
    module = torch.get_device_module(device)  # both work before a GPU has started, too
    if isinstance(states[3], int):
        module.manual_seed_all(states[3])
    else:
        module.set_rng_state(torch.tensor(states[3], dtype=torch.uint8, device="cpu"))


def _state_on_gpu() -> list[int] | int | None:
    """The state of the generator of a rank's GPU or, where it has not started, its seed."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or is_capturing():
        return None
    module = torch.get_device_module(device)
    return module.get_rng_state().tolist() if module.is_initialized() else torch.initial_seed()


def _launcher_process(run: launch.Run) -> list[str]:
    """The process that started all ranks, if they are on one machine and Linux shows it; it is new in each run.

    It is the nearest ancestor without the variable that numbers the ranks: wrappers of a rank inherit it.
    """
    if not run.is_one_machine:
        return []
    try:
        process = os.getppid()
        while process:
            environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            # The name, in parentheses, may contain anything.
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            if not any(entry.startswith(f"{run.rank_variable}=".encode()) for entry in environ):
                return [str(process), fields[19]]  # its start, in ticks since the machine's
            process = int(fields[1])
    except OSError:  # no Linux, or another user's process
        pass
    return []
