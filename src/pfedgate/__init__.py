"""pfedgate: personalised federated learning with sparse gates."""

__version__ = "0.1.0"
