"""Several tasks for every client: the same samples, shared out among a client's tasks."""

from __future__ import annotations

import pytest
import torch

from pfedgate import data


def test_tasks_of_a_client_share_out_its_samples() -> None:
    whole = data.load("digits", clients=6, alpha=5.0)
    several = data.load("digits", clients=6, alpha=5.0, tasks=["0-4", "5-9"])
    assert {client.split("/")[0] for client in several.clients} == set(whole.clients)
    assert several.classes == 10
    for client in several.clients:
        first, last = map(int, client.split("/")[1].split("-"))
        labels = torch.cat([several.part(client, part).y for part in ("train", "val", "test")])
        assert first <= int(labels.min())
        assert int(labels.max()) <= last
    assert several.describe()["samples"] == whole.describe()["samples"]


def test_a_single_task_counts_from_zero_and_has_the_same_samples() -> None:
    several = data.load("digits", clients=6, alpha=5.0, tasks=["0-4", "5-9"])
    single = data.load("digits", clients=6, alpha=5.0, tasks=["5-9"])
    assert (single.classes, single.class_names) == (5, tuple("56789"))
    assert set(single.clients) == {client for client in several.clients if client.endswith("/5-9")}
    for client in single.clients:
        for part in ("train", "val", "test"):
            ours, theirs = single.part(client, part), several.part(client, part)
            assert torch.equal(ours.x, theirs.x)
            assert torch.equal(ours.y + 5, theirs.y)


@pytest.mark.parametrize(
    ("tasks", "message"), [(["five"], "ranges of classes such as '0-9'"), (["20-30"], "no client has 3 samples")]
)
def test_mistakes_are_named(tasks: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load("digits", clients=4, tasks=tasks)
