"""The grid layout's messages: mesh, collectives, redistribution, operator."""
