"""Plans of the grid layout: tilings, node orders, work, prices of meshes."""
