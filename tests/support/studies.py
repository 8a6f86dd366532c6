"""What tests of studies share: recipes, pages' data, outcomes of runs that never were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedgate.runs.folder import Run
from pfedgate.studies.declare import ACC, VALIDATION, Study
from pfedgate.studies.outcome import Outcomes

RECIPES = Path(__file__).parents[2] / "recipes"
Scores = Mapping[str, Mapping[int, tuple[float, float]]]  # row -> seed -> accuracy on (validation, test) data


def page_data(results: Path, name: str) -> Any:
    """The numbers of a written page."""
    return json.loads((results / f"{name}.json").read_text())


def made_up(study: Study, scores: Scores) -> Outcomes:
    """Outcomes with these accuracies in the column `data`."""
    result = Outcomes(study)
    for name, seeds in scores.items():
        for seed, (val, test) in seeds.items():
            run = result.runs[name, "data", seed] = Run(Path(f"{name}-{seed}"))
            result._read[run.path] = {VALIDATION.key: val, ACC.key: test}
    return result
