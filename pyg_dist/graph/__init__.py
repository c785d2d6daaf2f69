"""Graphs over ranks: one interface, :mod:`~pyg_dist.graph.protocol`, and the two layouts that implement it."""
