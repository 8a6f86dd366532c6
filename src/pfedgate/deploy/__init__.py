"""The same algorithms on many machines, over Flower.

    settings    an app's recipe with the settings of a run over it
    parcels     what a message carries: text and bytes, nothing else
    roll        what nodes tell of themselves, and what the server knows of clients from that
    fleet       who is there; ask, and wait no longer than the deadline
    grid        the server's exchange: send, check what comes back, hand it on in order
    node        a node's side: its data and its answers;  state: its private states, in its own folder
    flower      ServerApp and ClientApp made of these
    local       a whole fleet on this machine;  certs: keys and certificates;  init: a ready app
    processes, proxy    what `local` starts, ended for sure; what passes between nodes and server, counted

Flower is an extra: this package imports without it, and says what to install when it is needed.
"""

from __future__ import annotations

import importlib.util

HINT = "Flower is not installed: pip install 'pfedgate[flower]' (or flwr==1.41.0)"


class FlowerMissing(ImportError):
    """Something needs the extra `flower`."""


def need_flower() -> None:
    """Fail with what to install, if Flower is not there."""
    if importlib.util.find_spec("flwr") is None:
        raise FlowerMissing(HINT)
