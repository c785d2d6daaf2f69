"""Names of layers in errors: the path in the model that the script runs, and the layer itself."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

from torch import nn

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_model(model: nn.Module) -> None:
    """Remember that a script has called ``model`` on distributed data: its layers are named by their path."""
    _models.add(model)


def name_of(layer: nn.Module) -> str:
    """One line: ``'encoder.convs.1' (SAGEConv(64, 64, aggr=mean))``, or what it is alone if no model has it.

    Of several models that contain it, the outermost one counts. A layer whose ``repr`` has several lines is called by
    its class. Not collective.
    """
    text = repr(layer)
    kind = text if "\n" not in text else type(layer).__name__.removeprefix("Distributed")
    paths = [path for model in list(_models) for path, part in model.named_modules() if part is layer and path]
    return f"{max(paths, key=lambda path: path.count('.'))!r} ({kind})" if paths else kind


def running_layer() -> str:
    """Where the caller is, for the end of an error: ``" (in 'attn' (MultiheadAttention(...)) of GPSConv)"``.

    The innermost module whose forward runs, and the outermost; nothing outside of modules. Nothing is recorded for it:
    the stack is searched when an error is made. Not collective.
    """
    layers = list(_running())
    if not layers:
        return ""
    of = f" of {type(layers[-1]).__name__}" if layers[-1] is not layers[0] else ""
    return f" (in {name_of(layers[0])}{of})"


def _running() -> Iterator[nn.Module]:
    """The modules that are being called, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
