"""The halo layout's messages: exchange, transfer, operator."""
