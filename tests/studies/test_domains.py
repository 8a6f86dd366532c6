"""The study of domains: what its rows are told is what loaders deal."""

from __future__ import annotations

import torch

from pfedgate import data
from pfedgate.studies import declare, domains


def test_clients_are_told_the_domain_that_their_images_are_turned_by() -> None:
    world = declare.QUICK.worlds["digits"]
    recipe = declare.recipe_of(domains.TOLD[0], domains.DIGITS, world, declare.QUICK, seed=3)
    given = {"alpha": 0.3, "clients": world.clients, "seed": 3}
    plain, turned = data.load("digits", **given), data.load("digits", domains="rotate", **given)
    told = recipe.tables()["algorithm"]["told"]
    assert list(told) == list(turned.clients)
    for client in turned.clients:
        before, after = plain.part(client, "train").x, turned.part(client, "train").x
        assert torch.equal(before.rot90(told[client], (2, 3)), after)


def test_where_nobody_differs_all_are_told_the_same() -> None:
    recipe = declare.recipe_of(domains.TOLD[0], domains.PLAIN, declare.QUICK.worlds["fashion"], declare.QUICK)
    assert set(recipe.tables()["algorithm"]["told"].values()) == {0}


def test_every_row_that_a_claim_names_is_in_the_table() -> None:
    rows = {row.name for row in domains.DOMAINS.rows}
    assert {name for claim in domains.DOMAINS.claims for name in (*claim.ours, *claim.others)} <= rows
