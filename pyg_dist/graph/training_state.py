"""A script's training state, which every rank must set alike: models, optimizers, the gradients of a step.

:mod:`pyg_dist.backend.comm.checks.replicas` compares it with the next small sum. Nothing here is collective.

Of a model these are the names of its layers, parameters and buffers, their shapes and dtypes, ``requires_grad`` and
``training``, how often its optimizers have stepped, and of torch's and PyG's layers also their numbers and words, such
as a dropout's ``p``. A script's own layers may hold other things, such as their rank. The flags and numbers are read in
each call; layers and tensors are looked for when these have changed, and now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyg_dist.backend.autograd.replicated import is_synchronised
from pyg_dist.backend.comm.checks.noted import Settings, digest_of_words
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.session.agreement import Control
from pyg_dist.backend.session.divergence import compare_order
from pyg_dist.backend.session.state import current
from pyg_dist.tensor.row_tensor import RowTensor

_SCALARS = (bool, int, float, str)

# Calls of a model between two looks for layers and tensors that are new, and steps between two looks at gradients: what
# a script does otherwise on one rank, it mostly does from the first steps on.
_EVERY, _FIRST = 8, 4

# What is compared: names, which begin with that of the model, and values.
_State = tuple[tuple[str, object], ...]


class _Model:
    """The state of a model as it was noted last; the model itself is not kept alive."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_calls = 0
        self._state: _State = ()
        self._digest = 0
        self._flags: object = None
        self._layers: list[tuple[Callable[[], object], Callable[[dict[str, object]], object]]] = []
        self._parameters: dict[int, Callable[[], Any]] = {}

    def settings(self, model: nn.Module) -> Settings:
        if self._num_calls % _EVERY == 0 or self._flags_now() != self._flags:
            self._look(model)
        self._num_calls += 1
        name, state, num_steps = type(model).__name__, self._state, self.num_steps

        def in_words() -> dict[str, object]:
            return {"": name, **{name + key: value for key, value in state}, "steps of its optimizers": num_steps}

        return Settings("model", hash((self._digest, num_steps)), in_words)

    def holds(self, parameter: Tensor) -> bool:
        own = self._parameters.get(id(parameter))
        return own is not None and own() is parameter

    def _flags_now(self) -> object:
        try:
            of_layers = [read(layer().__dict__) for layer, read in self._layers]
            return of_layers, [parameter().requires_grad for parameter in self._parameters.values()]
        except (AttributeError, KeyError):  # one has gone
            return None

    def _look(self, model: nn.Module) -> None:
        state: list[tuple[str, object]] = []
        self._layers, self._parameters = [], {}
        for path, layer in model.named_modules():
            path = f".{path}" if path else ""
            numbers = dict(_numbers(layer.__dict__)) if _is_library(type(layer)) else {}
            state += [(path, type(layer).__name__), (f"{path}.training", layer.training)]
            state += [(f"{path}.{name}", value) for name, value in numbers.items()]
            self._layers.append((weakref.ref(layer), itemgetter("training", *numbers)))
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is not None:
                    key, shape = f"{path}.{name}", [] if is_lazy(tensor) else list(tensor.shape)
                    state += [(key, f"{str(tensor.dtype)[6:]} {shape}"), (f"{key}.requires_grad", tensor.requires_grad)]
            self._parameters |= {id(p): weakref.ref(p) for p in layer._parameters.values() if p is not None}
        if tuple(state) != self._state:
            self._state = tuple(state)
            self._digest = digest_of_words((type(model).__name__, self._state))
        self._flags = self._flags_now()


class _Optimizer:
    def __init__(self, optimizer: torch.optim.Optimizer, models: Collection[_Model]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.num_models = len(models)  # of which it may be
        self.models = [known for known in models if any(map(known.holds, parameters))]
        self.num_steps = 0
        self._groups: tuple[_State, ...] | None = None
        self._digest = 0

    def settings(self, optimizer: torch.optim.Optimizer) -> Settings:
        name = type(optimizer).__name__
        groups = tuple(tuple(_set_in(group)) for group in optimizer.param_groups)
        if groups != self._groups:
            self._groups, self._digest = groups, digest_of_words((name, groups))
        return Settings("optimizer", self._digest, lambda: _optimizer_in_words(name, groups))


class _Known:
    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Optimizer] = weakref.WeakKeyDictionary()


_is_of_library: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def note_model(model: nn.Module) -> None:
    """Note a model that a script calls on distributed rows."""
    models = current().of(_Known).models
    known = models.get(model)
    if known is None:
        known = models[model] = _Model()
    noted().note(known.settings(model))


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note the groups of an optimizer that is about to step over a model's parameters, and now and then gradients.

    Collective where calls have no tags (:mod:`~pyg_dist.backend.session.divergence`).
    """
    if not noted().is_on:
        return
    run = current().of(_Known)
    known = run.optimizers.get(optimizer)
    if known is None or not (known.models or known.num_models == len(run.models)):
        known = run.optimizers[optimizer] = _Optimizer(optimizer, [*run.models.values()])
    if not known.models:
        return
    noted().note(known.settings(optimizer))
    compare_order(current().of(Control).group)
    if known.num_steps < _FIRST or known.num_steps % _EVERY == 0:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                is_plain = gradient is not None and not isinstance(gradient, RowTensor)
                if is_plain and is_synchronised(parameter):
                    noted().gradient(gradient)
    known.num_steps += 1
    for model in known.models:
        model.num_steps += 1


def _numbers(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if type(value) in _SCALARS and name[0] != "_" and name != "training":
            yield name, value


def _is_library(kind: type) -> bool:
    """Whether a layer's class is torch's or PyG's, or ours for one of them."""
    if kind not in _is_of_library:
        roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
        _is_of_library[kind] = next(root for root in roots if root != "pyg_dist") in ("torch", "torch_geometric")
    return _is_of_library[kind]


def _set_in(group: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in group.items():
        if name == "params":
            yield "number of parameters", len(value)
        elif isinstance(value, Tensor):  # a learning rate, maybe
            yield name, value.item() if value.is_cpu and value.numel() == 1 else ""
        elif isinstance(value, (*_SCALARS, tuple)):
            yield name, value


def _optimizer_in_words(optimizer: str, groups: tuple[_State, ...]) -> dict[str, object]:
    named = len(groups) > 1
    values = {f"param_groups[{k}].{n}" if named else n: v for k, group in enumerate(groups) for n, v in group}
    return {"": optimizer, **values}
