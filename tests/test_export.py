"""A client's model leaves a run: the same predictions in every format, and a command that says what it costs."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cli import call
from tests.support.compare import distance, gated_pair
from tests.support.zoo import OURS, SMALL, build
from torch.utils._pytree import tree_leaves

import pfedgate
from pfedgate import Budget, export
from pfedgate.data.pool import Normalise
from pfedgate.runs import folder as runfolder

RECIPE = {
    "data": {"name": "digits", "clients": 4},
    "model": {"name": "mlp", "hidden": [64]},
    "train": {"rounds": 2, "batch": 32},
    "clients": {"budget": 0.5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    pfedgate.run(RECIPE, out=folder)
    return folder


def test_the_gated_model_is_the_one_that_was_scored(run: Path) -> None:
    (run / "best.safetensors").rename(run / "aside")  # scores in clients.csv are the last round's
    try:
        rows = [row for row in runfolder.load(run).clients if row["point"] == "after_broadcast"]
        for row in rows:
            found = export.client(run, str(row["client"]))
            assert found.score(found.gated).accuracy == pytest.approx(row["accuracy"])
            assert export.parameters(found.compact) <= 0.5 * export.parameters(found.dense)
    finally:
        (run / "aside").rename(run / "best.safetensors")


def test_one_decision_from_all_training_data(run: Path) -> None:
    """Of a gate that decides per client, the compact module is the predictor itself."""
    shutil.copytree(run, other := run.parent / "client")
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace('scope = "batch"', 'scope = "client"'))
    found = export.client(other, "0", budget=0.4)
    assert found.gated.gated.gate.config.scope == "client"
    x = found.local.prepare(found.test.x)
    with torch.no_grad():
        assert distance(found.compact(x), found.gated(x)) <= 1e-5
    assert found.gated.gated.last is not None
    assert export.parameters(found.compact) == found.gated.gated.last.live.count


def test_the_format_of_torch(run: Path, tmp_path: Path) -> None:
    found = export.client(run, "1")
    path = export.save(found.compact, found.example[:1], tmp_path / "new" / "model.pt2")
    loaded = torch.export.load(path).module()
    x = found.local.prepare(found.test.x)
    with torch.no_grad():
        for batch in (x[:1], x):
            assert distance(loaded(batch), found.compact(batch)) <= 1e-5


def in_onnx(path: Path, x: torch.Tensor) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results: list[Any] = session.run(None, {"x": x.numpy()})
    return results


def test_onnx(run: Path, tmp_path: Path) -> None:
    needs_onnx()
    found = export.client(run, "1", budget=0.3)
    path = export.save(found.compact, found.example, tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    x = found.local.prepare(found.test.x)
    for batch in (x[:1], x):
        (y,) = in_onnx(path, batch)
        assert distance(torch.from_numpy(y), found.compact(batch)) <= 1e-5


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs the extra `export`: pip install 'pfedgate[export]'")


def test_a_file_says_what_a_device_has_to_know(run: Path, tmp_path: Path) -> None:
    """Whoever has the file alone can prepare samples as they were prepared in training, and name the classes."""
    found = export.client(run, "1")
    needs_onnx()
    import onnxruntime

    one = export.save(found.compact, found.example, tmp_path / "a.onnx", facts=found.facts("CC-BY-4.0"))
    two = export.save(found.compact, found.example, tmp_path / "a.pt2", facts=found.facts("CC-BY-4.0"))
    known = onnxruntime.InferenceSession(one).get_modelmeta().custom_metadata_map
    torch.export.load(two, extra_files=(extra := {"facts.json": ""}))
    assert json.loads(extra["facts.json"]) == known
    assert known["licence"] == "CC-BY-4.0"
    assert json.loads(known["classes"]) == [str(digit) for digit in range(10)]
    assert json.loads(known["input"]) == {"name": "x", "shape": ["batch", 1, 8, 8], "dtype": "float32"}
    steps = json.loads(known["preprocessing"])
    mean, std = (torch.tensor(steps[name]).view(-1, 1, 1) for name in ("mean", "std"))
    raw = found.test.x
    assert steps["from"] == str(raw.dtype).removeprefix("torch.")
    assert distance((raw * steps["scale"] - mean) / std, found.local.prepare(raw)) <= 1e-5


def test_preprocessing_by_a_function_of_the_user_is_named() -> None:
    assert json.loads(export.facts(torch.relu, torch.float32)["preprocessing"]).endswith("relu")
    assert export.facts(Normalise(), torch.int64) == {"preprocessing": '"none"'}  # tokens


def test_weights_of_8_bits(tmp_path: Path) -> None:
    needs_onnx()
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 100)
    model, x = torch.nn.Sequential(*layers), torch.randn(16, 3, 8, 8)
    whole = export.save(model, x, tmp_path / "a.onnx", facts={"licence": "MIT"})
    small = export.quantise(whole, tmp_path / "b.onnx")
    assert small.stat().st_size < 0.4 * whole.stat().st_size
    again = export.InFile(small)
    assert again.session.get_modelmeta().custom_metadata_map["licence"] == "MIT"
    with torch.no_grad():
        assert 0 < distance(again(x), model(x)) <= 0.05
        assert distance(export.InFile(whole)(x[:3]), model(x[:3])) <= 1e-5


def test_the_command_prints_what_8_bits_cost(run: Path, tmp_path: Path) -> None:
    needs_onnx()
    path = tmp_path / "two.onnx"
    printed = call("export", str(run), "--client", "2", "--out", str(path), "--quantise", "--licence", "MIT")
    found, again = export.client(run, "2"), export.InFile(path)
    (row,) = (line for line in printed.splitlines() if "compact, 8 bits" in line)
    assert f"{100 * found.score(again).accuracy:.1f} %" in row
    assert again.session.get_modelmeta().custom_metadata_map["licence"] == "MIT"
    assert any("quant" in node.op_type.lower() for node in nodes(path)), "the file holds floats"


def nodes(path: Path) -> list[Any]:
    import onnx

    return list(onnx.load(path).graph.node)


@pytest.mark.filterwarnings("ignore")  # its own
def test_executorch(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="needs the extra `executorch`: pip install 'pfedgate[executorch]'")
    from executorch.runtime import Runtime

    found = export.client(run, "1", budget=0.3)
    path = export.save(found.compact, found.example, tmp_path / "a.pte", facts=found.facts("MIT"))
    program = Runtime.get().load_program(path)
    x = found.local.prepare(found.test.x)[:1]
    (y,) = program.load_method("forward").execute([x])
    assert distance(y, found.compact(x)) <= 1e-5
    assert {"licence", "preprocessing", "classes", "input"} <= program.method_names


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OURS, *SMALL])
def test_every_network_in_every_runtime(name: str, tmp_path: Path) -> None:
    model, x = build(name)
    small = pfedgate.compact(gated_pair(model, x, Budget(params=0.8))[0], x)
    other = torch.cat([x, x])[1:]  # a batch of another size
    wanted = tree_leaves(small(other))
    found = [tree_leaves(torch.export.load(export.save(small, x, tmp_path / "a.pt2")).module()(other))]
    if all(importlib.util.find_spec(needed) for needed in ("onnx", "onnxscript", "onnxruntime")):
        found.append([torch.from_numpy(y) for y in in_onnx(export.save(small, x, tmp_path / "a.onnx"), other)])
    for results in found:
        for a, b in zip(results, wanted, strict=True):
            assert distance(a, b) <= 1e-5


def test_without_onnx_it_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"onnx and onnxscript: pip install 'pfedgate\[export\]'"):
        export.save(torch.nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "a.onnx")


def test_without_executorch_it_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    printed = call("export", str(run), "--client", "2", "--out", str(tmp_path / "a.pte"), code=1)
    assert "pte files need executorch: pip install 'pfedgate[executorch]'" in printed


def test_the_command(run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(run), "--client", "2", "--budget", "0.3", "--out", str(tmp_path / "two.pt2")]
    printed = call(*arguments)
    found = export.client(run, "2", budget=0.3)
    for expected in (
        f"{export.parameters(found.dense):,}",
        f"{export.parameters(found.compact):,}",
        f"{100 * found.score(found.compact).accuracy:.1f} %",
        f"{100 * found.score(found.gated).accuracy:.1f} %",
        "takes batch × 1 × 8 × 8 float32",
    ):
        assert expected in printed
    x = found.local.prepare(found.test.x)
    assert distance(torch.export.load(tmp_path / "two.pt2").module()(x), found.compact(x)) <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--client", "7", "--out", "a.pt2"], "unknown client '7': Known: 0, 1, 2, 3"),
        (["--client", "0", "--out", "a.onx"], "unknown format 'onx': did you mean 'onnx'?"),
        (["--client", "0", "--out", "a"], "has no ending"),
        (["--client", "0", "--out", "a.pt2", "--quantise"], "only onnx files are quantised, not pt2: give --out"),
        (["--client", "0", "--out", "a.pt2", "--budget", "0.0001"], "smallest feasible"),
    ],
)
def test_errors_say_what_to_do(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in call("export", str(run), *arguments, code=1)
    assert not list(tmp_path.iterdir())


def test_methods_without_gates(tmp_path: Path) -> None:
    pfedgate.run({**RECIPE, "algorithm": {"name": "fedavg"}, "train": {"rounds": 1}}, out=tmp_path / "run")
    with pytest.raises(ValueError, match="fedavg, which has no gates"):
        export.client(tmp_path / "run", "0")


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_savings_are_those_of_the_compact_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "pt2":
        monkeypatch.setitem(export.NEEDS, "onnx", (("no-such-package",), ""))
    x = torch.randn(32, 1, 8, 8)
    model = pfedgate.models.build("cnn_digits")
    gated = pfedgate.gate(model, x, budget=0.3)
    small = pfedgate.compact(gated, x)
    result = pfedgate.savings(gated, x)
    assert result.widths == {name: (len(getattr(model, name).weight), len(getattr(small, name).weight))
                             for name in ("conv1", "conv2", "fc1", "out")}  # fmt: skip
    assert result.costs["parameters"] == (export.parameters(model), export.parameters(small))
    before, after = result.costs[f"{kind.upper()} file"]
    assert after == pytest.approx(export.save(small, x, tmp_path / f"a.{kind}").stat().st_size, rel=0.02)
    assert before > 2 * after
    assert model.training, "the module itself is left as it was"
    lines = str(result).splitlines()
    assert lines[0].split() == ["before", "after"]
    assert [line.split()[0] for line in lines[1:]] == ["conv1", "conv2", "fc1", "out", "parameters", "FLOP", "ms",
                                                       kind.upper()]  # fmt: skip
    assert all(line.endswith("%") for line in lines[5:])
