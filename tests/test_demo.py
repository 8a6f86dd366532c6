"""`make demo` in short: it learns, keeps its budgets, and prints what it says."""

from __future__ import annotations

import re

import pytest

from pfedgate import demo


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃|]", line) if cell.strip()]


def test_the_printed_table_shows_learning_within_the_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    demo.main(["--epochs", "5"])
    out = capsys.readouterr().out
    rows = {line[0]: line[1:] for line in map(cells, out.splitlines()) if len(line) == 5}
    assert [name for name in rows if name != "model"] == ["dense", "budget 1", "budget 0.5", "budget 0.3"]
    for name, (accuracy, density, flops, seconds) in rows.items():
        if name == "model":
            continue
        budget = 1.0 if name == "dense" else float(name.split()[1])
        assert float(accuracy.rstrip("%")) > 40, f"{name}: chance is 10 %"
        assert 0 < float(density) <= budget
        assert 0 < float(flops) <= budget + 0.02
        assert float(seconds) > 0
    assert rows["dense"][1:] == ["1.000", "1.000", "1.00"]


def test_the_same_seed_gives_the_same_accuracy_and_another_seed_another_split() -> None:
    first, again = (demo.compare(budgets=[0.3], epochs=1, seed=1) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert (a.name, a.accuracy, a.density, a.flops) == (b.name, b.accuracy, b.density, b.flops)
    assert not demo.digits(1)[1].equal(demo.digits(2)[1])


def test_no_digit_is_in_both_parts() -> None:
    x, _, test_x, _ = demo.digits()
    train = {tuple(row) for row in x.flatten(1).tolist()}
    assert not train & {tuple(row) for row in test_x.flatten(1).tolist()}


def test_epochs_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--epochs", "0"])
    assert "--epochs must be at least 1" in capsys.readouterr().err
