"""The private gate of a client: network, config, features, norms, start."""
