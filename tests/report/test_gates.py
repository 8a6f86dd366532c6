"""Looking at gates changes nothing, and what is seen is what they do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.runs import GATED, SMALL

from pfedgate import experiment
from pfedgate.report.gate_facts import gates_of, partition_of, tree
from pfedgate.runs import folder as runfolder
from pfedgate.runs import gates

CLIENTS = {"budget": 0.5, "novel": 0.25}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / gates.FILE).read_text().splitlines()]


def test_a_line_for_every_evaluation(runs: Path) -> None:
    found = lines(runs / "pfedgate")
    assert [line["round"] for line in found] == [2, 4]
    layers = found[0]["layers"]
    assert {"all blocks", "conv1"} <= set(layers)
    for line in found:
        spread = line["layers"]["all blocks"]["M"]
        assert spread["quantiles"] == sorted(spread["quantiles"])
        assert sum(spread["histogram"]) == 6 * len(line["blocks"])
    assert not (runs / "fedavg" / gates.FILE).exists()


def test_runs_are_the_same_without_it(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "has_gates", lambda algorithm: False)
    experiment.run(SMALL, algorithm=GATED, clients=CLIENTS, out=tmp_path / "plain")
    assert not (tmp_path / "plain" / gates.FILE).exists()
    for name in ("metrics.jsonl", "participation.jsonl"):
        assert (tmp_path / "plain" / name).read_bytes() == (runs / "pfedgate" / name).read_bytes()
    ours, theirs = runfolder.load(tmp_path / "plain").server(), runfolder.load(runs / "pfedgate").server()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_of_many_clients_the_first_are_looked_at(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runfolder.load(runs / "pfedgate")
    trained = whole.store().clients()
    monkeypatch.setattr(gates, "MOST_CLIENTS", 4)
    experiment.run(SMALL, algorithm=GATED, clients=CLIENTS, out=tmp_path / "few")
    for line, full in zip(lines(tmp_path / "few"), lines(whole.path), strict=True):
        assert list(line["kept"]) == trained[:4]
        assert (line["looked"], line["of"]) == (4, 6)
        assert line["kept"].items() <= full["kept"].items()
    assert (tmp_path / "few" / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_classes_are_known_of_every_client_whose_gate_is_shown(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where novel clients stand among the first of all."""
    run = runfolder.load(runs / "pfedgate")
    everyone, _ = partition_of(run)
    monkeypatch.setattr(gates, "MOST_CLIENTS", 4)
    few, _ = partition_of(run)
    assert everyone is not None
    assert few is not None
    assert few["clients"] == run.store().clients()[:4] != everyone["clients"][:4]
    counts = dict(zip(everyone["clients"], everyone["counts"], strict=True))
    assert few["counts"] == [counts[client] for client in few["clients"]]
    assert few["all_clients"] == 8


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "private"])
def test_a_file_cut_short_does_not_cost_the_report(runs: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs / "pfedgate", copy)
    for path in [copy / name] if name.endswith("s") else list((copy / name).rglob("*.safetensors")):
        path.write_bytes(path.read_bytes()[:40])
    found, _ = gates_of(runfolder.load(copy))
    assert found is not None
    assert "cannot be read" in found["reason"]
    assert found["weights"] is None
    assert len(found["kept"]) == 6  # from gates.jsonl
    (copy / gates.FILE).unlink()
    assert gates_of(runfolder.load(copy)) == (None, found["reason"])


def test_a_resumed_run_has_each_line_once(runs: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: dict) -> None:
        if event["event"] == "round" and event["round"] == 3:
            raise Stop

    with pytest.raises(Stop):
        experiment.run(SMALL, algorithm=GATED, clients=CLIENTS, out=tmp_path / "run", callbacks=[stop])
    path = tmp_path / "run" / gates.FILE
    later = {**lines(tmp_path / "run")[-1], "round": 4}
    # As if it had died after its fourth round, and once more in the middle of a line.
    path.write_text(path.read_text() + json.dumps(later) + "\n" + json.dumps(later)[:-9])
    experiment.resume(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(runs / "pfedgate")


def test_what_is_seen_is_what_the_report_says(runs: Path) -> None:
    run = runfolder.load(runs / "pfedgate")
    plan = experiment.plan(run.recipe)
    seen = list(gates.look(plan.algorithm, plan.federation, run.server(), run.store(), plan.options, 4))
    told = lines(runs / "pfedgate")[-1]
    assert {s.client: "".join("01"[bit] for bit in s.kept.astype(int)) for s in seen} == told["kept"]
    masks = gates.summary([replace(s, kept=~s.kept) for s in seen])["kept"]
    assert masks != told["kept"]


@pytest.mark.parametrize(
    "options",
    [{"variant": "paper"}, {"gate": {"scope": "client"}}, {"upload": 0.3}, {"split": "flat", "resources": "params"}],
    ids=str,
)
def test_every_kind_of_gate_can_be_looked_at(tmp_path: Path, options: dict) -> None:
    chosen = {"algorithm": {"name": "pfedgate", **options}, "train": {"rounds": 1}, "clients": CLIENTS}
    experiment.run(SMALL, **chosen, out=tmp_path / "run")
    (line,) = lines(tmp_path / "run")
    assert len(line["kept"]) == 6
    assert all("1" in bits for bits in line["kept"].values())


def test_the_order_of_names_in_a_file_does_not_matter(runs: Path) -> None:
    run = runfolder.load(runs / "pfedgate")
    plan = experiment.plan(run.recipe)

    class Shuffled:
        tag = ""

        def get(self, client: str) -> dict | None:
            state = run.store().get(client)
            return None if state is None else dict(sorted(state.items(), reverse=True))

    vectors = [
        [s.gate for s in gates.look(plan.algorithm, plan.federation, run.server(), store, plan.options, 4)]  # type: ignore[arg-type]
        for store in (run.store(), Shuffled())
    ]
    assert np.array_equal(*map(np.stack, vectors))


def test_the_tree_joins_what_is_alike() -> None:
    rng = np.random.default_rng(0)
    centres = np.repeat([[0.0] * 5, [9.0] * 5], 4, axis=0)
    found = tree(list(centres + rng.normal(size=(8, 5))))
    leaves = found["leaves"]
    assert {frozenset(leaves[:4]), frozenset(leaves[4:])} == {frozenset(range(4)), frozenset(range(4, 8))}
    assert min(min(xs) for xs in found["across"]) == 0
    assert max(max(xs) for xs in found["across"]) == 7
    assert len(found["height"]) == 7
