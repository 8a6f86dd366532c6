"""Charts are valid specifications that show the data they are given; as files they are named and repeatable."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from pfedgate.core.drawing import DASHES, VEGA_LITE, config, save
from pfedgate.report import cards, charts, gate_facts
from pfedgate.report.cards import draw_all, figures, still
from pfedgate.runs.progress import size


def specs(content: dict) -> Iterator[tuple[str, dict]]:
    """Every view of the page and every file, by name."""
    for make in cards.SECTIONS.values():
        for card in make(content):
            yield from ((f"{card.name} {view.choice}", view.spec) for view in card.views)
    yield from figures(content).items()


def parts(spec: Any) -> Iterator[dict]:
    """All dictionaries of a specification, but those of its rows."""
    if isinstance(spec, dict):
        yield spec
        yield from (part for key, value in spec.items() if key != "values" for part in parts(value))
    elif isinstance(spec, list | tuple):
        yield from (part for value in spec for part in parts(value))


def column(spec: dict, run: str, field: str) -> list:
    return next(row[field] for row in spec["data"]["values"] if row["run"] == run)


def test_every_chart_is_valid(content: dict) -> None:
    names = []
    for name, spec in specs(content):
        made = vl_convert.vegalite_to_vega({"config": config(), **spec}, vl_version=VEGA_LITE)
        assert made["marks"], name
        names.append(name)
    assert len(names) > 30


def test_values_are_what_the_run_says(content: dict) -> None:
    for run in content["runs"]:
        spec = charts.curves(content)
        assert spec is not None
        assert column(spec, run["label"], "x") == run["curves"]["round"]
        assert column(spec, run["label"], "accuracy") == pytest.approx(
            [100 * v for v in run["curves"]["accuracy"]], 1e-4
        )
        ranked = charts.sorted_clients(content)
        assert ranked is not None
        accuracies = sorted(100 * client["accuracy"] for client in run["clients"])
        assert column(ranked, run["label"], "y") == pytest.approx(accuracies, rel=1e-4)
    ours, base = content["runs"]
    own = {client["client"]: client["accuracy"] for client in ours["clients"]}
    theirs = {client["client"]: client["accuracy"] for client in base["clients"]}
    for row in charts.pairs(ours, base):
        by = 100 * (own[row["client"]] - theirs[row["client"]])
        assert row["difference"] == pytest.approx(by, rel=1e-3, abs=1e-6)


def test_cells_are_the_gates(content: dict) -> None:
    run = content["runs"][0]
    clients, blocks = cards.gate_charts.block_rows(run)
    assert ["".join(map(str, row["kept"])) for row in clients] == run["gates"]["kept"]
    assert [row["name"] for row in blocks] == run["gates"]["blocks"]
    assert [row["layer"] for row in blocks if "layer" in row] == [layer["name"] for layer in run["gates"]["layers"]]
    for form in (cards.gate_charts.quantiles, cards.gate_charts.histograms):
        spec = form(content, run, "M")
        rounds = [row["round"] for row in spec["data"]["values"]]
        assert rounds in ([[2, 4]], [2, 4])


def test_names_are_data_never_code(content: dict) -> None:
    """No expression holds a name, and rows hold it as it is."""
    evil = "'] + alert(1) + datum['_$x"
    named = copy.deepcopy(content)
    named["runs"][0]["label"] = evil
    for client in named["runs"][0]["clients"]:
        client["client"] = evil + client["client"]
    for name, spec in specs(named):
        for part in parts(spec):
            code = [part[key] for key in ("expr", "calculate", "filter", "test", "field", "as") if key in part]
            assert not any("alert" in str(text) for text in code), name
    assert any(evil in json.dumps(spec, ensure_ascii=False) for _, spec in specs(named))
    drawn = vl_convert.vegalite_to_svg(still(charts.curves(named)), vl_version=VEGA_LITE)
    assert "&#39;] + alert(1)" in drawn or "'] + alert(1)" in drawn


def test_runs_look_the_same_in_every_chart_and_never_alike(content: dict) -> None:
    many = {**content, "runs": [{**content["runs"][0], "label": f"run {at}"} for at in range(12)]}
    for name, spec in specs(many):
        for part in parts(spec):
            if part.get("field") == "run":
                assert part["scale"]["domain"] == [f"run {at}" for at in range(12)], name
    spec = charts.curves(many)
    assert spec is not None
    line = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "line")
    assert line["encoding"]["strokeDash"]["scale"]["range"] == DASHES
    drawn = vl_convert.vegalite_to_svg({"config": config(), **still(spec)}, vl_version=VEGA_LITE)
    lines = re.findall(r'<path aria-label="[^"]*" role="graphics-symbol" aria-roledescription="line mark"[^>]*>', drawn)
    looks = {tuple(re.findall(r'stroke(?:-dasharray)?="([^"]*)"', line)) for line in lines}
    assert len(lines) == len(looks) == 12


def test_what_does_not_move_is_a_line_of_text(content: dict) -> None:
    """Here FedAvg's uploads; with one mask for all also who keeps what, and with still gates M and G."""
    run = content["runs"][1]
    (card,) = cards.cost({**content, "runs": [run]})
    assert not card.views
    assert (
        card.text == f"Uploaded in each round, the same in every round: fedavg {size(run['training']['bytes_up'][0])}."
    )
    one = copy.deepcopy(content["runs"][0])
    gates = one["gates"]
    gates["kept"] = gates["kept"][:1] * 6
    gates["masks"] = gate_facts.masks_of(gates["clients"], gates["kept"])
    gates["changes"] = [{"round": 2, "between": 0.0, "moved": None}, {"round": 4, "between": 0.0, "moved": 0.0}]
    for spread in gates["over_rounds"].values():
        spread["M"]["quantiles"] = spread["M"]["quantiles"][:1] * 2
    drawn = {card.name: card for card in cards.gates({**content, "runs": [one]})}
    assert set(drawn) == {"masks", "blocks", "gate-G", "tree"}
    assert {view.choice[1] for view in drawn["blocks"].views} == {"weight"}
    said = drawn["masks"].text.splitlines()
    assert said[0].startswith("All 6 clients keep the same ")
    assert said[1].startswith("Weights of blocks (M) do not move over the rounds")
    several = {card.name: card for card in cards.gates(content)}
    assert several["masks"].text.startswith("6 clients keep 6 different masks")
    assert {"blocks", "changes", "gate-M"} <= set(several)


def test_triangles_count_by_rank(content: dict) -> None:
    ours, base = content["runs"]
    names = [f"c{at}" for at in range(50)]
    tied = {**base, "clients": [{"client": n, "accuracy": 0.5 if at < 20 else 0.9} for at, n in enumerate(names)]}
    better = {**ours, "clients": [{"client": n, "accuracy": 0.9} for n in names]}
    assert sum(row["low"] for row in charts.pairs(better, tied)) == 6


def test_many_points_are_thinned(content: dict) -> None:
    run = copy.deepcopy(content["runs"][0])
    run["curves"] = {name: list(range(1, 5001)) for name in run["curves"]}
    run["clients"] = [{"client": f"{at}", "accuracy": at / 9000} for at in range(9000)]
    long = {**content, "runs": [run, {**run, "label": "other"}]}
    for spec in (charts.curves(long), charts.sorted_clients(long)):
        assert spec is not None
        steps = spec["data"]["values"][0]["x"]
        assert len(steps) <= 300
        assert (steps[0], steps[-1]) in ((1, 5000), (1, 9000))
    assert len(charts.difference(*long["runs"])["data"]["values"]) == charts.MOST_CLIENTS


def test_one_evaluated_round_is_drawn(content: dict) -> None:
    run = copy.deepcopy(content["runs"][0])
    run["gates"]["rounds"] = [4]
    spread = run["gates"]["over_rounds"]["all blocks"]["M"]
    spread["quantiles"], spread["histogram"] = spread["quantiles"][-1:], spread["histogram"][-1:]
    marks = [layer["mark"] for layer in cards.gate_charts.quantiles(content, run, "M")["layer"]]
    assert [mark["type"] for mark in marks[:2]] == ["bar", "bar"]  # a band would have no width


def test_figures(content: dict, tmp_path: Path) -> None:
    files = draw_all(content, tmp_path, "svg")
    assert [path.name for path in files] == [
        "accuracy-rounds.svg", "accuracy-flops.svg", "accuracy-bytes.svg", "accuracy-seconds.svg", "clients-sorted.svg",
        "clients-difference.svg", "density.svg", "q.svg", "uploaded.svg", "blocks.svg", "gate-M.svg", "gate-G.svg",
        "changes.svg", "tree.svg", "partition-0.svg",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"<svg") for path in files)
    for name, texts in {"accuracy-rounds": ("round", "accuracy, %"), "clients-sorted": ("accuracy, %",)}.items():
        assert all(f">{text}</text>" in (tmp_path / f"{name}.svg").read_text() for text in texts), name


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<svg"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_files_are_the_same_every_time(content: dict, tmp_path: Path, kind: str, start: bytes) -> None:
    spec = figures(content)["blocks"]
    first, second = (save(spec, tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
    assert first.startswith(start)
    assert first == second or kind == "pdf"  # whose objects come in any order


def test_without_the_extra_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ImportError, match=r"pip install 'pfedgate\[figures\]'"):
        save({"mark": "bar"}, tmp_path / "x.svg")
    with pytest.raises(ValueError, match="unknown format 'jpg'"):
        save({"mark": "bar"}, tmp_path / "x.jpg")


def test_figures_without_anything_to_show_are_left_out(content: dict) -> None:
    plain = {**content, "runs": [{**content["runs"][1], "baseline": None}], "baseline": None, "partitions": []}
    assert set(figures(plain)) == {f"accuracy-{along}" for along in ("rounds", "flops", "bytes", "seconds")} | {
        "clients-sorted"
    }


def test_a_tree_for_every_gated_run_and_a_picture_of_every_partition(content: dict) -> None:
    first, other = content["runs"]
    twice = {**content, "partitions": content["partitions"] * 2}
    twice["runs"] = [first, {**first, "label": "pfedgate, budget 0.3"}, other]
    files = figures(twice)
    assert [part["title"].split(":")[0] for part in files["tree"]["vconcat"]] == ["pfedgate", "pfedgate, budget 0.3"]
    assert [name for name in files if "partition" in name] == ["partition-0", "partition-1"]


@pytest.mark.parametrize("label", ["_old", "x$_$", "50 % $a$ b_c", "datum.run"])
def test_names_are_printed_as_they_are(content: dict, label: str) -> None:
    first, other = content["runs"]
    named = {**content, "runs": [{**first, "label": label}, {**other, "label": "other"}]}
    files = figures(named)
    for name in ("accuracy-rounds", "clients-sorted", "density", "blocks", "tree"):
        assert label in vl_convert.vegalite_to_svg(files[name], vl_version=VEGA_LITE), name


def test_clients_and_classes_are_named(content: dict) -> None:
    partition = content["partitions"][0]
    drawn = vl_convert.vegalite_to_svg(figures(content)["partition-0"], vl_version=VEGA_LITE)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert set(texts) >= {*partition["clients"], *partition["classes"]}
