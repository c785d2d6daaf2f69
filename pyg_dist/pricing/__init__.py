"""What every layout's plan is made of: the constants of a machine and of a model, prices, tables, pictures."""
