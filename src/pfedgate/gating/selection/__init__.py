"""The choice of blocks under a budget."""
