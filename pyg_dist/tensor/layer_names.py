"""What errors call a layer: its place in the model that the script runs, and what it is."""

from __future__ import annotations

import weakref

from torch import nn

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_model(model: nn.Module) -> None:
    """A script has called ``model`` on distributed data: layers inside of it are named by their path."""
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
