"""Gate any nn.Module: blocks, gate, budget, execution."""
