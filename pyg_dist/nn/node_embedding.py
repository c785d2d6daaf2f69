"""Trainable rows for nodes, spread over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyg_dist.data import DistributedData
from pyg_dist.data.typed_storage import TypedNodes
from pyg_dist.errors import DataError, OptionError
from pyg_dist.tensor import NodeTensor, RowTensor


class NodeEmbedding(nn.Module):
    """A trainable row for every node: values, gradients and optimizer state are distributed as ``data.x`` is.

    On the grid layout that is a tile split over all three axes, gathered before use, whose gradient is
    reduce-scattered (Plexus, 3.1 and Alg. 1, lines 2 and 23); on the halo layout, the rank's own rows. Exact.

    Values are drawn from the standard normal distribution, as by ``torch.nn.Embedding``, but keyed by node and
    column: the same for every world size and layout. ``state_dict`` has the whole ``[N, channels]`` matrix in the
    original order (collective), and can be loaded with any layout.

    Args:
        data: the graph; of a graph with types, ``data["author"]``.
        channels: columns.
        dtype: of the values; torch's default dtype unless given.

    Shapes:
        - output: ``[N, channels]`` node tensor

    Raises:
        DataError: ``data`` is not distributed.
        OptionError: ``channels`` is not positive.

    Example:
        >>> embedding = NodeEmbedding(data, 8)
        >>> tuple(embedding().shape)
        (34, 8)
    """

    def __init__(self, data: DistributedData | TypedNodes, channels: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if isinstance(data, DistributedData):
            rows, device = data.graph.feature_sharding(channels), data.graph.device
        elif isinstance(data, TypedNodes):
            rows, device = data.sharding, data.device
        else:
            raise DataError(
                f"NodeEmbedding expected a DistributedData (got {type(data).__name__}): wrap the graph first, and of "
                f"types take one, data['author']"
            )
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise OptionError(f"Expected a positive number of channels (got {channels!r}): give the width of a row")
        self.channels = channels
        local = torch.empty(rows.local_shape(channels), dtype=dtype, device=device)
        self.weight = nn.Parameter(RowTensor.from_local(local, rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values anew."""
        with torch.no_grad():
            self.weight.normal_()

    def forward(self) -> NodeTensor:
        """All rows."""
        return self.weight  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Numbers of rows and columns."""
        return f"{self.weight.shape[0]}, {self.channels}"

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        weight: Any = self.weight
        destination[prefix + "weight"] = weight if keep_vars else weight.detach().full_tensor()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        key, rows = prefix + "weight", self.weight._sharding  # type: ignore[attr-defined]
        value = state_dict.get(key)
        if isinstance(value, Tensor) and not isinstance(value, RowTensor) and value.shape == self.weight.shape:
            local = rows.slice(value.detach().to(self.weight.device))
            state_dict = {**state_dict, key: RowTensor.from_local(local, rows)}
        super()._load_from_state_dict(state_dict, prefix, *args)
