"""Folders, recipes and data spoilt anyhow: the same result, or an error in words that name the file."""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import fuzz
from tests.test_powercut import RECIPE, contents

from pfedgate import data, experiment, load, report
from pfedgate.cli.base import EXPECTED
from pfedgate.config import recipe as config
from pfedgate.config import toml
from pfedgate.engine.files import DamagedError

SHORT = {**RECIPE, "train": {"rounds": 2, "batch": 8}}
Words = tuple[str, ...]


class Stop(Exception):
    pass


def in_words(error: Exception, names: Words = ()) -> None:
    """The law of an error: of a kind that a user can cause, a sentence, and with the name of what is wrong."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    assert isinstance(error, EXPECTED), f"{type(error).__name__}: {text}"
    assert " " in text, f"{type(error).__name__}: {text!r}"
    assert not names or any(name in text for name in names), f"{type(error).__name__} names none of {names}: {text}"


def spoil_a_file(place: Path, chance: random.Random) -> str:
    """One file of a folder damaged, emptied, removed or with other values in it; its name."""
    path = chance.choice(sorted(path for path in place.rglob("*") if path.is_file() and path.name != ".lock"))
    turn, content = chance.randrange(8), path.read_bytes()
    if turn == 4:
        path.unlink()
    elif turn == 5:
        path.write_bytes(b"")
    elif turn == 6 and path.suffix in (".json", ".jsonl", ".toml"):
        path.write_text(json.dumps(fuzz.plain(chance)))
    elif turn == 7 and path.suffix == ".jsonl" and content:
        lines = content.decode().splitlines()
        path.write_text("\n".join([*lines[:-1], json.dumps(fuzz.changed(json.loads(lines[-1]), chance))]) + "\n")
    else:
        path.write_bytes(fuzz.damaged(content, chance))
    return path.name


def folders(tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """Resume, load and report on so many spoilt folders; how often each ended how."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    experiment.run(SHORT, out=whole / "run")

    def stop(event: Any) -> None:
        if event["event"] == "round":
            raise Stop

    with pytest.raises(Stop):
        experiment.run(SHORT, out=cut / "run", callbacks=[stop])
    right, ends = contents(whole / "run"), Counter[str]()
    acts: list[Callable[[Path], Any]] = [
        experiment.resume,
        lambda place: load(place, which="best"),
        lambda place: report.write([place], place.parent / "report.html"),
    ]
    for at in range(count):
        chance, place = random.Random(seed * 10**6 + at), tmp_path / str(at) / "run"
        shutil.copytree(chance.choice([whole, cut]) / "run", place)
        names = tuple(spoil_a_file(place, chance) for _ in range(chance.randint(1, 2)))
        for number, act in enumerate(acts):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    act(place)
            except Exception as error:
                in_words(error, (str(place), *names))
                ends[f"{number} refused"] += 1
                continue
            ends[f"{number} done"] += 1
            if number == 0 and not {"config.toml", "gates.jsonl"} & set(names):  # anybody may write other ones
                try:
                    assert contents(place) == right, names
                except ValueError as error:  # kept states that this resume did not need: whoever reads them is told
                    in_words(error, (str(place),))
        shutil.rmtree(place.parent)
    return ends


def test_spoilt_folders(tmp_path: Path) -> None:
    ends = folders(tmp_path, 25, 1)
    assert ends["0 done"]
    assert ends["0 refused"]


@pytest.mark.parametrize(
    "line", ['{"round": 1, ', "3", "{}", '{"round": 1, "layers": {"a": {"M": 1}}, "kept": {"0": "1"}}']
)
def test_notes_of_gates_that_are_none_are_named(line: str, tmp_path: Path) -> None:
    experiment.run(SHORT, out=tmp_path / "run")
    (tmp_path / "run/gates.jsonl").write_text(line + "\n")
    with pytest.raises(DamagedError, match=r"run/gates\.jsonl cannot be read"):
        report.write([tmp_path / "run"], tmp_path / "report.html")


@pytest.mark.parametrize("content", ['["a"]', '[{"machine": "x"}]', "{}", "3", '{"a": 1}'])
def test_an_environment_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    experiment.run(SHORT, out=tmp_path / "run")
    (tmp_path / "run/environment.json").write_text(content)
    try:
        experiment.resume(tmp_path / "run")
    except Exception as error:
        in_words(error, ("environment.json",))


@pytest.mark.long
def test_a_thousand_spoilt_folders(tmp_path: Path) -> None:
    print(folders(tmp_path, 1000, 2))


def recipes(tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """Read so many spoilt recipes: values from anywhere, and damaged texts."""
    tables: Any = {**SHORT, "privacy": {"level": "none"}, "server": {"robust": "clip"}, "optim": {}}
    tables.pop("optim")
    ends = Counter[str]()
    for at in range(count):
        chance = random.Random(seed * 10**6 + at)
        if chance.random() < 0.7:
            source: Any = fuzz.changed(tables, chance)
        else:
            text = "".join(f"{name} = {toml.dump(table)}\n" for name, table in tables.items())
            source = tmp_path / "recipe.toml"
            source.write_bytes(fuzz.damaged(text.encode(), chance))
        try:
            config.resolve(source)
            ends["read"] += 1
        except Exception as error:
            in_words(error)
            ends["refused"] += 1
    return ends


def test_spoilt_recipes(tmp_path: Path) -> None:
    assert min(recipes(tmp_path, 300, 1).values()) > 10


@pytest.mark.long
def test_many_spoilt_recipes(tmp_path: Path) -> None:
    print(recipes(tmp_path, 20_000, 2))


CELLS = ["", "nan", "inf", "-1e400", "1e9", "cat", "=1+1", "é" * 300, "\x00", '"', ",", "1", "2", "0.5", "\r", " "]


def tables(tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """Load so many spoilt tables and folders of pictures."""
    from PIL import Image

    ends = Counter[str]()
    picture = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(picture, "PNG")
    for at in range(count):
        chance = random.Random(seed * 10**6 + at)
        place = tmp_path / str(at)
        place.mkdir()
        if at % 2:
            rows = [["client", "label", "a", "b"]]
            rows += [[f"c{row % 3}", str(row % 2), str(row), "0.5"] for row in range(30)]
            for _ in range(chance.randint(1, 3)):
                row = chance.choice(rows)
                row[chance.randrange(len(row))] = chance.choice(CELLS)
            content = "\n".join(",".join(row) for row in rows).encode()
            path = place / "table.csv"
            path.write_bytes(fuzz.damaged(content, chance) if chance.random() < 0.5 else content)
        else:
            path = place / "pictures"
            for owner in ("a", "b"):
                for label in ("cat", "dog"):
                    (path / owner / label).mkdir(parents=True)
                    for number in range(4):
                        whole = chance.random() < 0.95
                        spoilt = picture.getvalue() if whole else fuzz.damaged(picture.getvalue(), chance)
                        (path / owner / label / f"{number}.png").write_bytes(spoilt)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                federation = data.from_table(path) if at % 2 else data.from_folder(path, cache_dir=place)
            for client in federation.clients:
                assert federation.part(client, "train").x.shape[0] == federation.part(client, "train").n
            ends["read"] += 1
        except Exception as error:
            in_words(error)
            ends["refused"] += 1
        shutil.rmtree(place)
    return ends


def test_spoilt_data(tmp_path: Path) -> None:
    assert min(tables(tmp_path, 60, 1).values()) > 3


@pytest.mark.long
def test_much_spoilt_data(tmp_path: Path) -> None:
    print(tables(tmp_path, 3000, 2))
