"""The adjacency matrix and the features in tiles on a three-dimensional mesh."""
