"""``ShardedEdges``: an ``edge_index`` over ranks, a script's or what the code of a conv gets, as a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError, UnsupportedError
from pyg_dist.graph.protocol import End
from pyg_dist.tensor.calling_code import COMPILED, EdgeHandle, of_whole_graphs
from pyg_dist.tensor.registry import Args, Function, Kwargs, dims_of, functions, public_name, writes
from pyg_dist.tensor.row_index import RowIndex
from pyg_dist.tensor.row_tensor import local_tensors

S = TypeVar("S", bound="ShardedEdges")


class ShardedEdges(EdgeHandle):
    """An ``edge_index``, ``[2, E]``, whose edges lie on several ranks: a script's, or what the code of a conv gets.

    It is a tensor since scripts, PyG and convs test ``isinstance(edge_index, Tensor)``. Its ends, its reverse and parts
    of it are distributed as well. All other functions gather all edges (collective), and give plain tensors.
    """

    @classmethod
    def empty(cls: type[S]) -> S:
        """One without attributes, on a device without memory: what torch does not dispatch raises where it reads it."""
        # How many edges there are is counted when it is first read: in a batch that is collective.
        return torch.empty(2, 1, dtype=torch.int64, device="meta").as_subclass(cls)

    def end(self, end: End) -> RowIndex:
        """Global ids of the sources (0) or targets (1), an edge tensor."""
        raise NotImplementedError(f"{type(self).__name__}.end")  # by each kind of edges

    @cached_property
    def reversed(self) -> ShardedEdges:
        """The same edges from targets to sources (collective at the first use)."""
        raise NotImplementedError(f"{type(self).__name__}.reversed")  # by each kind of edges

    def some(self, index: object) -> ShardedEdges | None:
        """The edges that ``edge_index[:, index]`` picks; ``None``: those are plain (may be collective)."""
        raise NotImplementedError(f"{type(self).__name__}.some")  # by each kind of edges

    graph: Any

    def full_tensor(self) -> Tensor:
        return torch.stack([self.end(0).full_tensor(), self.end(1).full_tensor()])

    def global_shape(self) -> torch.Size:
        """``[2, E]`` of the whole graph."""
        raise NotImplementedError(f"{type(self).__name__}.global_shape")  # by each kind of edges

    def _item(self, index: Any) -> object:
        """``edge_index[index]``, where it is distributed; ``None`` elsewhere."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if type(first) is int and -2 <= first < 2 and len(rest) < 2:
            end = self.end(first % 2)
            return end if rest in ([], [slice(None)], [...]) else end[rest[0]]
        if _swaps_ends(first, rest):
            return self.reversed
        has_both = first is ... or (isinstance(first, slice) and first == slice(None))
        return self.some(rest[0]) if has_both and len(rest) == 1 else None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.end(0), self.end(1)))

    def __copy__(self) -> ShardedEdges:
        return self  # immutable

    def __deepcopy__(self, memo: object) -> ShardedEdges:
        return self

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    def __dir__(self) -> list[str]:
        return list(object.__dir__(self))

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedError(COMPILED)
        named = kwargs or {}
        edges = args[0] if args else named.get("input")
        if isinstance(edges, ShardedEdges):
            if func in ALIKE or func in _SIZES:
                given: Tensor = edges
                if func in _SIZES:
                    given = torch.empty(edges.global_shape(), dtype=torch.int64, device="meta")
                with local_tensors():
                    return func(given, *args[1:], **named)
            if func == Tensor.device.__get__:
                return edges.graph.device
            if func in _ON_DEVICE and not of_whole_graphs():  # GraphSAINT's samplers ask for is_cuda first
                return func(torch.empty(0, dtype=torch.int64, device=edges.device), *args[1:], **named)
            rest = (*args[1:], *(value for name, value in named.items() if name != "input"))
            found: object = None
            if func is Tensor.__getitem__:
                found = edges._item(*rest)
            elif func in (Tensor.unbind, torch.unbind) and rest in ((), (0,), (-2,)):
                found = tuple(edges)
            elif func in (Tensor.flip, torch.flip) and dims_of(rest[0] if len(rest) == 1 else rest, 2) == (0,):
                found = edges.reversed
            if found is not None:
                return found
        return cls.of_all(func, args, kwargs)

    @classmethod
    def of_all(cls, func: Function, args: Args, kwargs: Kwargs | None) -> object:
        """``func`` of plain tensors of all edges in place of distributed ones (collective).

        Raises:
            MixedRowsError: It would change them.
        """
        written = args[:1] if writes(func) else ((kwargs or {}).get("out"),)
        if written and isinstance(written[0], ShardedEdges):
            raise MixedRowsError(f"{public_name(func)} would change a distributed edge_index, which is fixed: copy it")
        return func(*map(_all_edges, args), **{key: _all_edges(value) for key, value in (kwargs or {}).items()})


def _all_edges(given: Any) -> Any:
    """An argument with the plain tensor of all edges in place of distributed ones (collective)."""
    if type(given) in (list, tuple):
        return type(given)(map(_all_edges, given))
    return given.full_tensor() if isinstance(given, ShardedEdges) else given


def _swaps_ends(first: Any, rest: list[object]) -> bool:
    """Whether ``edge_index[first, *rest]`` exchanges sources and targets: by ``[1, 0]``, alone or with all edges."""
    if isinstance(first, Tensor):
        first = first.tolist() if first.shape == (2,) and first.dtype in (torch.int32, torch.int64) else None
    is_list = isinstance(first, list) and not any(isinstance(k, bool) for k in first)  # [True, False] is a mask
    return is_list and first == [1, 0] and rest in ([], [slice(None)], [...])


_SIZES = {Tensor.shape.__get__, Tensor.nbytes.__get__, Tensor.size, Tensor.stride, Tensor.numel, torch.numel}  # type: ignore[attr-defined]
ALIKE = {
    *functions(
        "dtype.__get__", "layout.__get__", "ndim.__get__", "requires_grad.__get__", "requires_grad.__set__",
        "is_leaf.__get__", "is_sparse.__get__", "is_nested.__get__", "is_quantized.__get__", "grad_fn.__get__",
        "grad.__get__", "itemsize.__get__", "_version.__get__", "_backward_hooks.__get__", "dim", "is_floating_point",
        "is_complex", "is_contiguous", "element_size", "__len__", "__hash__", "is_pinned", "is_shared", "is_inference",
        "is_signed", "is_conj", "is_neg", "is_xpu.__get__", "is_mkldnn.__get__", "is_mps.__get__", "_is_view",
        "is_sparse_csr.__get__", "retains_grad.__get__", namespaces=(Tensor, torch),
    )
}  # fmt: skip
"""Questions that all edges answer alike."""
_ON_DEVICE = {
    *functions(
        "is_cuda.__get__", "is_cpu.__get__", "is_meta.__get__", "get_device", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_tensor", namespaces=(Tensor,),
    )
}  # fmt: skip
