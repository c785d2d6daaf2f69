"""Where a graph meets node tensors: one interface, :mod:`~pyg_dist.layout.graph`, and two layouts behind it."""
