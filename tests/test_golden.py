"""Results stay as they are, bit for bit: the digests of tests/golden are those that the code before arrived at."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from typing import Any

import pytest
from tests.golden import cases, digesting

from pfedgate.core.version import RESULTS

WRITTEN: dict[str, Any] = json.loads(cases.DIGESTS.read_text())
MEANT = (
    "If the change is meant, raise RESULTS in pfedgate.core.version and write the digests anew: "
    "python tests/golden/cases.py --write"
)


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs, as paths: "fedbn: private of 3"."""
    if before == now:
        return
    if not isinstance(before, dict) or not isinstance(now, dict):
        yield name
        return
    for key in sorted({*before, *now}):
        if key not in now or key not in before:
            yield f"{name}{key} is {'gone' if key in before else 'new'}"
        else:
            follow = " of " if key == "private" else ": " if not name else ""
            yield from differences(before[key], now[key], f"{name}{key}{follow}")


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="digests are of x86-64")
def test_results_are_the_same_bit_for_bit() -> None:
    made, here = WRITTEN["made with"], digesting.versions()
    if made["torch"] != here["torch"]:
        pytest.skip(f"digests are of torch {made['torch']}, which constraints.txt names; this is {here['torch']}")
    done = cases.child()
    assert done.returncode == 0, "the cases could not be run: see the child's error above"
    now = json.loads(done.stdout)["cases"]
    failed = {name: case["error"] for name, case in now.items() if "error" in case}
    faults = [f"{name} could not be run: {error}" for name, error in failed.items()]
    before, after = ({n: case for n, case in of.items() if n not in failed} for of in (WRITTEN["cases"], now))
    faults += differences(before, after)
    other = "" if made == here else f"\n(The digests were made with {made}, this is {here}: that may be the cause.)"
    if faults:
        pytest.fail(f"{len(faults)} results are not what they were:\n  " + "\n  ".join(faults) + f"\n{MEANT}{other}")
    assert now["old-run/resumed"] == now["old-run/whole"], "a resumed run does not arrive where a whole one does"


def test_the_digests_are_of_these_cases() -> None:
    """Every algorithm and every case has its digests, and they are of these results."""
    assert WRITTEN["results"] == RESULTS, f"digests.json is of results {WRITTEN['results']}. {MEANT}"
    assert set(WRITTEN["cases"]) == {*cases.recipes(), *cases.GATING, "old-run/whole", "old-run/resumed"}, MEANT


def test_differences_are_named() -> None:
    before = {"fedbn": {"server": "a", "private": {"1": "b", "2": "c"}}, "gone": {"server": "d"}}
    now = {"fedbn": {"server": "a", "private": {"1": "b", "2": "x"}}, "new": {"server": "d"}}
    assert list(differences(before, now)) == ["fedbn: private of 2", "gone is gone", "new is new"]
