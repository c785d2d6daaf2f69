"""The base of the package's autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from typing_extensions import TypeVar

Out = TypeVar("Out", default=Any)


class Context(Protocol):
    """The ``ctx`` of an autograd function: keeps tensors, and anything by a name, from forward to backward."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


class _LocalMeta(FunctionMeta):
    """Functions whose methods torch finds in the class, where scripts' are replaced by others for rows of all ranks."""

    forward: Any = None
    setup_context: Any = None
    backward: Any = None
    vjp: Any = None
    _backward_cls: Any

    def __init__(self, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)  # type: ignore[no-untyped-call]

        def run_backward(node: object, *gradients: Tensor | None) -> object:
            return self.backward(node, *map(local_gradient, gradients))

        self._backward_cls.apply = run_backward


class LocalFunction(torch.autograd.Function, Generic[Out], metaclass=_LocalMeta):
    """An autograd function with output ``Out`` whose backward gets local rows, as plain tensors.

    The engine passes tensors as they come: reentrant checkpointing hands it the gradients of node tensors as node
    tensors, on which torch's functions would speak of the global ones.
    """

    @classmethod
    def apply(cls, *args: object) -> Out:
        """As torch's, which first looks for other ways to write a function: a microsecond."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call, no-any-return]
        return super(_SingleLevelFunction, cls).apply(*args)  # type: ignore[misc, no-any-return]


def differentiable_gradients(
    run: Callable[[tuple[Any, ...]], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients by the inputs of ``run``, of torch's functions, as these are differentiated."""
    # Views: of a tensor that is given twice, as value and as query, each place has its own gradient.
    own = tuple(None if x is None else x.view_as(x) for x in inputs)
    wanted = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    # What follows from nothing has no gradient: a rank without edges has weights of none.
    pairs = [(out, g) for out, g in zip(run(own), gradients, strict=True) if g is not None and out.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)]


def local_gradient(gradient: Tensor | None) -> Tensor | None:
    """A gradient that the engine passes, as a plain tensor with memory."""
    if gradient is None:
        return None
    if type(gradient) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = gradient.as_subclass(Tensor)
    return with_memory(gradient)


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor, or the zeros that it stands for: some derivatives of torch, as sgn's, are zeros without memory."""
    return tensor.clone() if tensor._is_zerotensor() else tensor
