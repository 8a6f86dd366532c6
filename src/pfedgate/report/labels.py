"""Names of runs in a report: their folders' names, or the settings that tell them apart where those are checksums."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pfedgate.runs.folder import Run

# A part of a folder's name that is a checksum, as studies give them: eight or more hexadecimal digits.
HASH = re.compile(r"(?:^|[-_.])(?=[a-f]*\d)[0-9a-f]{8,}(?=$|[-_.])")
# These settings come first and last in a name, and stand in the names of all runs of a method.
FIRST = ("clients.budget", "algorithm.resources", "algorithm.variant", "algorithm.upload", "algorithm.start")
LAST = ("data.seed", "run.seed")
WORDS = {"algorithm.upload": "upload cap", "run.seed": "seed", "data.seed": "data seed"}
LONGEST = 32
Settings = Mapping[str, Any]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, or the settings that tell it apart if that is a checksum."""
    folders = folder_labels(runs)
    hashed = [at for at, run in enumerate(runs) if is_hash(run.path.resolve().name)]
    if not hashed:
        return folders
    names = dict(zip(hashed, describe([settings_of(runs[at]) for at in hashed]), strict=True))
    labels = [names.get(at, folder) for at, folder in enumerate(folders)]
    # The same settings twice (another version of the code): only the folder tells them apart.
    return [
        f"{label} ({folders[at]})" if labels.count(label) > 1 and at in names else label
        for at, label in enumerate(labels)
    ]


def folder_labels(runs: Sequence[Run]) -> list[str]:
    """The folder's name, with as many parents as tell runs apart; a run that comes again has a number."""
    parts = [run.path.resolve().parts for run in runs]
    depth, different = 1, len(set(parts))
    while len({p[-depth:] for p in parts}) < different:
        depth += 1
    names = ["/".join(p[-depth:]) for p in parts]
    numbers = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return [name if number == 1 else f"{name} ({number})" for name, number in zip(names, numbers, strict=True)]


def is_hash(name: str) -> bool:
    """Whether a folder's name holds a checksum, which nobody reads.

    >>> [is_hash(name) for name in ("cifar10-fedavg-338564975e2c-f955314b", "pfedgate-budget=0.5", "fedavg-20251117")]
    [True, False, False]
    """
    return any(not part.group().strip("-_.").isdigit() for part in HASH.finditer(name))


def settings_of(run: Run) -> dict[str, Any]:
    """Every setting of a run by its full name."""
    tables = run.recipe.tables()
    return {f"{section}.{key}": value for section, values in tables.items() for key, value in values.items()}


def describe(runs: Sequence[Settings]) -> list[str]:
    """The method, and of its settings those that tell it from other runs of the method: no more than are needed.

    >>> runs = [{"algorithm.name": "a", "clients.budget": s, "run.seed": n} for s, n in ((0.5, 0), (0.3, 0), (0.3, 1))]
    >>> describe([*runs, {"algorithm.name": "b", "clients.budget": 1.0}])
    ['a, budget 0.5, seed 0', 'a, budget 0.3, seed 0', 'a, budget 0.3, seed 1', 'b']
    """
    data = [run.get("data.name") for run in runs]
    names = [str(run.get("algorithm.name")) for run in runs]
    if len(set(data)) > 1:
        names = [f"{source} {name}" for source, name in zip(data, names, strict=True)]
    labels = list(names)
    for name in dict.fromkeys(names):
        members = [at for at, other in enumerate(names) if other == name]
        keys = _keys([runs[at] for at in members])
        for key in keys:
            # The first and last settings name every run of the method, the rest only runs whose names are still equal.
            alike: dict[str, list[int]] = {}
            for at in members:
                alike.setdefault("" if key in FIRST + LAST else labels[at], []).append(at)
            for group in alike.values():
                # "of params" says nothing without how much.
                also = key == "clients.budget" and "algorithm.resources" in keys
                if also or len({_shown(runs[at].get(key)) for at in group}) > 1:
                    for at in group:
                        labels[at] += _said(key, runs[at].get(key))
    return labels


def _keys(runs: Sequence[Settings]) -> list[str]:
    """Settings in which runs differ, those first that say most; how a machine computes is not among them."""
    keys = dict.fromkeys(key for run in runs for key in run if not key.startswith(("run.", "evaluate.", "deploy.")))
    middle = [key for key in keys if key not in FIRST + LAST]
    differing = [key for key in (*FIRST, *middle, *LAST) if len({_shown(run.get(key)) for run in runs}) > 1]
    return ["clients.budget", *differing] if differing[:1] == ["algorithm.resources"] else differing


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _said(key: str, value: Any) -> str:
    """One setting in a label.

    >>> _said("clients.budget", 0.5), _said("train.lr", 0.05), _said("run.seed", 1), _said("algorithm.variant", None)
    (', budget 0.5', ', lr 0.05', ', seed 1', '')
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace('"', "")
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    if key == "algorithm.resources":
        return f" of {text}"  # follows the budget
    return f", {WORDS.get(key, key.rpartition('.')[2])} {text}"


def common(labels: Sequence[str]) -> str:
    """The part that several labels share, without the number that tells them apart.

    >>> common(["fedavg-seed=0", "fedavg-seed=1"]), common(["a/run", "b/run"]), common(["x", "y"])
    ('fedavg', 'run', 'x and others')
    >>> common(["pfedgate, budget 0.5, seed 10", "pfedgate, budget 0.5, seed 11"])
    'pfedgate, budget 0.5'
    """
    before, after = _start(labels), _start([label[::-1] for label in labels])[::-1]
    shared = re.sub(r"[-_/., ]+(seed[-_=/., ]*\d*|s)?[-_=/., ]*$", "", before) or after.strip("-_/., ")
    return shared or f"{labels[0]} and others"


def _start(texts: Sequence[str]) -> str:
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)
