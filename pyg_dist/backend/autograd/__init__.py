"""What is differentiable across ranks and belongs to no layout."""
