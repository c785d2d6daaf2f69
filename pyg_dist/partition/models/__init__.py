"""Inputs of the solvers: graphs and hypergraphs with weights, made from the edges."""
