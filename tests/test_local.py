from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pfedgate.core.modules import initial, module
from pfedgate.core.seeds import orders
from pfedgate.core.state import digest, equal
from pfedgate.core.types import Card, Local, Optim, Round, State, Task
from pfedgate.models import build, example, names
from pfedgate.training.fit import Batch, Workspace, evaluate, fit, loop
from pfedgate.training.workspace import Stepper, flops_per_sample

MLP = partial(build, "mlp", (5,), 3, hidden=(7,))


class Samples:
    def __init__(self, n: int, seed: int = 0, shape: tuple[int, ...] = (5,)) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.n = n
        self.x = torch.randn(n, *shape, generator=generator)
        self.y = torch.randint(0, 3, (n,), generator=generator)


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def client(n: int = 20, **round: Any) -> Local:
    return Local(Card("anna", n), Samples(n), Samples(0), Round(**round))


def by_hand(task: Task, state: State, local: Local, optimiser: torch.optim.Optimizer, model: nn.Module) -> None:
    """The loop as one would write it, with torch's own optimiser, on the same batches."""
    clip = task.optim.clip
    for epoch in range(task.epochs):
        order = torch.from_numpy(orders([local.key("batches")], [local.n], epoch)[0])
        for rows in order.split(task.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(local.train.x[rows]), local.train.y[rows]).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimiser.step()


OPTIMISERS: list[tuple[Optim, Any]] = [
    (Optim(lr=0.1, momentum=0, weight_decay=0, clip=None), partial(torch.optim.SGD, lr=0.1)),
    (Optim(lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)),
    (Optim(lr=0.1, clip=0.05), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)),
    (Optim("adam", lr=0.01, weight_decay=0.1), partial(torch.optim.Adam, lr=0.01, weight_decay=0.1)),
    (Optim("adamw", lr=0.01, weight_decay=0.1), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize(("optim", "torchs"), OPTIMISERS)
def test_fit_is_plain_training(optim: Optim, torchs: Any) -> None:
    task, local = Task(MLP, optim=optim, batch=6, epochs=3), client()
    state = initial(task, 0)
    before = digest(state)
    done = fit(task, state, local)
    model = module(task, state)
    by_hand(task, state, local, torchs(model.parameters()), model)
    for name, value in model.named_parameters():
        torch.testing.assert_close(done.state[name], value.detach(), atol=2e-6, rtol=1e-5)
    assert digest(state) == before
    assert (done.steps, done.samples) == (12, 60)


def test_same_call_same_bits_with_dropout_and_batchnorm() -> None:
    task = Task(Noisy, batch=6)
    first, second = (fit(task, initial(task, 0), client(20, index=2)) for _ in range(2))
    assert equal(first.state, second.state)
    assert first.loss == second.loss
    assert int(first.state["1.num_batches_tracked"]) == 4
    other = fit(task, initial(task, 0), client(20, index=3))
    assert not equal(first.state, other.state)


def test_the_schedule_and_lr_scale_the_rate() -> None:
    task = Task(MLP, optim=Optim(lr=0.1), batch=6)
    half = fit(task, initial(task, 0), client(factor=0.5))
    assert equal(half.state, fit(replace(task, optim=Optim(lr=0.05)), initial(task, 0), client()).state)
    assert equal(half.state, fit(task, initial(task, 0), client(), lr=0.05).state)
    assert equal(fit(task, initial(task, 0), client(), lr=0.0).state, initial(task, 0))


def test_only_chosen_names_are_trained() -> None:
    task, chosen = Task(MLP, batch=6), ("out.weight", "out.bias")
    state = initial(task, 0)
    done = fit(task, state, client(), names=chosen)
    for name, value in state.items():
        assert torch.equal(value, done.state[name]) == (name not in chosen)
    assert list(done.state) == list(state)
    assert done.flops < fit(task, state, client()).flops
    with pytest.raises(KeyError, match=r"did you mean 'out\.bias'"):
        fit(task, state, client(), names=("out.bia",))


def test_statistics_of_a_frozen_norm_stand_still() -> None:
    task = Task(Noisy, batch=6)
    frozen = fit(task, initial(task, 0), client(), names=("3.weight", "3.bias")).state
    assert int(frozen["1.num_batches_tracked"]) == 0
    assert int(fit(task, initial(task, 0), client()).state["1.num_batches_tracked"]) == 4


def test_prox_pulls_to_the_anchor_whatever_the_clipping() -> None:
    """With lr·prox = 1 and no momentum every step lands one clipped gradient away from the anchor."""
    optim = Optim(lr=0.1, momentum=0, weight_decay=0, clip=0.01)
    task = Task(MLP, optim=optim, batch=6, epochs=4)
    state, anchor = initial(task, 0), initial(task, 1)
    done = fit(task, state, client(), anchor=anchor, prox=10.0)
    gap = sum((done.state[name] - anchor[name]).square().sum() for name in anchor)
    assert float(gap) ** 0.5 <= 0.1 * 0.01 + 1e-6
    assert equal(fit(task, state, client(), anchor=anchor).state, fit(task, state, client()).state)


def test_weights_are_divided_by_the_batch_size() -> None:
    task = Task(MLP, optim=Optim(lr=0.1, momentum=0, weight_decay=0, clip=None), batch=6)
    ones = fit(task, initial(task, 0), client(), weights=torch.ones(20))
    assert equal(ones.state, fit(task, initial(task, 0), client()).state)
    halves = fit(task, initial(task, 0), client(), weights=torch.full((20,), 0.5))
    slower = fit(task, initial(task, 0), client(), lr=0.05)
    for name, value in slower.state.items():
        torch.testing.assert_close(halves.state[name], value)


def test_an_objective_of_ones_own() -> None:
    task, targets = Task(MLP, batch=6, epochs=200, optim=Optim(lr=0.05)), torch.randn(20, 3) / 10

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch.x) - targets[batch.rows]).square().mean()

    assert fit(task, initial(task, 0), client(), objective=objective, steps=8).loss > 0.01
    done = fit(task, initial(task, 0), client(), objective=objective)
    fitted = module(task, done.state)(client().train.x).detach()
    assert float((fitted - targets).square().mean()) < 0.01


def test_a_step_of_ones_own_and_a_hook() -> None:
    task = Task(MLP, batch=20, optim=Optim(lr=0.1, momentum=0, weight_decay=0, clip=None))

    def step(work: Workspace, batch: Batch) -> Tensor:
        loss = work.gradient(batch, task.loss)
        work.flat.sub_(work.grad, alpha=0.1)
        return loss

    def twice(work: Workspace, batch: Batch) -> None:
        work.grad.mul_(2)

    plain = fit(task, initial(task, 0), client())
    assert equal(fit(task, initial(task, 0), client(), step=step).state, plain.state)
    hooked = fit(task, initial(task, 0), client(), gradient=twice, lr=0.05)
    for name, value in plain.state.items():
        torch.testing.assert_close(hooked.state[name], value)


def test_a_stepper_goes_on_with_the_slots_of_another() -> None:
    two = torch.optim.SGD([parameter := torch.zeros(3, requires_grad=True)], lr=0.1, momentum=0.9)
    ours, vector = Stepper(Optim(lr=0.1, weight_decay=0)), torch.zeros(3)
    for turn in range(4):
        parameter.grad = torch.ones(3)
        two.step()
        ours.step(vector, torch.ones(3))
        ours = Stepper(ours.optim, slots=ours.slots()) if turn == 1 else ours
    torch.testing.assert_close(vector, parameter.detach())


@pytest.mark.parametrize(
    ("n", "drop", "steps", "epochs", "sizes"),
    [
        (20, False, None, 1, [6, 6, 6, 2]),
        (20, True, None, 1, [6, 6, 6]),
        (4, True, None, 1, [4]),  # smaller than a batch: keeps what it has
        (13, False, None, 1, [6, 6, 1]),
        (8, False, 5, 1, [6, 2, 6, 2, 6]),
        (0, False, None, 1, []),
        (8, False, None, 0, []),
    ],
)
def test_batches(n: int, drop: bool, steps: int | None, epochs: int, sizes: list[int]) -> None:
    task, seen = Task(MLP, batch=6, drop_last=drop, steps=steps, epochs=epochs), []

    def note(batch: Batch) -> Tensor:
        seen.append(batch.rows)
        assert torch.equal(batch.x, client(n).train.x[batch.rows])
        return torch.tensor(float(batch.n))

    mean, count = loop(task, client(n), note)
    assert [len(rows) for rows in seen] == sizes
    assert count == len(sizes)
    assert mean == pytest.approx(sum(sizes) / len(sizes)) if sizes else mean != mean
    if n == 20 and not drop:
        assert sorted(torch.cat(seen).tolist()) == list(range(20))


def test_batchnorm_never_sees_one_sample() -> None:
    seen: list[int] = []
    loop(Task(Noisy, batch=6), client(13), lambda batch: seen.append(batch.n) or torch.zeros(()))
    assert seen == [6, 6]
    assert fit(Task(Noisy, batch=6), initial(Task(Noisy), 0), client(1)).steps == 0


class NoSync(TorchDispatchMode):
    """Counts what would make a host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "item")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS:
            self.seen[name] += 1
        if name in ("_to_copy", "copy_") and (kwargs or {}).get("device") not in (None, torch.device("cpu")):
            self.seen["copy"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optim", [Optim(), Optim("adamw", lr=0.01)])
def test_the_loop_reads_nothing_back(optim: Optim) -> None:
    """One number at the end of a client's training, however many batches: nothing in the loop waits."""
    task, counts = Task(Noisy, batch=4, optim=optim), []
    fit(task, initial(task, 0), client(8))  # FLOPs are measured once per shape: not part of the loop
    for n in (8, 40):
        state = initial(task, 0)
        with NoSync() as mode:
            fit(task, state, client(n), anchor=state, prox=0.1, weights=torch.ones(n))
        counts.append(dict(mode.seen))
    assert counts[0] == counts[1] == {"_local_scalar_dense": 1}


def test_the_watch_sees_a_wait() -> None:
    task = Task(MLP, batch=4)
    with NoSync() as mode:
        loop(task, client(8), lambda batch: torch.tensor(float(batch.x.sum())))
    assert mode.seen["_local_scalar_dense"] == 3


def test_evaluate_counts_and_changes_nothing() -> None:
    task = Task(Noisy, eval_batch=7)
    model = module(task, initial(task, 0)).train()
    before, part = digest(model.state_dict()), Samples(20)
    score = evaluate(task, model, part, client())
    with torch.no_grad():
        output = model.eval()(part.x)
    assert score.n == 20
    assert score.accuracy == pytest.approx(float((output.argmax(1) == part.y).float().mean()))
    assert score.loss == pytest.approx(float(F.cross_entropy(output, part.y)), rel=1e-5)
    assert digest(model.state_dict()) == before
    assert evaluate(task, model, Samples(0), client()).n == 0


def test_sequences_are_scored_by_position() -> None:
    class Speaker(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.one_hot(x, 4).float() * 50

    part = Samples(6)
    part.x, part.y = torch.tensor([[0, 1], [2, 3]] * 3), torch.tensor([[0, 1], [2, 0]] * 3)
    score = evaluate(Task(Speaker), Speaker(), part, replace(client(), prepare=lambda x: x))
    assert score.accuracy == pytest.approx(0.75)
    assert score.loss == pytest.approx(12.5)


@pytest.mark.parametrize("name", names())
def test_flops_are_those_of_torch(name: str) -> None:
    x, make = example(name, batch=2), partial(build, name)
    with FlopCounterMode(display=False) as forward:
        make().eval()(x)
    with FlopCounterMode(display=False) as both:
        make()(x).sum().backward()
    assert flops_per_sample(make, None, x.shape[1:], x.dtype, False) * 2 == forward.get_total_flops()
    assert flops_per_sample(make, None, x.shape[1:], x.dtype, True) * 2 == both.get_total_flops()


def test_a_wrong_state_says_what_is_wrong() -> None:
    task = Task(MLP)
    state = initial(task, 0)
    with pytest.raises(ValueError, match="the model wants"):
        fit(task, {**state, "out.bias": torch.zeros(4)}, client())
    with pytest.raises(KeyError, match=r"unknown tensor 'out\.bias'"):
        fit(task, {name: value for name, value in state.items() if name != "out.bias"}, client())


def test_pooling_before_a_relu_changes_no_bit() -> None:
    """What a workspace runs has another order than what the user built, and nothing else."""
    relu = nn.ReLU()

    def build_model() -> nn.Module:
        head = (nn.Flatten(), nn.Linear(24, 16), relu, nn.Linear(16, 3))
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), relu, nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), *head
        )

    task = Task(build_model, example=torch.zeros(1, 2, 14, 14))
    state = initial(task, 0)
    ours, plain = module(task, state), build_model()
    plain.load_state_dict(state)
    assert [type(layer).__name__ for layer in ours.children()] != [type(layer).__name__ for layer in plain.children()]
    assert len(list(ours._modules)) == len(list(plain._modules))
    x = torch.randn(9, 2, 14, 14, generator=torch.Generator().manual_seed(0))
    for one in (ours, plain):
        one(x).square().sum().backward()
    assert torch.equal(ours(x), plain(x))
    others = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, others[name].grad), name  # type: ignore[arg-type]
