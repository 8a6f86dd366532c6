"""Figures as files: all that there is to show, named, with ticks that mean something."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pfedgate import report
from pfedgate.report import figures
from pfedgate.report.figures import FIGURES, draw_all


@pytest.fixture(scope="module")
def content(runs: Path) -> dict:
    return report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))


def painted(name: str, content: dict) -> Figure:
    figure = Figure(figsize=FIGURES[name][:2], layout="constrained")
    assert FIGURES[name][2](content, figure)
    figure.draw_without_rendering()
    return figure


def ticks(axis: object) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]  # type: ignore[attr-defined]


def test_figures(content: dict, tmp_path: Path) -> None:
    found = draw_all(content, tmp_path, "svg")
    assert [path.name for path in found] == [f"{name}.svg" for name in FIGURES]
    assert all(path.read_bytes().startswith(b"<?xml") for path in found)


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_figures_are_the_same_every_time(
    content: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, start: bytes
) -> None:
    monkeypatch.setattr(figures, "FIGURES", {"blocks": FIGURES["blocks"]})
    (first,), (second,) = (draw_all(content, tmp_path / name, kind) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(start)


def test_figures_without_anything_to_show_are_left_out(content: dict, tmp_path: Path) -> None:
    plain = {**content, "runs": [{**content["runs"][1], "baseline": None}], "baseline": None, "partitions": []}
    names = {path.stem for path in draw_all(plain, tmp_path, "svg")}
    assert names == {"accuracy-rounds", "accuracy-bytes", "accuracy-seconds", "clients-sorted"}


def test_a_tree_for_every_gated_run(content: dict, tmp_path: Path) -> None:
    first, other = content["runs"]
    both = {**content, "runs": [first, {**first, "label": "pfedgate, budget 0.3"}, other]}
    found = {path.name: path.read_text() for path in draw_all(both, tmp_path, "svg")}
    assert sorted(name for name in found if "tree" in name) == [
        "gate-tree-1-pfedgate.svg",
        "gate-tree-2-pfedgate-budget-0.3.svg",
    ]
    second = found["gate-tree-2-pfedgate-budget-0.3.svg"]
    assert "pfedgate, budget 0.3: gates, which started from class frequencies" in second
    assert figures.COLOURS[1] in second  # the second run's colour, as in the other figures


def test_a_picture_of_every_partition(content: dict, tmp_path: Path) -> None:
    twice = {**content, "partitions": content["partitions"] * 2}
    names = [path.stem for path in draw_all(twice, tmp_path, "svg") if "partition" in path.stem]
    assert names == ["partition-1", "partition-2"]


def test_clients_and_classes_are_named(content: dict) -> None:
    partition = content["partitions"][0]
    axes = painted("partition", content).axes[0]
    assert ticks(axes.xaxis) == partition["clients"]
    assert ticks(axes.yaxis) == partition["classes"]


def test_names_that_do_not_fit_are_left_out_not_overprinted(content: dict) -> None:
    many = dict(content["partitions"][0])
    many["clients"] = [f"f{4000 + at}_{at}" for at in range(200)]
    many["counts"] = [many["counts"][0]] * 200
    figure = painted("partition", {**content, "partitions": [many]})
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert 20 < len(boxes) < 200
    assert all(one.x1 <= other.x0 + 1 for one, other in itertools.pairwise(boxes))


def test_there_is_no_round_two_and_a_half(content: dict) -> None:
    for name in ("gate-weights", "density-q", "accuracy-rounds"):
        for axes in painted(name, content).axes:
            assert all(re.fullmatch(r"\d+", text) for text in ticks(axes.xaxis)), name


def test_triangles_count_by_rank(content: dict) -> None:
    ours, base = content["runs"]
    names = [f"c{at}" for at in range(50)]
    tied = {**base, "clients": [{"client": n, "accuracy": 0.5 if at < 20 else 0.9} for at, n in enumerate(names)]}
    better = {**ours, "clients": [{"client": n, "accuracy": 0.9} for n in names]}
    (axes,) = painted("clients-difference", {**content, "runs": [better, tied]}).axes
    (triangles,) = [line for line in axes.lines if line.get_marker() == "^"]
    assert len(triangles.get_xdata()) == 6


@pytest.mark.parametrize("label", ["_old", "x$_$", "$", "50 % $a$ b_c"])
def test_names_are_printed_as_they_are(content: dict, tmp_path: Path, label: str) -> None:
    first, other = content["runs"]
    named = {**content, "runs": [{**first, "label": label}, {**other, "label": "other"}]}
    found = {path.stem: path.read_text() for path in draw_all(named, tmp_path, "svg")}
    for name in ("accuracy-rounds", "clients-sorted", "density-q", "blocks", "gate-tree"):
        assert label in found[name], name


def test_lines_have_a_pattern_of_their_own(content: dict) -> None:
    for name in ("accuracy-rounds", "clients-sorted", "density-q"):
        runs = [{**content["runs"][0], "label": f"run {at}"} for at in range(12)]
        axes = painted(name, {**content, "runs": runs}).axes[0]
        drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len({(line.get_color(), line._unscaled_dash_pattern) for line in drawn}) == 12, name
        assert len({line._unscaled_dash_pattern for line in drawn[:5]}) == 5, name


def test_many_runs_have_their_legend_below(content: dict) -> None:
    runs = [{**content["runs"][1], "label": f"run {at}", "baseline": None} for at in range(8)]
    (axes,) = painted("accuracy-rounds", {**content, "runs": runs}).axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0
