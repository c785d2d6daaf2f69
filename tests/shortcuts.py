"""What PyG and torch do anew for each conv and each seed, done once.

PyG reads and compiles the same two templates for each class of convs, which took a sixth of the time of tests on ranks,
and inspects a class's functions for each of its objects, half of the time that makes one. The code depends on the text
alone, since every environment that PyG makes has jinja's own options. Templates of other packages are left alone.

torch notes a seed for GPUs that nobody has asked for yet, with the stack of its caller: two thirds of the seed's time.

gloo's receiving threads spin while a sender of their process holds the lock that they want. With more processes than
processors, that took a sixth of the time of tests on ranks, and kept senders from their processors: they come second.

Files of tests need not outlive the machine: that the disk has them is not waited for, which took most of the time of
tests that write stores. What looks at these calls puts functions of its own in their place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch_geometric
from torch.distributed import distributed_c10d
from torch_geometric.inspector import Inspector, Signature

_OF_PYG = os.path.dirname(torch_geometric.__file__)
_RECEIVERS_NICENESS = 10  # a tenth of what another thread gets beside them: enough on a busy machine


def take() -> None:
    """In this process and in all that are forked from it."""
    _keep_templates()
    _keep_signatures()
    _put_receivers_second()
    os.fsync = _no_wait  # type: ignore[assignment]
    for module in (torch.cuda, torch.xpu):
        module.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


def _no_wait(file: Any) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())  # which raises for what is no open file


def _keep_templates() -> None:
    compiled = jinja2.Environment.compile
    if isinstance(compiled, types.FunctionType) and not hasattr(compiled, "kept"):
        environment = jinja2.Environment()

        @functools.cache
        def of(source: str, name: str | None, filename: str | None) -> types.CodeType:
            return compiled(environment, source, name, filename)

        def compile_(
            self: jinja2.Environment, source: str, name: str | None = None, filename: str | None = None
        ) -> types.CodeType:
            if filename is not None and filename.startswith(_OF_PYG):
                return of(source, name, filename)
            return compiled(self, source, name, filename)

        compile_.kept = True  # type: ignore[attr-defined]
        jinja2.Environment.compile = compile_  # type: ignore[method-assign,assignment]


def _keep_signatures() -> None:
    inspected = Inspector.inspect_signature
    if hasattr(inspected, "kept"):
        return
    of_class: weakref.WeakKeyDictionary[type, dict[Any, Signature]] = weakref.WeakKeyDictionary()

    def inspect_signature(self: Inspector, func: Callable[..., Any] | str, exclude: Any = None) -> Signature:
        called: Any = getattr(self._cls, func) if isinstance(func, str) else func
        code = getattr(called, "__code__", None)  # which, unlike its function, keeps no class alive
        if code is None or called.__name__ in self._signature_dict:
            return inspected(self, func, exclude)
        known, key = of_class.setdefault(self._cls, {}), (code, tuple(exclude or ()))
        if key not in known:
            known[key] = inspected(self, func, exclude)
        found = known[key]._replace(param_dict=dict(known[key].param_dict))
        self._signature_dict[called.__name__] = found
        return found

    inspect_signature.kept = True  # type: ignore[attr-defined]
    Inspector.inspect_signature = inspect_signature  # type: ignore[method-assign]


def _put_receivers_second() -> None:
    made = distributed_c10d._new_process_group_helper
    if hasattr(made, "kept") or sys.platform != "linux":
        return

    def make(*args: Any, **kwargs: Any) -> Any:
        group = made(*args, **kwargs)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it may have ended
                if Path("/proc/self/task", thread, "comm").read_text().startswith("gloo_tcp_loop"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), _RECEIVERS_NICENESS)
        return group

    make.kept = True  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = make
