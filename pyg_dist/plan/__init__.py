"""Decisions before training: pure functions of the graph, the parts and the options."""

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model

__all__ = ["HaloShare", "Machine", "Model", "Plan", "ShareSizes", "halo_share"]
