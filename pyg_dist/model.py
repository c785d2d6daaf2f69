"""``distribute``: a whole model of stock parts, made ready for distributed data."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch_geometric.nn import GraphNorm, InstanceNorm, MessagePassing

from pyg_dist.conv.any_conv import distributed_class
from pyg_dist.errors import OptionError, UnsupportedError
from pyg_dist.nn.graph_norms import DistributedGraphNorm, DistributedInstanceNorm

M = TypeVar("M", bound=nn.Module)

_NORMS: dict[type, type] = {GraphNorm: DistributedGraphNorm, InstanceNorm: DistributedInstanceNorm}


def distribute(model: M) -> M:
    """Let every conv of ``model`` take the ``edge_index`` of a :class:`~pyg_dist.DistributedData` (exact).

    Convs are swapped in place as :func:`~pyg_dist.conv.DistributedConv` does, and PyG's norms over a graph likewise; a
    model that is a conv, too. Everything else stays: parameters, buffers, hooks, ``state_dict`` keys, modules that are
    used in several places, optimizers that hold the parameters. The models of PyG (``GraphSAGE``, ``GCN``, ``GAT``,
    ``GIN``, ``PNA``, ``EdgeCNN``, ``Sequential`` ...) work. On plain tensors in one process the model computes what it
    did. Not collective.

    Args:
        model: any module.

    Returns:
        ``model`` itself.

    Raises:
        UnsupportedError: A conv of it cannot be distributed; no conv has been swapped then.

    Example:
        >>> from torch_geometric.nn.models import GAT
        >>> model = distribute(GAT(16, 32, num_layers=2, out_channels=7, heads=4))
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"distribute expected a model (got {type(model).__name__}): pass an nn.Module")
    swaps: list[tuple[nn.Module, type]] = []
    for path, module in model.named_modules():
        if type(module) in _NORMS:
            swaps.append((module, _NORMS[type(module)]))
        elif isinstance(module, MessagePassing) and not getattr(module, "is_distributed", False):
            stock: Any = type(module)
            try:
                swaps.append((module, distributed_class(stock)))
            except UnsupportedError as error:
                raise UnsupportedError(f"distribute stopped at {path or 'the model'!r}: {error.message}") from error
    for module, class_ in swaps:
        module.__class__ = class_
    return model
