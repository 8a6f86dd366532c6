"""Power cuts: after each, a run goes on to the same bytes, or begins anew if nothing of it was on record."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.support.powercut import KILL, MODES, Disk, restore
from tests.support.world import private_digests

from pfedgate import experiment
from pfedgate.core.state import digest
from pfedgate.runs import folder as runfolder

RECIPE: dict[str, Any] = {
    "data": {"name": "synthetic", "clients": 4, "samples_per_client": 30},
    "model": {"name": "mlp", "hidden": [96]},
    "algorithm": {"name": "pfedgate"},
    "train": {"rounds": 3, "batch": 8},
    "clients": {"budget": 0.5, "fraction": 0.5},
    "evaluate": {"every": 1},
    "run": {"workers": 1, "stack": 0},
}
FILES = ("metrics.jsonl", "participation.jsonl", "gates.jsonl", "clients.csv")


def contents(folder: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on interruptions."""
    run = runfolder.load(folder)
    best = run.store("best")
    return {
        **{name: (folder / name).read_bytes() for name in FILES},
        "states": (digest(run.server()), digest(run.server("best"))),
        "private": private_digests(folder),
        "best": {client: digest(best.get(client) or {}) for client in best.clients()},
        "rounds": run.summary["rounds"],
    }


def finish(folder: Path) -> None:
    """Go on after a power cut as a person would."""
    if (folder / "config.toml").exists():
        experiment.resume(folder)
    else:
        experiment.run(RECIPE, out=folder)


def cut(tmp_path: Path, every: int, checkpoints: int = 1, modes: tuple[str, ...] = MODES) -> int:
    """Cut the power, or kill, at every so many operations of a run; how often that was."""
    recipe = {**RECIPE, "run": {**RECIPE["run"], "checkpoint_every": checkpoints}}
    experiment.run(recipe, out=tmp_path / "whole" / "run")
    whole = contents(tmp_path / "whole" / "run")
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", lambda at: at % every == 0, modes)
    with disk.watching():
        experiment.run(recipe, out=tmp_path / "disk" / "run")
    assert contents(tmp_path / "disk" / "run") == whole
    faults = []
    for at, (operation, mode, image) in enumerate(disk.images):
        place = restore(image, tmp_path / f"cut-{at}")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*going on from the checkpoint before")  # none is damaged
                finish(place / "run")
            after = contents(place / "run")
            if after != whole:
                faults.append(f"{operation}, {mode}: {[name for name in whole if after[name] != whole[name]]}")
        except Exception as error:
            faults.append(f"{operation}, {mode}: {type(error).__name__}: {error}")
        shutil.rmtree(place)
    assert not faults, f"{len(faults)} of {len(disk.images)} cuts:\n" + "\n".join(faults[:10])
    return len(disk.images)


def test_power_cuts(tmp_path: Path) -> None:
    assert cut(tmp_path, every=11) >= 30


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_kills_cost_no_line(checkpoints: int, tmp_path: Path) -> None:
    """Nor one of gates.jsonl, which is written when the checkpoint is on disk."""
    assert cut(tmp_path, every=9, checkpoints=checkpoints, modes=KILL) >= 10


@pytest.mark.long
def test_power_cuts_at_every_operation(tmp_path: Path) -> None:
    each, second = cut(tmp_path / "each", every=1), cut(tmp_path / "second", every=2, checkpoints=2)
    print(f"{each} + {second} power cuts")
    assert each + second >= 500


def test_the_disk_forgets(tmp_path: Path) -> None:
    """The simulation itself: a name without its folder's flush, contents without the file's."""
    import os

    disk = Disk(tmp_path)
    with disk.watching():
        (tmp_path / "a").write_bytes(b"sure")
        with (tmp_path / "a").open("rb+") as file:
            os.fsync(file.fileno())
            file.seek(0, 2)
            file.write(b" and more")
        folder = os.open(tmp_path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        (tmp_path / "b").write_bytes(b"b")
        os.replace(tmp_path / "b", tmp_path / "c")
    before, after = ({mode: image for _, mode, image in disk.images[at : at + 3]} for at in (3, 6))
    assert before["lost"] == {}
    assert after["lost"] == {"a": b"sure"}
    assert set(after["named"]) == {"a", "b"}
    assert after["named"]["a"] in (b"sure", b"sure" + bytes(9))
