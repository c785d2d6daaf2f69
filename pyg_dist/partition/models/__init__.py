"""What a solver is given: graphs and hypergraphs with weights, made from the edges."""
