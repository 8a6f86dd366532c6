"""A federated run, on one machine or as the server of many.

server      the loop: draw → send → train → check → add → result → evaluate → checkpoint
roster      options of a run, its clients, their budgets, who is drawn
endpoint    the client's side, and the exchange in this process · processes: in worker processes
wire        messages · store: private states · checkpoint: a run's folder · metrics: its numbers
"""
