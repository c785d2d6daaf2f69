"""Graphs over ranks: one interface, :mod:`~pyg_dist.layout.graph`, and the two layouts that implement it."""
