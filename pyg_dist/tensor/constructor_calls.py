"""Calls of ``torch.Tensor(x)``, ``torch.LongTensor(x)``, ``y.new(x)``, which read the memory of ``x`` and ask nobody.

They first ask whether ``x`` is a storage, as ``isinstance`` does: Python then reads ``x.__class__``. So that of a row
tensor is a property, which looks at what the calling instruction calls.
"""

from __future__ import annotations

import builtins
import dis
from functools import lru_cache
from types import CodeType, FrameType

import torch

_NAMES = {"new", "Tensor", *(kind.__name__ for kind in torch._tensor_classes)}


def is_constructor_call(frame: FrameType) -> bool:
    """Whether what runs in ``frame`` is a call of one of these constructors."""
    code, place = frame.f_code, frame.f_lasti
    if code.co_code[place + 1] == 2:  # the number of arguments: `isinstance` has two, these have one
        return False
    name = _called(code, place)
    if not name or name in _NAMES:
        return bool(name)
    names = (frame.f_locals, frame.f_globals, vars(builtins))
    value = next((known[name] for known in names if name in known), None)
    return isinstance(value, type(torch.LongTensor)) or (isinstance(value, type) and issubclass(value, torch.Tensor))


@lru_cache(maxsize=1024)
def _called(code: CodeType, place: int) -> str:
    """The name of what the instruction at ``place`` calls with one argument; ``""``: it calls nothing by a name."""
    before = list(dis.get_instructions(code))
    before = before[: next(k for k, i in enumerate(before) if i.offset == place) + 1]
    call = before.pop()
    if not call.opname.startswith("CALL") or (call.arg != 1 and call.opname != "CALL_FUNCTION_EX"):
        return ""
    if before[-1].opname == "PRECALL":
        before.pop()
    depth = 0  # of what has been put on the stack, read backwards: until that is the argument
    while before and depth < 1:
        instruction = before.pop()
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    while before and before[-1].opname in ("PUSH_NULL", "CACHE", "EXTENDED_ARG"):
        before.pop()
    is_named = bool(before) and before[-1].opname.startswith("LOAD_") and isinstance(before[-1].argval, str)
    return before[-1].argval if is_named else ""
