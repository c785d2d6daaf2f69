"""The base of ``DistributedData`` and ``DistributedHeteroData``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.data.storage import BaseStorage

from pyg_dist.backend.session.agreement import one_line
from pyg_dist.errors import MixedRowsError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.row_index import PickedRows


def refused(name: str) -> Callable[..., NoReturn]:
    """A method that raises, since it would change the graph."""

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise MixedRowsError(f"{name} would change or take apart a distributed graph: apply it before DistributedData")

    return method


D = TypeVar("D", bound="DistributedBaseData")


class DistributedBaseData:
    """Methods that data with one type of nodes and with several have in common; all of a rank's part is on one device.

    Names of attributes are in the same order on every rank. PyG's are those of a set, whose order differs by process.
    """

    stores: list[BaseStorage]
    node_stores: list[BaseStorage]
    edge_stores: list[BaseStorage]

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        if issubclass(cls, Batch):
            raise UnsupportedError(
                "A loader or a Batch joins plain graphs (got distributed ones): use one as it is, without a loader; "
                "join several first, DistributedData(Batch.from_data_list(graphs))"
            )
        return super().__new__(cls)

    to_data_list, get_example, concat = refused("to_data_list"), refused("get_example"), refused("concat")

    @property
    def num_graphs(self) -> int:
        """Of a ``Batch``: how many graphs it is made of."""
        pointers = [store["ptr"] for store in self.stores if "ptr" in store]
        if not pointers:
            raise AttributeError("A DistributedData has 'num_graphs' where it is made from a Batch (got one graph)")
        return len(pointers[0]) - 1

    batch_size = num_graphs

    def __len__(self) -> int:
        return self.num_graphs if any("ptr" in store for store in self.stores) else len(self.keys())

    def keys(self) -> list[str]:
        """The names of all attributes."""
        return _distinct(store.keys() for store in self.stores)

    def node_attrs(self) -> list[str]:
        """The names of attributes with a row per node."""
        return _distinct(store.node_attrs() for store in self.node_stores)

    def edge_attrs(self) -> list[str]:
        """The names of attributes with a value per edge; of the edges, too."""
        return _distinct(store.edge_attrs() for store in self.edge_stores)

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError  # of a subclass

    def _set_device(self, device: torch.device) -> None:
        """Note a move to another device, before the attributes are moved."""
        raise NotImplementedError  # of a subclass

    def to(self: D, device: torch.device | str | int, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to ``device``, in place as ``Data.to`` does (not collective).

        Raises:
            UnsupportedError: A device that is not usable here; or names of attributes where something moves: all of
                them move with the edges.

        Example:
            >>> data.to("cpu").x.device
            device(type='cpu')
        """
        try:
            there = torch.empty(0, device=device).device  # with its index
        except Exception as error:  # the class depends on the device and the build of torch
            got = f"got '{device}': {one_line(error)}"
            raise UnsupportedError(
                f"Expected a device that torch can use here ({got}): leave the data on {self._device}"
            ) from None
        if there == self._device:
            return self
        if args:
            raise UnsupportedError(
                f"Expected no names of attributes, since all of them move (got {args}): leave them out"
            )
        self._set_device(there)
        for store in self.stores:
            for name, value in list(store.items()):
                moved = _moved_to(value, there, non_blocking)
                if moved is not value:
                    store[name] = moved
        return self

    def cpu(self: D, *args: str) -> D:
        """Move this rank's part to main memory."""
        return self.to("cpu", *args)

    def cuda(self: D, device: int | str | None = None, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to a GPU."""
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)

    def validate(self, raise_on_error: bool = True) -> bool:
        """True: the graph was checked when it was distributed, and every assignment since."""
        return True


def _distinct(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(names)))


def _moved_to(value: object, device: torch.device, non_blocking: bool) -> object:
    """An attribute on another device (not collective)."""
    if isinstance(value, PickedRows):
        return value.on(device)
    if isinstance(value, RowTensor):
        return RowTensor.from_local(value.to_local().to(device, non_blocking=non_blocking), value._sharding)
    if isinstance(value, DistributedEdgeIndex):
        return value.on(value.graph.to(device))
    return value.to(device) if isinstance(value, Tensor) else value
