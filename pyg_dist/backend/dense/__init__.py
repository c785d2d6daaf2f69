"""Dense functions of one rank that torch has no fast form of."""
