"""Distributed training for PyTorch Geometric: change three lines of a script, keep every number.

>>> from pyg_dist.conv import DistributedSAGEConv as SAGEConv
>>> from pyg_dist import DistributedData
>>> data = DistributedData(dataset[0])  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError, version

from pyg_dist.backend.session import devices as _devices
from pyg_dist.backend.session import generators as _generators
from pyg_dist.backend.session import leaving as _leaving
from pyg_dist.backend.session import steps as _steps
from pyg_dist.backend.session.leaving import stop_requested
from pyg_dist.backend.session.session import init, is_main, rank, world_size
from pyg_dist.cli.profile import Profile, profile
from pyg_dist.data import DistributedData, save_graph
from pyg_dist.graph import adjacency as _adjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.model import distribute
from pyg_dist.tensor import EdgeTensor, NodeTensor

try:
    __version__ = version("pyg-dist")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

_steps.configure_log()
_generators.start_alike()
_devices.choose_when_started()
_leaving.way_out.watch_start()
_adjacency.install()

__all__ = [
    "DistributedData",
    "DistributedEdgeIndex",
    "EdgeTensor",
    "NodeTensor",
    "Profile",
    "__version__",
    "distribute",
    "init",
    "is_main",
    "profile",
    "rank",
    "save_graph",
    "stop_requested",
    "world_size",
]
