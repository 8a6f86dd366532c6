"""What the study of several tasks counts: one model and its gates against a model for each task."""

from __future__ import annotations

from pathlib import Path

import pytest

from pfedgate.studies import multitask, reproduce


@pytest.mark.slow
def test_one_model_with_a_gate_per_task_is_stored_once(tmp_path: Path) -> None:
    files = reproduce(["multitask"], scale="tiny", out=tmp_path)
    page = next(file for file in files if file.suffix == ".md").read_text()
    for way in multitask.WAYS:
        assert way.name in page


def test_numbers_of_a_device_with_all_tasks() -> None:
    def run(tasks: list[str], accuracy: float, up: float) -> dict[str, object]:
        clients = {f"{who}/{task}": [10, accuracy] for who in ("a", "b") for task in tasks}
        return {"clients": clients, "model": 1000, "private": 30.0, "up": up, "flops": 8.0}

    one = multitask.together([run(["0-9", "10-35"], 0.5, 400.0)])
    two = multitask.together([run(["0-9"], 0.9, 300.0), run(["10-35"], 0.7, 100.0)])
    assert (one["disk"], one["down"], one["up"]) == (1060.0, 1000, 200.0)
    assert (two["disk"], two["down"], two["up"]) == (2060.0, 2000, 200.0)
    assert two["tasks"] == {"0-9": pytest.approx(0.9), "10-35": pytest.approx(0.7)}
    assert two["accuracy"] == pytest.approx(0.8)
