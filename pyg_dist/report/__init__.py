"""What commands read, for scripts: :mod:`pyg_dist.report.planned_graph`."""
