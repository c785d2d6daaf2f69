"""The parts of every layout's plan: the constants of a machine and of a model, prices, tables, pictures."""
