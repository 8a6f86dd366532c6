"""A federated run: server (the loop), roster, endpoint (the client's side), processes, store, wire, metrics."""
