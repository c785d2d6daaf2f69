"""Differentiable functions across ranks that belong to no layout."""
