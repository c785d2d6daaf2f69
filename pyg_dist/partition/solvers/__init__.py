"""Libraries that solve a model, one a file."""
