"""Clients that differ in looks: the same samples, turned or inverted, by the seed and the client alone."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedgate.data import from_arrays, load
from pfedgate.data.federation import PARTS


def same_look(plain: torch.Tensor, seen: torch.Tensor, domain: int, kinds: str) -> bool:
    turned = plain.rot90(domain, (2, 3)) if "rotate" in kinds else plain
    return torch.equal(255 - turned if "negate" in kinds and domain % 2 else turned, seen)


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.sampled_from(["rotate", "negate", "rotate+negate"]),
    clients=st.integers(2, 15),
    seed=st.integers(0, 50),
    novel=st.sampled_from([0.0, 0.4]),
)
def test_each_client_has_one_look_and_the_samples_it_would_have_anyway(kinds, clients, seed, novel):
    options = {"clients": clients, "seed": seed, "novel": novel}
    plain, other = load("digits", **options), load("digits", domains=kinds, **options)
    number = 4 if "rotate" in kinds else 2
    counts = [0] * number
    for client in plain.ids:
        every = [(plain.part(client, part), other.part(client, part)) for part in PARTS]
        assert all(torch.equal(a.rows, b.rows) and torch.equal(a.y, b.y) for a, b in every)
        looks = [d for d in range(number) if all(same_look(a.x, b.x, d, kinds) for a, b in every)]
        assert len(looks) == 1
        counts[looks[0]] += 1
    assert max(counts) - min(counts) <= 1, "domains are dealt evenly"


def test_several_domains_inside_a_client():
    plain, other = load("digits", clients=5), load("digits", clients=5, domains="rotate", domains_each=2)
    for client in plain.ids:
        a, b = plain.part(client, "train"), other.part(client, "train")
        looks = {d for i in range(a.n) for d in range(4) if same_look(a.x[i : i + 1], b.x[i : i + 1], d, "rotate")}
        assert len(looks) >= 2
        shares = [
            np.mean([same_look(a.x[i : i + 1], b.x[i : i + 1], d, "rotate") for i in range(a.n)]) for d in range(4)
        ]
        assert sorted(shares)[-2] > 0.3, "about half of the samples in each"
    assert other.describe()["domains_each"] == 2


def test_looks_cost_nothing_until_samples_are_read_and_travel_with_the_federation():
    federation = load("digits", clients=5, domains="rotate+negate").share()
    before = federation.pool.pool.x(torch.arange(10)).clone()
    part = federation.part(federation.ids[1], "train")
    assert part.x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pickle.loads(pickle.dumps(federation)).part(federation.ids[1], "train").x, part.x)
    assert torch.equal(federation.pool.pool.x(torch.arange(10)), before)
    floats = from_arrays(
        np.random.rand(40, 3, 8, 8).astype("f"), np.arange(40) % 2, owners=[0, 1] * 20, domains="negate"
    )
    negative = [float(floats.part(client, "train").x.max()) <= 0 for client in floats.ids]
    assert sorted(negative) == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": "rotated"}, "did you mean 'rotate'"),
        ({"domains": "negate", "domains_each": 3}, "1 to 2"),
    ],
)
def test_wrong_domains_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load("digits", **options)
    with pytest.raises(ValueError, match="for images"):
        from_arrays(np.zeros((40, 5)), np.arange(40) % 2, owners=[0, 1] * 20, domains="rotate")
    with pytest.raises(ValueError, match="square"):
        from_arrays(
            np.zeros((40, 5, 6, 3), np.uint8), np.arange(40) % 2, owners=[0, 1] * 20, domains="rotate", channels="last"
        )
