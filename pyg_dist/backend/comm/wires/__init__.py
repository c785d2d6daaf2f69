"""How tensors move among the ranks of a group: one class for each library that carries messages."""
