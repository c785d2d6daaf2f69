"""PyG's templates, compiled once.

PyG reads and compiles the same two templates anew for each class of convs. That took a sixth of the time of tests on
ranks. The code depends on the text alone, since every environment that PyG makes has jinja's own options. Templates of
other packages are left alone.
"""

from __future__ import annotations

import functools
import os
import types

import jinja2
import torch_geometric

_OF_PYG = os.path.dirname(torch_geometric.__file__)


def keep() -> None:
    """Keep what jinja compiles, in this process and in all that are forked from it."""
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
