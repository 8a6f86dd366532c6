"""What a practitioner would take first: dense networks as cheap as a gated one, trained like any other.

"mask" has the very shape that the gates' common mask leaves, which `compact` would write; "even" is narrower by the
same share in every layer, with as many FLOPs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from pfedgate import experiment
from pfedgate.algorithms.pfedgate import PFedGate
from pfedgate.algorithms.pfedgate.personal import fresh_gate
from pfedgate.config.recipe import resolve
from pfedgate.core.modules import initial
from pfedgate.core.state import under
from pfedgate.core.types import Card, DataShape
from pfedgate.gating.slicing.compact import compact
from pfedgate.training.workspace import flops_per_sample

STEPS = 20  # of bisection: finer than one unit of any layer here


@lru_cache(maxsize=64)
def sizes(model: str, classes: int, shape: tuple[int, ...], budget: float) -> tuple[int, ...]:
    """The hidden sizes that a fresh gate leaves at a budget of all resources.

    >>> sizes("cnn_digits", 10, (1, 8, 8), 0.3) < (32, 64, 128)
    True
    """
    recipe = resolve({"model": model, "algorithm": {"name": "pfedgate", "resources": "all"}})
    algorithm = experiment.build(recipe, DataShape(classes, shape, torch.float32))
    assert isinstance(algorithm, PFedGate)
    card, got = Card("any", 1, budget), initial(algorithm.task, 0)
    gate = fresh_gate(algorithm._workspace(), algorithm._budget(card), 0)
    small = compact(algorithm.predictor(got, under("gate/", gate), card), algorithm.task.inputs.batch())
    layers = [layer for layer in small.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return tuple(layer.weight.shape[0] for layer in layers[:-1])


@lru_cache(maxsize=64)
def settings(kind: str, budget: float, model: str, classes: int, shape: tuple[int, ...]) -> tuple[str, object]:
    """The option of the model that makes it so narrow.

    >>> settings("mask", 0.3, "cnn_digits", 10, (1, 8, 8))[0]
    'model.widths'
    """
    widths = sizes(model, classes, shape, budget)
    if kind == "mask":
        return "model.widths", list(widths)

    def flops(**options: object) -> float:
        network = experiment.Network(model, shape, classes, tuple(options.items()))
        return flops_per_sample(network, None, torch.Size(shape), torch.float32, True)

    most, low, high = flops(widths=widths), 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if flops(width=middle) <= most else (low, middle)
    return "model.width", round(low, 3)
