"""Everything decided before training: pure functions of the graph, the parts and the options."""

from pyg_dist.plan.halo import HaloShare, halo_share
from pyg_dist.plan.plan import Plan, ShareSizes

__all__ = ["HaloShare", "Plan", "ShareSizes", "halo_share"]
