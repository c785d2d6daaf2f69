"""What a test may leave behind in its process, and must not: settings, patches, hooks, threads, entries of caches.

Ranks serve bodies of many test modules, so a setting that one leaves behind would decide how another runs. State of a
run is the session's, which goes on from body to body, and with which all of it ends.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.nn import GraphConv, SAGEConv

# What comes once and stays, the same for all.
_STAYS = {
    # hooks that live while distributed rows do
    *(f"torch.{name}" for name in ("tensor", "as_tensor", "asarray", "save", "to_dlpack", "Tensor.new_tensor")),
    *(f"torch.sparse_{layout}_tensor" for layout in ("coo", "compressed", "csr", "csc", "bsr", "bsc")),
    *(f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__")),  # of torch.compile
    *("workers._left", "workers._num_meetings"),  # what ranks note between two bodies
    *("environment variable GLOO_SOCKET_IFNAME", "environment variable TORCH_GLOO_LAZY_INIT"),
}
# Methods that PyG writes into a conv's class with its first object.
_WRITTEN = {
    "propagate", "_orig_propagate", "_jinja_propagate", "collect",
    "edge_updater", "_orig_edge_updater", "_jinja_edge_updater", "edge_collect",
}  # fmt: skip
# Beside the package's own modules and classes: what tests put counters and stand-ins into.
_MODULES = ("builtins", "os", "time", "torch", "torch.distributed", "torch.nn.functional", "torch_geometric.utils")
_CLASSES = (torch.Tensor, torch.nn.Module)
_TESTS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CONTAINERS = (dict, list, set)  # a weak one holds nothing: what is in it, a script holds


class State(NamedTuple):
    """Settings by name, modules' and classes' attributes, and sizes of the package's caches."""

    settings: dict[str, Any]
    attributes: dict[str, dict[str, Any]]
    sizes: dict[str, int]
    num_modules: int


Namespace = dict[str, Any] | types.MappingProxyType[str, Any]


class _Places:
    """Where to look: the namespaces and the containers of all modules, by name."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._of_module: dict[str, tuple[dict[str, Namespace], dict[str, Sized]]] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.containers: dict[str, Sized] = {}
        self.blocked: list[str] = []  # modules that cannot be imported

    def find(self) -> None:
        """Once for each module that is imported."""
        modules = sys.modules.copy()
        if len(modules) == len(self._modules) and all(map(operator.is_, modules.values(), self._modules.values())):
            return
        before, self._modules = self._modules, modules
        self.blocked = sorted(name for name, module in modules.items() if module is None)
        for name, module in modules.items():
            if name not in before or before[name] is not module:
                self._of_module[name] = (dict(_namespaces(name, module)), dict(_containers(name, module)))
        self.namespaces = {f"{c.__module__}.{c.__qualname__}": vars(c) for c in _CLASSES}
        self.containers = {}
        for name in modules:
            namespaces, containers = self._of_module[name]
            self.namespaces.update(namespaces)
            self.containers.update(containers)


_places = _Places()


def write_propagates() -> None:
    """Make each fused conv's first object one that fuses.

    PyG writes ``propagate`` into a conv's class for the first object. One that cannot fuse (``aggr="lstm"``) leaves out
    what all later ones need for a sparse adj_t, so a test would depend on what ran before it in its process.
    """
    from pyg_dist.conv import DistributedSAGEConv  # not before a rank has its environment

    for conv in (GraphConv, SAGEConv, DistributedSAGEConv):
        conv(1, 1)


def fresh_generators() -> None:
    """Every test and every rank draws the same numbers, whatever ran before."""
    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def state(has_caches: bool = True, collects: bool = True, before: State | None = None) -> State:
    """What there is now. ``has_caches``: collect garbage first, and look into caches, which then hold what is alive.

    Of ``before`` it takes the copies of namespaces that have not changed, which compare at once.
    """
    if has_caches and collects:
        gc.collect()
    _places.find()
    attributes = _copied(_places.namespaces, {} if before is None else before.attributes)
    sizes = {name: len(container) for name, container in _places.containers.items()} if has_caches else {}
    return State(_settings(), attributes, sizes, len(sys.modules))


def since(before: State) -> tuple[list[str], State]:
    """A line for everything that was left behind since, and what there is now.

    Garbage, whose collection takes its time, is not left behind.
    """
    now = state(collects=False, before=before)
    lines = difference(before, now)
    if lines:
        gc.collect()
        for thread in threading.enumerate():  # a loader's ends soon after it
            if thread.name.startswith("pyg_dist sampling"):
                thread.join(1.0)
        now = state(before=before)
        lines = difference(before, now)
    return lines, now


def difference(before: State, after: State) -> list[str]:
    """A line for everything that ``after`` has and ``before`` has not."""
    names = [*before.settings, *(name for name in after.settings if name not in before.settings)]
    if before.num_modules != after.num_modules:  # other packages set such things when they are imported
        names = [name for name in names if not _is_of_imports(name)]
    pairs = [(name, before.settings.get(name), after.settings.get(name)) for name in names]
    lines = [f"{name} is {now!r}, was {was!r}" for name, was, now in pairs if now != was and name not in _STAYS]
    for owner, was in before.attributes.items():
        now = after.attributes.get(owner, {})
        if was is now:
            continue
        written = _WRITTEN if "_jinja_propagate" in now and "_jinja_propagate" not in was else ()
        lines += [
            f"{owner}.{name} is another"
            for name, value in now.items()
            if value is not was.get(name) and name not in written and _is_told(f"{owner}.{name}", value, name in was)
        ]
    for name, size in after.sizes.items():
        if size > before.sizes.get(name, size):
            lines.append(f"{name} has {size} entries, had {before.sizes[name]}")
    return lines


def _copied(namespaces: dict[str, Namespace], known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copies, or the known ones where names and objects are the same. Values compare by identity first, in C."""
    copies = {}
    for name, found in namespaces.items():
        copy = known.get(name)
        try:
            is_same = copy == found
        except Exception:  # of another object, whose == gives no bool
            is_same = False
        copies[name] = copy if copy is not None and is_same else found.copy()
    return copies


def _is_of_imports(name: str) -> bool:
    is_variable, is_ours = (name.startswith(f"environment variable {prefix}") for prefix in ("", "PYG_DIST_"))
    return name == "warnings' filters" or (is_variable and not is_ours)


def _settings() -> dict[str, Any]:
    logger = logging.getLogger("pyg_dist")
    return {
        **{f"environment variable {name}": v for name, v in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "the working directory": os.getcwd(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "numpy's errors": np.geterr(),
        "warnings' filters": list(warnings.filters),
        "the garbage collector": gc.isenabled(),
        "the logger": (logger.level, list(logger.handlers), logger.propagate),
        "modules that cannot be imported": _places.blocked,
        "the session's options": _options(),
        **{f"the handler of {number.name}": signal.getsignal(number) for number in _SIGNALS},
        "threads of the package": _threads(),
        "hooks on torch without rows": _hooks(),
    }


_LASTING = ("failures", "waits", "divergence", "progress", "store")
"""Threads that belong to the session, and one that outlives it: rank 0's, which other ranks still ask."""


def _threads() -> list[str]:
    """Those that do not belong to the session. A loader's ends when the loader is gone, which may take a collection."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(t.name.startswith("pyg_dist sampling") for t in threading.enumerate()):
        gc.collect()
        time.sleep(0.01)
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pyg_dist"))
    return [name for name in names if name.removeprefix("pyg_dist ") not in _LASTING]


def _hooks() -> int:
    """On all modules and optimizers, where the package's have no rows to watch for."""
    sharding = sys.modules.get("pyg_dist.tensor.sharding")
    if sharding is None or len(sharding.living):
        return 0
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def _options() -> Any:
    """Those of a session with other options than ``init()`` gives; a group of the script's own, too."""
    session = sys.modules.get("pyg_dist.backend.session.session")
    if session is None:
        return True, False
    current = session.current()
    is_default = (current.backend, current.timeout) == (session.DEFAULT_BACKEND, session.DEFAULT_TIMEOUT)
    groups = current.find(session.Groups)
    is_foreign = session.is_group_open() and not (groups is not None and groups.is_own)
    return (not current.is_joined or is_default, is_foreign)


def _namespaces(name: str, module: types.ModuleType | None) -> Iterator[tuple[str, Namespace]]:
    if isinstance(module, types.ModuleType) and (name in _MODULES or _is_ours(name, module)):
        yield name, vars(module)
        if name not in _MODULES:
            owned = (value for value in vars(module).values() if isinstance(value, type))
            yield from ((f"{name}.{c.__qualname__}", vars(c)) for c in owned if c.__module__ == name)


def _is_ours(name: str, module: types.ModuleType) -> bool:
    """Of the package, or one of these tests."""
    return name.partition(".")[0] == "pyg_dist" or str(getattr(module, "__file__", "")).startswith(_TESTS)


def _is_told(name: str, value: Any, was_there: bool) -> bool:
    """Whether an attribute's value is a patch; what a session sets, late imports and notes of torch are none."""
    is_note = isinstance(value, types.ModuleType) or name.endswith("__") or ".__" in name
    if type(value).__name__ == "Session":  # a new run begins with a new one
        return False
    return name not in _STAYS and (was_there or not is_note)


def _containers(name: str, module: types.ModuleType | None) -> Iterator[tuple[str, Sized]]:
    if name.partition(".")[0] == "pyg_dist":
        for key, value in list(vars(module).items()):
            if isinstance(value, _CONTAINERS) and not key.startswith("__") and f"{name}.{key}" not in _STAYS:
                yield f"{name}.{key}", value
