"""Plans of the halo layout: remote edges, vertex cover, transfers, sizes, prices."""
