"""What a test may leave behind in its process, and must not: settings, patches, entries of caches.

Ranks serve bodies of many test modules, so a setting that one leaves behind would decide how another runs.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import random
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.nn import GraphConv, SAGEConv

# What comes once and stays, the same for all: a session, which may go on with its groups, the hook and the constructors
# that live while distributed rows do, and the methods that PyG writes into a conv's class with its first object.
_STAYS = {
    *(f"pyg_dist.backend.session.session.{name}" for name in ("_options", "_owns_group", "_store", "_watch")),
    "pyg_dist.backend.comm.transport._abandoned",
    *("pyg_dist.tensor.constructors._libraries", "torch.tensor"),
    *("pyg_dist.backend.session.session._divergence", "pyg_dist.backend.comm.connection._reason"),
    *("pyg_dist.backend.session.world._current", "pyg_dist.errors._suffix"),
    *("pyg_dist.errors._where", "pyg_dist.errors._whole_graph"),
    *("environment variable GLOO_SOCKET_IFNAME", "pyg_dist.layout.module_hooks._hooks"),
    *(f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__")),  # of torch.compile
    *(f"pyg_dist.backend.comm.group.{name}" for name in ("_axes", "_open", "_world")),
    *(f"pyg_dist.backend.comm.calls.{name}" for name in ("_file_ids", "_kind_ids", "_dtype_ids")),
}
_WRITTEN = {
    "propagate", "_orig_propagate", "_jinja_propagate", "collect",
    "edge_updater", "_orig_edge_updater", "_jinja_edge_updater", "edge_collect",
}  # fmt: skip
# Beside the package's own modules and classes: what tests put counters and stand-ins into.
_MODULES = ("builtins", "os", "time", "torch", "torch.distributed", "torch.nn.functional", "torch_geometric.utils")
_CLASSES = (torch.Tensor, torch.nn.Module)
_TESTS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_CONTAINERS = (dict, list, set)  # a weak one holds nothing: what is in it, a script holds


class State(NamedTuple):
    """Settings by name, attributes of modules and classes, and sizes of the package's caches."""

    settings: dict[str, Any]
    attributes: dict[str, dict[str, Any]]
    sizes: dict[str, int]
    num_modules: int


class _Places:
    """Where to look: the namespaces and the containers of all modules, by name."""

    def __init__(self) -> None:
        self._modules: list[types.ModuleType] = []
        self.namespaces: dict[str, Mapping[str, Any]] = {}
        self.containers: dict[str, Sized] = {}

    def find(self) -> None:
        """Once for the modules that are imported now."""
        modules = list(sys.modules.values())
        if len(modules) != len(self._modules) or not all(map(operator.is_, modules, self._modules)):
            self._modules, self.namespaces, self.containers = modules, dict(_namespaces()), dict(_containers())


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
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def state(has_caches: bool = True, collects: bool = True) -> State:
    """What there is now. ``has_caches``: collect garbage first, and look into caches, which then hold what is alive."""
    if has_caches and collects:
        gc.collect()
    _places.find()
    attributes = {name: dict(namespace) for name, namespace in _places.namespaces.items()}
    sizes = {name: len(container) for name, container in _places.containers.items()} if has_caches else {}
    return State(_settings(), attributes, sizes, len(sys.modules))


def since(before: State) -> list[str]:
    """A line for everything that was left behind since; garbage, whose collection takes its time, is not."""
    return difference(before, state(collects=False)) and difference(before, state())


def difference(before: State, after: State) -> list[str]:
    """A line for everything that ``after`` has and ``before`` has not."""
    names = [*before.settings, *(name for name in after.settings if name not in before.settings)]
    if before.num_modules != after.num_modules:  # other packages set such things when they are imported
        names = [name for name in names if not _is_of_imports(name)]
    pairs = [(name, before.settings.get(name), after.settings.get(name)) for name in names]
    lines = [f"{name} is {now!r}, was {was!r}" for name, was, now in pairs if now != was and name not in _STAYS]
    for owner, was in before.attributes.items():
        now = after.attributes.get(owner, {})
        if was.keys() == now.keys() and all(map(operator.is_, was.values(), now.values())):
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
        "modules that cannot be imported": sorted(name for name, module in sys.modules.items() if module is None),
        "the session's options": _options(),
    }


def _options() -> Any:
    """Those of a session with other options than ``init()`` gives; a group of the script's own, too."""
    session = sys.modules.get("pyg_dist.backend.session.session")
    if session is None:
        return True, False
    is_default = session._options == (session.DEFAULT_BACKEND, session.DEFAULT_TIMEOUT)
    is_foreign = session.world.is_group_open() and not session._owns_group
    return (not session.is_initialized() or is_default, is_foreign)


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name in _MODULES or _is_ours(name, module)):
            yield name, vars(module)
            if name not in _MODULES:
                owned = (value for value in vars(module).values() if isinstance(value, type))
                yield from ((f"{name}.{c.__qualname__}", vars(c)) for c in owned if c.__module__ == name)
    yield from ((f"{c.__module__}.{c.__qualname__}", vars(c)) for c in _CLASSES)


def _is_ours(name: str, module: types.ModuleType) -> bool:
    """Of the package, or one of these tests."""
    return name.partition(".")[0] == "pyg_dist" or str(getattr(module, "__file__", "")).startswith(_TESTS)


def _is_told(name: str, value: Any, was_there: bool) -> bool:
    """Whether an attribute's value is a patch; what a session sets, late imports and notes of torch are none."""
    is_note = isinstance(value, types.ModuleType) or name.endswith("__") or ".__" in name
    return name not in _STAYS and (was_there or not is_note)


def _containers() -> Iterator[tuple[str, Sized]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pyg_dist":
            for key, value in list(vars(module).items()):
                if isinstance(value, _CONTAINERS) and not key.startswith("__") and f"{name}.{key}" not in _STAYS:
                    yield f"{name}.{key}", value
