"""How a round reaches clients."""
