"""The graph of a ``plan``, as the commands read it (:mod:`pyg_dist.cli.inputs`), under the name that scripts know."""

from pyg_dist.cli.inputs import read_planned_graph as read_planned_graph
