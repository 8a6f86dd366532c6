"""The same algorithms on many machines, over Flower.

    messages    parcels, and what a node says of itself at the roll call
    fleet       the nodes: ask them, and wait no longer than the deadline
    grid        the server's exchange: send, check each answer, hand updates on in order
    node        a node's side: its data, its answers, its private states
    flower      ServerApp and ClientApp made of these
    starter     the files a fleet starts from: a ready app, keys and certificates
    local       a whole fleet on this machine;  children: its processes, ended for sure

Flower is an extra: this package imports without it, and names the extra when it is needed.
"""

from __future__ import annotations

import importlib.util


class FlowerMissing(ImportError):
    """Something needs the extra `flower`."""


def need_flower(*others: str) -> None:
    """Fail, and name the extra to install, if Flower or one of the `others` is missing."""
    missing = [name for name in ("flwr", *others) if importlib.util.find_spec(name) is None]
    if missing:
        raise FlowerMissing(f"Flower is not installed ({', '.join(missing)}): pip install 'pfedgate[flower]'")
