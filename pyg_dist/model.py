"""``distribute``: converts every stock conv and graph norm of a model to its distributed form, in place."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.nn.models.rev_gnn import InvertibleModule
from torch_geometric.nn.pool.connect import FilterEdges
from torch_geometric.nn.pool.select import SelectTopK

from pyg_dist.conv.any_conv import convs_of, distributed_class_of
from pyg_dist.conv.graph_functions import DistributedFilterEdges, DistributedGraphUNet, DistributedSelectTopK
from pyg_dist.conv.hetero_conv import DistributedHeteroConv
from pyg_dist.conv.joined_types import join_types
from pyg_dist.errors import OptionError, UnsupportedError
from pyg_dist.nn.norms import DistributedGraphNorm, DistributedInstanceNorm
from pyg_dist.tensor.functions.layers import DistributedSyncBatchNorm

M = TypeVar("M", bound=nn.Module)


class DistributedGroupAddRev(pyg.GroupAddRev):
    """PyG's ``GroupAddRev`` with activation checkpointing: inputs are kept, where PyG frees and inverts them. Exact.

    PyG's backward runs the convs twice. If the module has running statistics (batch norm), so does this one.
    """

    def _fn_apply(self, args: Any, fn: Any, fn_inverse: Any) -> Any:
        if self.disable:
            return fn(*args)
        counts = any(module.training and getattr(module, "track_running_stats", False) for module in self.modules())
        has_run = False

        def run(*given: Any) -> Any:
            nonlocal has_run
            if has_run and counts:
                with torch.no_grad():
                    fn(*given)
            has_run = True
            return fn(*given)

        return checkpoint(run, *args, use_reentrant=False)

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")


_OWN_FORMS: dict[type, type] = {
    pyg.HeteroConv: DistributedHeteroConv,
    pyg.GraphNorm: DistributedGraphNorm,
    pyg.InstanceNorm: DistributedInstanceNorm,
    nn.SyncBatchNorm: DistributedSyncBatchNorm,
    pyg.GraphUNet: DistributedGraphUNet,
    SelectTopK: DistributedSelectTopK,
    FilterEdges: DistributedFilterEdges,
    pyg.GroupAddRev: DistributedGroupAddRev,
}
_POOLS = (pyg.ASAPooling, pyg.ClusterPooling, pyg.EdgePooling, pyg.PANPooling)
_REFUSED: dict[type, str] = {
    pyg.AttentiveFP: "adds nodes that stand for graphs, and edges to them",
    pyg.WLConv: "sorts all edges",
    **dict.fromkeys(_POOLS, "makes nodes and edges of all edges"),
}
"""PyG's modules (no convs) whose use of ``edge_index`` no rank can compute. Others raise when called."""


def distribute(model: M) -> M:
    """Convert every conv of ``model`` to take the ``edge_index`` of a :class:`~pyg_dist.DistributedData` (exact).

    Convs are converted in place as by :func:`~pyg_dist.conv.DistributedConv`, and so are PyG's norms over a graph;
    ``model`` may be a conv itself. Everything else stays: parameters, buffers, hooks, ``state_dict`` keys, modules that
    are used in several places, optimizers that hold the parameters. The models of PyG (``GraphSAGE``, ``GCN``, ``GAT``,
    ``GIN``, ``PNA``, ``EdgeCNN``, ``Sequential`` ...) work. On plain tensors in one process the model computes what it
    did before. Not collective.

    Args:
        model: any module.

    Returns:
        ``model`` itself.

    Raises:
        UnsupportedError: A conv, or another module of PyG that needs the whole graph, cannot be distributed; then no
            conv has been converted.

    Example:
        >>> from torch_geometric.nn.models import GAT
        >>> model = distribute(GAT(16, 32, num_layers=2, out_channels=7, heads=4))
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"distribute expected a model (got {type(model).__name__}): pass an nn.Module")
    swaps: list[tuple[nn.Module, type]] = []
    for path, module in model.named_modules():
        _require_supported(module, path)
        if type(module) in _OWN_FORMS:
            swaps.append((module, _OWN_FORMS[type(module)]))
    for path, conv, is_inner in convs_of(model):
        try:
            swaps.append((conv, distributed_class_of(conv, is_inner)))
        except UnsupportedError as error:
            raise UnsupportedError(f"distribute stopped at {path or 'the model'!r}: {error.message}") from error
    for module, class_ in swaps:
        module.__class__ = class_
    for module in model.modules():
        if isinstance(module, fx.GraphModule):
            join_types(module)
    return model


def _require_supported(module: nn.Module, path: str) -> None:
    """Refuse a module that would fail at its first call; the message names its path in the model."""
    name = type(module).__name__
    if type(module) in _REFUSED:
        raise UnsupportedError(
            f"distribute stopped at {path or 'the model'!r}: {name} {_REFUSED[type(module)]}, which no rank has: leave "
            f"the model stock, on the plain Data"
        )
    has_form = type(module) in (pyg.GroupAddRev, DistributedGroupAddRev)
    if isinstance(module, InvertibleModule) and not module.disable and not has_form:
        raise UnsupportedError(
            f"distribute stopped at {path or 'the model'!r}: {name} frees the memory of rows that lie on several "
            f"ranks, to compute them again: pass disable=True"
        )
