"""A fleet of unequal devices: who owns which device, and how long it takes for what it was asked to do.

`devices` reads profiles (shipped fleets, CSV, TOML, FedScale's traces), gives each client one and turns it into a
budget; `clock` turns counted FLOPs and bytes into virtual seconds and joules; `pace` has the options. Nothing here
knows of rounds or methods; `pfedgate.engine.policies` decides by these times whom a round waits for.
"""

from pfedgate.fleet.clock import Clock, Cost
from pfedgate.fleet.devices import Device, Fleet, names

__all__ = ["Clock", "Cost", "Device", "Fleet", "names"]
