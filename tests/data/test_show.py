"""Tables and pictures of a partition."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pfedgate.data import load, synthetic
from pfedgate.data.show import facts, header, plot, table


def test_table_lists_every_client_with_its_numbers():
    federation = load("digits", clients=8, novel=0.25)
    lines = table(federation)
    titles = header(federation)
    assert len(lines) == 8
    assert all(len(line) == len(titles) for line in lines)
    assert [line[0] for line in lines] == list(federation.ids)
    assert [line[0] for line in lines if line[1] == "novel"] == list(federation.novel)
    for line in lines:
        assert sum(line[2:5]) == sum(line[6:])
        assert line[5] == sum(count > 0 for count in line[6:])
    assert len(table(federation, limit=3)) == 3


def test_facts_tell_what_was_repaired():
    plain = facts(load("digits", clients=5))
    assert "repaired" not in plain
    assert "alpha=0.4" in plain["partition"]
    told = facts(load("digits", clients=80, alpha=0.01))
    assert "samples moved" in told["repaired"]


@pytest.mark.parametrize("kind", ["auto", "bubbles", "heatmap"])
def test_plot_draws_a_picture_that_is_not_empty(tmp_path, kind):
    file = plot(load("digits", clients=8, novel=0.25), tmp_path / "p.png", kind=kind)
    with Image.open(file) as picture:
        assert min(picture.size) > 200
        assert np.asarray(picture.convert("L")).std() > 5


def test_plot_limits_the_clients_and_refuses_other_kinds(tmp_path):
    assert plot(synthetic(clients=300), tmp_path / "p.svg", limit=50).read_text().startswith("<svg")
    with pytest.raises(ValueError, match="bubbles or heatmap"):
        plot(load("digits"), tmp_path / "p.png", kind="pie")
