"""The small parts: settings, a node's store, certificates, the app template, the command line, life without Flower."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pfedgate.config import recipe as config
from pfedgate.core.errors import RecipeError
from pfedgate.deploy import FlowerMissing, flower, need_flower
from pfedgate.deploy.children import FleetError, alive, kill, lines, stop, sweep, tree
from pfedgate.deploy.local import LocalFleet
from pfedgate.deploy.messages import NodeInfo, ParcelError, Roll
from pfedgate.deploy.node import StaleOrder, current, take
from pfedgate.deploy.starter import write_app

GATE = {"gate": torch.arange(3.0)}
NAME = "0123456789abcdef"


# -- settings
def test_a_run_goes_over_the_recipe() -> None:
    recipe = flower.read({"deploy": {"quorum": 0.5}}, {"set": "deploy.quorum=0.75; train.rounds=3;", "folder": "x"})
    assert (recipe.deploy.quorum, recipe.train.rounds) == (0.75, 3)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"deploy": {"deadlin": 3}}, "did you mean 'deadline'"),
        ({"depoly": {"deadline": 3}}, "unknown section 'depoly': did you mean 'deploy'"),
        ({"train": {"deadline": 3}}, r"'deadline': it belongs in \[deploy\] or \[fleet\]"),
        ({"deploy": {"nodes": 2.5}}, r"deploy\.nodes must be a whole number, got 2\.5"),
        ({"deploy": {"deadline": 0}}, "seconds > 0"),
        ({"deploy": {"start": -1}}, "seconds > 0"),
        ({"deploy": {"deadline": math.inf}}, "seconds > 0"),
        ({"deploy": {"nodes": 0}}, "seconds > 0"),
        ({"deploy": {"quorum": 1.5}}, "quorum"),
    ],
)
def test_mistakes_in_the_section_deploy_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        flower.read(tables)


def test_one_recipe_serves_one_process_and_a_fleet(tmp_path: Path) -> None:
    recipe = config.resolve({"deploy": {"nodes": 4, "deadline": 90, "class_names": ["cat", "dog"]}})
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.toml(), encoding="utf-8")
    assert "deadline = 90.0  # [default 600.0] seconds a round may take" in recipe.toml()
    assert config.resolve(path) == flower.read(path) == recipe
    assert "[deploy]" not in config.resolve().toml()


# -- a node's private states
def test_what_a_newer_order_overtook_cannot_be_written(tmp_path: Path) -> None:
    old = take(tmp_path, NAME, "own", [0], 1, 0)
    old.put("anna", GATE)
    new = take(tmp_path, NAME, "own", [0], 2, 0)
    with pytest.raises(StaleOrder):
        old.put("anna", {"gate": torch.zeros(3)})
    assert torch.equal((new.get("anna") or {})["gate"], GATE["gate"])
    for serial in (1, 2):  # late, and twice
        with pytest.raises(StaleOrder, match="came after"):
            take(tmp_path, NAME, "own", [0], serial, 0)
    with pytest.raises(StaleOrder):  # from a server that is gone
        take(tmp_path, NAME, "own", [], 9, 0)


def test_a_new_start_of_the_server_drops_what_it_will_do_anew(tmp_path: Path) -> None:
    take(tmp_path, NAME, "own", [0], 1, 0).put("anna", {"gate": torch.zeros(1)})  # commit 0
    take(tmp_path, NAME, "own", [0], 2, 1).put("anna", {"gate": torch.ones(1)})  # commit 1, on record
    take(tmp_path, NAME, "own", [0], 3, 2).put("anna", {"gate": torch.full((1,), 2.0)})  # commit 2, never was
    # The server died and starts again with commit 2; this node hears of it only at commit 4.
    store = take(tmp_path, NAME, "own", [0, 2], 7, 4)
    assert (store.get("anna") or {})["gate"].item() == 1.0
    assert [path.name for path in (store.root).glob("pending-*")] == []
    assert (current(tmp_path, NAME, "own").get("anna") or {})["gate"].item() == 1.0


def test_what_is_on_record_outlives_a_start_of_the_server(tmp_path: Path) -> None:
    take(tmp_path, NAME, "own", [0], 1, 0).put("anna", GATE)
    assert take(tmp_path, NAME, "own", [0, 1], 1, 1).get("anna") is not None
    assert take(tmp_path, NAME, "own", [0, 1, 0], 1, 0).get("ben") is None


@pytest.mark.parametrize("name", ["../../etc", "", "a/b", "ABCDEF0123456789"])
def test_the_name_of_an_experiment_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no id of an experiment"):
        take(tmp_path, name, "own", [0], 1, 0)


# -- the roll call
def _info(clients: dict[str, int], **other: object) -> NodeInfo:
    data = {"shape": [1, 8, 8], "dtype": "float32", "classes": 10, "class_names": None}
    return NodeInfo.read(
        {"clients": clients, "novel": {}, "budget": other.pop("budget", None), "data": {**data, **other}}
    )


def test_a_journal_of_an_earlier_version_is_read() -> None:
    data = {"raw_shape": [8, 8], "raw_type": "uint8", "shape": [1, 8, 8], "prepared_shape": [1, 8, 8]}
    data |= {"prepared_type": "float32", "classes": 10, "class_names": None}
    assert NodeInfo.read({"clients": {"a": 3}, "novel": {}, "data": data}) == _info({"a": 3})


def test_nodes_must_agree_on_the_shape_of_data() -> None:
    with pytest.raises(ValueError, match=r"'a' and 'b' hold data of different shapes \(classes 10 and 3\).*classes"):
        Roll([_info({"a": 3}), _info({"b": 3}, classes=3)])


def test_budgets_are_dealt_out_as_in_one_process_except_where_a_node_brings_its_own() -> None:
    roll = Roll([_info({"a": 1, "b": 2}), _info({"c": 3, "d": 0}, budget={"params": 0.2})])
    cards = {card.id: card for card in roll.cards({"0.5": 0.5, "0.1": 0.5}, 0).clients}
    assert [cards[name].n_train for name in "abcd"] == [1, 2, 3, 0]
    assert cards["c"].budget == {"params": 0.2}
    assert {cards["a"].budget, cards["b"].budget} <= {0.5, 0.1}


def test_who_was_met_before_is_still_known() -> None:
    before = Roll([_info({"a": 1, "b": 2}), _info({"c": 3})])
    cards = Roll([_info({"b": 5})]).joined(before).cards(1.0, 0).clients
    assert [(card.id, card.n_train) for card in cards] == [("a", 1), ("b", 5), ("c", 3)]


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"clients": {"a": -1}},
        {"clients": [1], "novel": {}},
        {"clients": {}, "novel": {}, "data": {}},
        {"clients": 3},
    ],
)
def test_a_wrong_answer_to_the_roll_call_is_refused(about: dict[str, object]) -> None:
    with pytest.raises(ParcelError):
        NodeInfo.read(about)


@pytest.mark.parametrize("budget", ["/etc/hostname", {"params": math.inf}, math.inf, "nowhere.csv"])
def test_a_wrong_budget_is_refused_and_no_file_is_read_for_it(budget: object) -> None:
    with pytest.raises(ParcelError, match=r"a budget is a number|params"):
        _info({"a": 3}, budget=budget)


def test_a_client_with_endless_data_is_refused() -> None:
    with pytest.raises(ParcelError, match="inf is no whole number"):
        NodeInfo.read({**_info({"a": 3}).plain(), "clients": json.loads('{"a": Infinity}')})


# -- the app
def test_the_template_is_an_app_with_a_checked_recipe(tmp_path: Path) -> None:
    app = write_app(tmp_path / "My App!")
    assert 'name = "my-app"' in (app / "pyproject.toml").read_text(encoding="utf-8")
    assert flower.read(app / "pfedgate_app" / "recipe.toml").deploy.nodes == 2
    with pytest.raises(FileExistsError, match="not empty"):
        write_app(app)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[trian]\nrounds = 1\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="did you mean 'train'"):
        write_app(tmp_path / "other", wrong)
    assert not (tmp_path / "other").exists()


def test_flower_accepts_the_template(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from flwr.common.config import get_project_config

    config = get_project_config(write_app(tmp_path / "app"))
    assert config["tool"]["flwr"]["app"]["components"]["clientapp"] == "pfedgate_app.client:app"


def test_without_flower_everything_imports_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FlowerMissing, match=r"pip install 'pfedgate\[flower\]'"):
        need_flower()


def test_the_command_line_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'flwr' else real(name, *a)\n"
        f"sys.argv = ['pfedgate', 'deploy', 'local', '--out', {str(tmp_path / 'run')!r}]\n"
        "from pfedgate.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pfedgate[flower]" in done.stderr
    assert not (tmp_path / "run").exists()


def test_keys_are_made_once_and_for_the_hosts_named(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason="comes with the extra `flower`")
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from pfedgate.deploy.starter import make_keys

    place = make_keys(tmp_path, hosts=("10.0.0.7", "fleet.example"), nodes=2)
    ca, server = (x509.load_pem_x509_certificate((place / name).read_bytes()) for name in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example"]
    secrets = [place / name for name in ("ca.key", "server.key", "node-0", "node-1")]
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600] * 4
    before = {path: path.read_bytes() for path in secrets}
    make_keys(tmp_path, nodes=3)
    assert before == {path: path.read_bytes() for path in secrets}
    assert (place / "node-2.pub").read_text(encoding="utf-8").startswith("ecdsa-sha2-nistp384 ")


# -- processes
def test_a_process_ends_with_all_it_started_even_in_another_session() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    for end in (stop, kill):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        child = int(next(lines(process, time.monotonic() + 60)))
        below = tree(process.pid)
        assert child in [one.pid for one in below]
        end(process)
        assert process.poll() is not None
        assert not any(map(alive, below))


def test_orphans_of_a_fleet_are_found_by_their_environment() -> None:
    code = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(child.pid, flush=True)"
    )
    orphans = []
    for home in ("one", "other"):
        environment = {**os.environ, "FLWR_HOME": f"/nowhere/{home}"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, timeout=60)
        orphans.append(int(done.stdout))
    sweep("FLWR_HOME=/nowhere/one")
    assert [_ends(pid, 1) for pid in orphans] == [True, False]
    sweep("FLWR_HOME=/nowhere/other")
    assert _ends(orphans[1], 5)


def _ends(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or not alive(psutil.Process(pid)):
            return True
        time.sleep(0.1)
    return False


def test_reading_ends_in_time() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        with pytest.raises(FleetError, match="in time"):
            list(lines(process, time.monotonic() + 0.2))
    finally:
        stop(process)


def test_a_failure_to_ask_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet(tmp_path, nodes=1, secure=False, patience=0.5)
    failed = '{"success": false, "error-message": "busy"}'
    answers = [failed, '{"success": true, "runs": [{"status": "finished:completed"}]}', '{"runs": []}']
    monkeypatch.setattr(fleet, "flwr", lambda *words: answers.pop(0) if answers else failed)
    assert [fleet.status(), fleet.status()] == ["finished:completed", "never started"]
    with pytest.raises(FleetError, match="busy"):
        fleet.status()
