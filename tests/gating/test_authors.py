"""The authors' departures from their paper (`benchmarks/authors.py`): all run, and published densities come out."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.toys import clusters, local, plain_mlp, task

from pfedgate.algorithms.pfedgate.tiles import BLOCKS
from pfedgate.core.types import Card
from pfedgate.models import build

# The gate of a tiny model is larger than the paper's share of it; that is not what is tested here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the gate has")]


@pytest.fixture
def authors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("authors")


@pytest.mark.parametrize(("share", "masks", "density"), [(0.3, 1, 0.2425), (0.5, 16, 0.432)])
def test_few_masks_of_one_density_are_possible(authors: Any, share: float, masks: int, density: float) -> None:
    gated = authors.authors_gate(build("cnn_cifar10"), torch.zeros(2, 3, 32, 32), authors.AUTHORS - {"flat_input"})
    gated.rebudget(share)
    rng, seen = np.random.default_rng(0), {}
    for _ in range(300):
        mask = gated.plan.keep.copy()
        mask[gated.plan.optional] = gated.selector.select(rng.random(len(gated.plan.optional)))
        seen[mask.tobytes()] = gated.plan.live(mask).density
    assert len(seen) == masks
    assert list(seen.values()) == pytest.approx([density] * masks, abs=5e-4)


def test_every_switch_trains_alone_and_all_do_together(authors: Any) -> None:
    given = replace(task(plain_mlp), example=torch.zeros(4, 6))
    client = local(clusters())
    client = replace(client, card=Card("c0", client.n, 0.5))
    for departures in [*([name] for name in authors.NUMBERS), sorted(authors.AUTHORS)]:
        algorithm = authors.Released(given, departures=tuple(departures), resources="params")
        got = algorithm.init_server(0)
        private = algorithm.init_client(got, client)
        update, after = algorithm.train(got, private, client)
        assert algorithm.check(got, update) is None
        assert 0 < update.metrics["density"] <= 0.5
        assert any(not torch.equal(after[name], private[name]) for name in private), departures
        dense = len(update.shared[BLOCKS]) == algorithm.tiles.count
        assert dense == ("dense_upload" in departures), departures
    with pytest.raises(ValueError, match="did you mean 'D17'"):
        authors.switches(["D177"])
