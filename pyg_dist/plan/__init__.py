"""Everything decided before training: pure functions of the graph, the parts and the options."""

from pyg_dist.plan.halo import HaloShare, halo_share
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import Model
from pyg_dist.plan.plan import Plan
from pyg_dist.plan.sizes import ShareSizes

__all__ = ["HaloShare", "Machine", "Model", "Plan", "ShareSizes", "halo_share"]
