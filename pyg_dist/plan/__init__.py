"""Everything decided before training: pure functions of the graph, the parts and the options."""

from pyg_dist.plan.halo.plan import Plan
from pyg_dist.plan.halo.share import HaloShare, halo_share
from pyg_dist.plan.halo.sizes import ShareSizes
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import Model

__all__ = ["HaloShare", "Machine", "Model", "Plan", "ShareSizes", "halo_share"]
