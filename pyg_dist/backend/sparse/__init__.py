"""Sparse patterns and matrices of one rank, and their products."""
