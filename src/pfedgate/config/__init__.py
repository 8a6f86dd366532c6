"""Recipes: what to run, as TOML, as a mapping or as settings on a command line."""
