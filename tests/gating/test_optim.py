"""Law 5, second half: steps move live entries only, and move them as torch's own optimisers would."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compare import distance, gated_pair, loss, pretend
from tests.support.zoo import build
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget, GateConfig, GatedModel
from pfedgate.gating.slicing.live import Pass

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd with momentum": {"momentum": 0.9},
    "sgd with decay": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {},
    "adam with decay": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
}
TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def values(gated: GatedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in gated.model.named_parameters()}


def step(gated: GatedModel, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    loss(gated(x)).backward()
    optimizer.step()


def random_gate(gated: GatedModel, seed: int) -> None:
    pretend(gated, torch.rand(len(gated.plan.blocks), generator=torch.Generator().manual_seed(seed)))


def begun(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """The passes that begin from now on."""
    passes: list[Pass] = []

    def make(*given: Any) -> Pass:
        passes.append(Pass(*given))
        return passes[-1]

    monkeypatch.setattr("pfedgate.gating.model.Pass", make)
    return passes


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(
    ("name", "split"), [("residual", "unit"), ("text_gru", "unit"), ("attention", "head"), ("mlp", "flat")]
)
def test_what_was_not_live_does_not_move(name: str, split: str, kind: str) -> None:
    model, x = build(name)
    budget = Budget(params=0.7) if split == "head" else 0.5
    gated = pfedgate.gate(model, x, budget, split=split, gate={"max_share": 9.0, "pool": 1})
    optimizer = gated.optimizer(kind.split()[0], lr=0.01, **OPTIONS[kind])
    moved: dict[str, Tensor] = {}
    for turn in range(3):
        random_gate(gated, turn)
        before = values(gated)
        slots = {key: slot for key, slot in optimizer.memory().items() if not key.endswith("/step")}
        step(gated, optimizer, x)
        assert gated.last is not None
        for key, p in gated.model.named_parameters():
            alive = torch.from_numpy(gated.last.live.elements(key))
            assert torch.equal(p[~alive], before[key][~alive]), key
            moved[key] = moved.get(key, torch.zeros_like(alive)) | (p != before[key])
            for slot, old in slots.items():
                if slot.rpartition("/")[0] == f"model/{key}":
                    assert torch.equal(optimizer.memory()[slot][~alive], old[~alive]), slot
    still = [key for key, places in moved.items() if not places.any()]
    # Attention does not depend on the bias of its keys, nor a batch norm on the bias before it, but for rounding.
    assert still in ([], ["k.bias"], ["a.bias"])
    assert 1 < len(optimizer.touched) <= 3


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("split", ["unit", "flat"])
def test_equals_torch_when_all_is_live(kind: str, split: str) -> None:
    model, x = build("cnn_cifar10")
    other, _ = build("cnn_cifar10")
    options = {"lr": 0.01, **OPTIONS[kind]}
    gated = pfedgate.gate(model, x, 1.0, split=split, gate=GateConfig(init="ones"))
    optimizer = gated.optimizer(kind.split()[0], gate_lr=0.0, **options)
    plain = TORCH[kind.split()[0]](other.parameters(), **options, foreach=False)
    for _ in range(4):
        step(gated, optimizer, x)
        step(other, plain, x)  # type: ignore[arg-type]
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", OPTIONS)
def test_sliced_and_masked_take_the_same_steps(kind: str) -> None:
    model, x = build("shared")
    sliced, masked = gated_pair(model.double(), x.double(), 0.5)
    optimizers = [g.optimizer(kind.split()[0], lr=0.01, clip=1.0, **OPTIONS[kind]) for g in (sliced, masked)]
    for turn in range(4):
        for gated, optimizer in zip((sliced, masked), optimizers, strict=True):
            random_gate(gated, turn)
            step(gated, optimizer, x.double())
    for (name, a), (_, b) in zip(sliced.model.named_parameters(), masked.model.named_parameters(), strict=True):
        assert distance(a, b) < 1e-10, name
    assert optimizers[0].touched == optimizers[1].touched
    for (name, a), (_, b) in zip(sliced.gate.named_parameters(), masked.gate.named_parameters(), strict=True):
        assert distance(a, b) < 1e-6, name


def test_a_step_undoes_the_division_by_the_live_share_of_inputs() -> None:
    """W' = W / c: without care, a step would move W' by 1 / c^2 of what the plain gradient asks for.

    With c = sqrt(in), W' moves by the gradient times sqrt(out / in), so W by the gradient times sqrt(out).
    """
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate=GateConfig(init="ones", paths=2))
    optimizer = gated.optimizer("sgd", lr=1.0, gate_lr=0.0)
    before = values(gated)
    y = gated(x)
    (outer,) = torch.autograd.grad(loss(y), y, retain_graph=True)
    loss(y).backward()
    optimizer.step()
    assert gated.last is not None
    live = gated.last.live
    written = live.share_written("fc1.weight")
    assert written == live.share_read("out.weight") < 0.6
    assert live.share_read("fc1.weight") == live.share_written("out.weight") == 1.0
    alive = torch.from_numpy(live.elements("out.weight"))
    hidden = torch.relu(x @ before["fc1.weight"].T + before["fc1.bias"]) * alive[0]
    wanted = before["out.weight"] - outer.T @ hidden
    assert torch.allclose(model.out.weight, wanted, rtol=1e-4, atol=1e-5)
    inner = (outer @ (before["out.weight"] * alive / written**0.5)) * (hidden > 0)
    wanted = before["fc1.weight"] - written**0.5 * inner.T @ x
    assert torch.allclose(model.fc1.weight, wanted, rtol=1e-4, atol=1e-5)


def test_clipping_bounds_model_and_gate_separately() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5, compensate="none")
    before, gate = values(gated), [p.detach().clone() for p in gated.parameters_private()]
    step(gated, gated.optimizer("sgd", lr=1.0, clip=0.01), x)
    moved = torch.cat([(p - before[n]).flatten() for n, p in model.named_parameters()]).norm()
    turned = torch.cat([(p - q).flatten() for p, q in zip(gated.parameters_private(), gate, strict=True)]).norm()
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-3)
    assert 0 < float(turned.detach()) <= 0.0101


def test_usual_orders_of_calls() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5)
    optimizer = gated.optimizer("sgd", lr=0.1)
    before = values(gated)
    value = loss(gated(x))
    optimizer.zero_grad()  # after the forward pass, as many do
    value.backward()
    with torch.no_grad():
        gated.eval()(torch.randn(5, 64))  # a look at validation data, with another selection
    optimizer.step()
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="nothing to step on"):
        optimizer.step()
    with torch.no_grad():
        gated(x)
    with pytest.raises(RuntimeError, match="nothing to step on"):
        optimizer.step()


def test_two_backward_passes_through_one_graph_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of large live weights are freed as soon as their gradient is there, unless the graph is kept."""
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.7)
    optimizer = gated.optimizer("sgd", lr=0.1)  # without one, gradients would go to the model
    passes = begun(monkeypatch)
    gradients = []
    for times in (1, 2):
        value = loss(gated(x))
        for turn in range(times):
            value.backward(retain_graph=turn + 1 < times)
        leaves = passes[-1].leaves
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
        assert leaves["fc1.weight"].untyped_storage().nbytes() == 4
        assert leaves["fc1.weight"].grad.numel() > 16384  # type: ignore[union-attr]
    for name, once in gradients[0].items():
        assert torch.allclose(2 * once, gradients[1][name], rtol=1e-4, atol=1e-6), name
    assert not optimizer.touched


def test_live_parts_in_one_piece_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.3, gate={"ranking": "nested"})
    optimizer = gated.optimizer("sgd", lr=0.1)
    passes = begun(monkeypatch)
    value = loss(gated(x))
    (only,) = passes
    assert only.live is gated.last.live
    whole = dict(model.named_parameters())
    for name, leaf in only.leaves.items():
        there = leaf.untyped_storage().data_ptr() == whole[name].untyped_storage().data_ptr()
        assert there == (len(only.live.extents[name].rectangles) == 1), name
    assert only.leaves["conv2.weight"].numel() < whole["conv2.weight"].numel()
    with torch.no_grad():
        whole["out.weight"].mul_(2.0)  # as for any module, gradients of other weights would be wrong
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    step(gated, optimizer, x)


def test_gate_alone() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5)
    optimizer = gated.optimizer("adam", lr=0.1, gate_lr=0.1)
    before, gate = values(gated), [p.detach().clone() for p in gated.parameters_private()]
    loss(gated(x)).backward()
    optimizer.step_gate()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert any(not torch.equal(p, q) for p, q in zip(gated.parameters_private(), gate, strict=True))


@pytest.mark.parametrize("before", ["none", "one that is gone"])
def test_gradients_go_to_the_model_without_a_live_optimiser(before: str) -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5)
    if before != "none":
        step(gated, gated.optimizer("sgd", lr=0.1), x)
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
    start = values(gated)
    step(gated, optimizer, x)
    assert all(not torch.equal(p, start[n]) for n, p in model.named_parameters())


def test_unknown_names() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5)
    with pytest.raises(ValueError, match="unknown optimiser 'adm': did you mean 'adam'"):
        gated.optimizer("adm", lr=0.1)
    with pytest.raises(TypeError, match="momentun"):
        gated.optimizer("sgd", lr=0.1, momentun=0.9)
    gate = {"scope": "sample", "max_share": 9}
    sample = pfedgate.gate(nn.Linear(4, 3), torch.zeros(2, 4), 1.0, split="flat", gate=gate)
    with pytest.raises(ValueError, match="train with scope 'batch'"):
        sample.optimizer(lr=0.1)


@pytest.mark.parametrize("kind", OPTIONS)
def test_memory_and_recall_go_on_where_the_other_stopped(kind: str) -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate={"max_share": 9.0, "pool": 1})

    def run(turns: range, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer = gated.optimizer(kind.split()[0], lr=0.01, gate_lr=0.01, **OPTIONS[kind])
        optimizer.recall(memory)
        for turn in turns:
            step(gated, optimizer, x + 0.1 * turn)
        return optimizer.memory()

    start = {key: value.clone() for key, value in gated.state_dict().items()}
    run(range(4), {})
    whole = {key: value.clone() for key, value in gated.state_dict().items()}
    gated.load_state_dict(start)
    run(range(2, 4), run(range(2), {}))
    for key, value in gated.state_dict().items():
        assert torch.equal(value, whole[key]), key


@pytest.mark.parametrize("kind", OPTIONS)
def test_state_dict_goes_on_where_the_other_stopped(kind: str, tmp_path: Path) -> None:
    """As with any optimiser of torch, through a file and with the rates that a schedule had reached."""
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate={"max_share": 9.0, "pool": 1})
    start = {key: value.clone() for key, value in gated.state_dict().items()}

    def made() -> tuple[Any, Any]:
        optimizer = gated.optimizer(kind.split()[0], lr=0.01, gate_lr=0.02, **OPTIONS[kind])
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def run(optimizer: Any, schedule: Any, turns: range) -> None:
        for turn in turns:
            random_gate(gated, turn)
            step(gated, optimizer, x)
            schedule.step()

    optimizer, schedule = made()
    run(optimizer, schedule, range(4))
    whole, rates = values(gated), [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.01 / 16, 0.02 / 16])
    gated.load_state_dict(start)
    optimizer, schedule = made()
    run(optimizer, schedule, range(2))
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer, schedule = made()
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    run(optimizer, schedule, range(2, 4))
    assert [group["lr"] for group in optimizer.param_groups] == rates
    for key, value in values(gated).items():
        assert torch.equal(value, whole[key]), key


def test_a_closure_is_called_with_gradients() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5)
    optimizer = gated.optimizer("sgd", lr=0.1)
    before = values(gated)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(gated(x))
        value.backward()
        return float(value.detach())

    with torch.no_grad():
        first = float(loss(gated(x)))
    assert optimizer.step(closure) == pytest.approx(first, rel=1e-5)
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("execution", ["sliced", "masked"])
@pytest.mark.parametrize("kind", ["sgd", "sgd with decay", "adam"])
@pytest.mark.parametrize("how", ["one loss", "accumulated"])
def test_gradients_of_several_passes_add_up(how: str, kind: str, execution: str) -> None:
    """Contrastive losses and accumulation: other blocks in each pass, and what none of them kept stays."""
    model, x = build("residual")
    gated = pfedgate.gate(
        model.double(),
        x.double(),
        0.5,
        gate={"max_share": 9.0, "pool": 1},
        execution=execution,
        compensate="none" if execution == "masked" else "sqrt",
    )
    gated.eval()  # so that batch norms do not tell the passes apart
    reference = copy.deepcopy(gated)
    optimizer = gated.optimizer(kind.split()[0], lr=0.01, gate_lr=0.0, **OPTIONS[kind])
    before, total, alive = values(gated), {}, {}
    importances = [torch.rand(len(gated.plan.blocks), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    results = []
    for importance in importances:
        pretend(gated, importance)
        results.append(loss(gated(x.double())))
        if how == "accumulated":
            results[-1].backward()
        pretend(reference, importance)
        reference.zero_grad()
        loss(reference(x.double())).backward()
        assert reference.last is not None
        for name, p in reference.model.named_parameters():
            live = reference.last.live
            part = torch.zeros_like(p) if p.grad is None else p.grad * optimizer._restoring(name, live)
            total[name] = total.get(name, 0) + part
            alive[name] = alive.get(name, False) | torch.from_numpy(live.elements(name))
    if how == "one loss":
        sum(results).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert len(optimizer.touched) == 2
    for name, p in gated.model.named_parameters():
        assert torch.equal(p[~alive[name]], before[name][~alive[name]]), name
        if kind == "sgd":
            wanted = before[name] - 0.01 * torch.where(alive[name], total[name], 0)
            assert distance(p, wanted) < 1e-10, name
    assert any(not torch.equal(p, before[name]) for name, p in gated.model.named_parameters())
    with pytest.raises(RuntimeError, match="nothing to step on"):
        optimizer.step()


def test_passes_without_gradients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5)
    optimizer = gated.optimizer("sgd", lr=0.1)
    passes = begun(monkeypatch)
    for _ in range(3):
        gated(x)  # a look at data, without torch.no_grad()
    looks = [weakref.ref(leaf) for one in passes for leaf in one.leaves.values() if leaf.numel() > 1000]
    passes.clear()
    step(gated, optimizer, x)
    passes.clear()
    gc.collect()
    assert looks
    assert not any(look() is not None for look in looks)


@pytest.mark.parametrize("frozen", ["theta in part", "all of theta", "gate"])
@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_frozen_parameters_do_not_move(execution: str, frozen: str) -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate={"max_share": 9.0, "pool": 1}, execution=execution)
    shared, private = dict(gated.model.named_parameters()), list(gated.gate.parameters())
    still = {"gate": private, "all of theta": list(shared.values()), "theta in part": [shared["fc1.weight"]]}[frozen]
    for p in still:
        p.requires_grad_(False)
    optimizer = gated.optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in gated.named_parameters()}
    for _ in range(2):
        step(gated, optimizer, x)
    moved = {name for name, p in gated.named_parameters() if not torch.equal(p, before[name])}
    names = {name for name, p in gated.named_parameters() if any(p is one for one in still)}
    assert not moved & names
    assert moved
