"""The only batch loops: fit (one client), stacked (many), on a workspace, by steppers."""
