"""A client's work: the only batch loops of the library.

fit         train, score and scan for one client · stacked: train many small clients at once
workspace   a network over one vector, its FLOPs, and optimisers of the vector
"""
