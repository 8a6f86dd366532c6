"""The compact module is the gated model under one selection: same outputs, and only what that selection keeps."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import distance, gated_pair, pretend
from tests.support.zoo import OURS, SMALL, Of, build, images
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import pfedgate
from pfedgate import CannotCompact, GatedModel, InfeasibleBudget
from pfedgate.core import measure
from pfedgate.gating.slicing.execute import Program, Sliced, cut

HEADS, CHANNELS = ("vit", "attention"), ("depthwise", "norms", "squeeze_excite", "one_dimension")


def sliced_pass(gated: GatedModel, x: Tensor) -> Any:
    """What the gated model does under its last selection, without its gate."""
    last = gated.last
    assert last is not None
    program = Program(gated.model, gated.plan, gated.compensate)
    return Sliced(program, last.live, last.adapted, lambda name, p: cut(p, name, last.live))(x)


def check_compact(small: nn.Module, gated: GatedModel, x: Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        found, wanted = tree_leaves(small(x)), tree_leaves(sliced_pass(gated, x))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert distance(a, b) <= tolerance


@pytest.mark.parametrize(
    ("name", "split"),
    [(n, "unit") for n in (*OURS, *SMALL)] + [(n, "head") for n in HEADS] + [(n, "channel") for n in CHANNELS],
)
def test_same_outputs_no_more_parameters_no_more_flops(name: str, split: str) -> None:
    model, x = build(name)
    gated = gated_pair(model, x, 1.0, split=split)[0].eval()
    warnings.simplefilter("ignore", UserWarning)  # small gates of small networks may have one selection left
    counts = []
    for share in (1.0, 0.5, 0.3):
        try:
            gated.rebudget(share)
        except InfeasibleBudget:
            continue
        small = pfedgate.compact(gated, x)
        with torch.no_grad():
            for a, b in zip(tree_leaves(small(x)), tree_leaves(gated(x)), strict=True):
                assert distance(a, b) <= 1e-5
        check_compact(small, gated, torch.cat([x, x])[1:])  # a batch of another size
        assert gated.last is not None
        counts.append(sum(p.numel() for p in small.parameters()))
        assert counts[-1] == gated.last.live.count <= share * gated.plan.size
        assert measure.flops(lambda: small(x)) <= measure.flops(lambda: sliced_pass(gated, x))  # noqa: B023
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == gated.plan.size


def test_layers_are_torch_s_own_under_the_names_of_the_model() -> None:
    model, x = build("resnet")
    small = pfedgate.compact(pfedgate.gate(model, x, budget=0.5), x)
    assert isinstance(small, fx.GraphModule)
    assert all(type(m).__module__.startswith("torch.nn.") for m in small.modules() if m is not small)
    assert "pfedgate" not in small.code
    own, kept = model.state_dict(), small.state_dict()
    assert set(own) == set(kept)
    assert all(kept[name].numel() <= value.numel() for name, value in own.items())
    assert type(small.get_submodule("stage2.0.conv1")) is nn.Conv2d


def test_what_slicing_restores_is_restored() -> None:
    """Softmax, grouped convolutions, completed outputs: zeros stand where the gated model has zeros."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x))
        return m.out(torch.softmax(F.relu(m.b(x)).mean((2, 3)), dim=1))

    model = Of(forward, a=nn.Conv2d(3, 24, 3), b=nn.Conv2d(24, 32, 3, groups=8), out=nn.Linear(32, 6))
    gated = gated_pair(model, images(), pfedgate.Budget(params=0.5), keep_output=False)[0].eval()
    assert gated.explain().count("\n") == 3  # the grouped convolution, softmax, the output
    gated(images())
    assert gated.last is not None
    assert gated.last.units["b"] < 8
    small = pfedgate.compact(gated, gated.last)
    check_compact(small, gated, images(5))
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 60))
    gated = gated_pair(model, torch.randn(4, 8), pfedgate.Budget(params=0.15), keep_output=False)[0].eval()
    small = pfedgate.compact(gated, torch.randn(4, 8))
    assert small(torch.randn(2, 8)).shape == (2, 60)
    assert int((small(torch.randn(2, 8)) == 0).sum()) >= 60


def test_images_of_another_size() -> None:
    for name in ("resnet", "norms"):
        model, x = build(name)
        gated = gated_pair(model, x, 0.5)[0].eval()
        small = pfedgate.compact(gated, x)
        gated(x)
        check_compact(small, gated, torch.randn(2, 3, 12, 20))


def test_writing_in_place_without_reading_the_result() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x.flatten(1))
        x.relu_()
        y = m.b(x)
        y.mul_(2)
        return m.out(y)

    model = Of(forward, a=nn.Linear(192, 30), b=nn.Linear(30, 30), out=nn.Linear(30, 5))
    gated = gated_pair(model, images(), 0.5)[0].eval()
    x, other = images(), images(4)
    small = pfedgate.compact(gated, x)
    gated(x)
    before = other.clone()
    check_compact(small, gated, other)
    assert torch.equal(other, before)


def test_one_decision_for_many_batches_is_their_mean() -> None:
    model, x = build("mlp")
    gated = gated_pair(model, x, 0.5)[0].eval()
    batches = [torch.randn(4, *x.shape[1:]), torch.randn(12, *x.shape[1:])]
    with torch.no_grad():
        outs = [gated.gate(batch) for batch in batches]
    weights, importance = ((outs[0][i] + 3 * outs[1][i]) / 4 for i in (0, 1))  # type: ignore[operator]
    small = pfedgate.compact(gated, iter(batches))
    pretend(gated, importance, weights)
    gated(x)
    check_compact(small, gated, x)


def test_a_selection_and_a_client() -> None:
    model, x = build("mlp")
    gated = gated_pair(model, x, 0.5, gate={"scope": "client", "pool": 1, "max_share": 10.0})[0].eval()
    gated.gate.remember([x])
    for small in (pfedgate.compact(gated), pfedgate.compact(gated, x)):
        assert distance(small(x), gated(x)) <= 1e-5
    assert gated.last is not None
    assert distance(pfedgate.compact(gated, gated.last)(x), gated(x)) <= 1e-5


def test_a_shift_of_the_classes_is_part_of_it() -> None:
    model, x = build("mlp")
    gated = gated_pair(model, x, 0.5, gate={"shift": True, "pool": 1, "max_share": 10.0})[0].eval()
    nn.init.normal_(gated.gate.fc.bias[-10:].data)
    wanted = gated(x)
    assert gated.last is not None
    for data in (x, gated.last, [x]):
        small = pfedgate.compact(gated, data)
        assert distance(small(x), wanted) <= 1e-5
        assert small.get_buffer("shift").abs().min() > 0


def test_masked_models_training_models_and_doubles() -> None:
    model, x = build("residual")
    sliced, masked = gated_pair(model.double(), x.double(), 0.5)
    for gated in (sliced, masked):
        gated.train()
        before = copy.deepcopy(gated.state_dict())
        small = pfedgate.compact(gated, x.double())
        assert gated.training
        assert not small.training
        assert all(torch.equal(value, before[name]) for name, value in gated.state_dict().items())
        assert distance(small(x.double()), gated.eval()(x.double())) <= 1e-12


def test_it_is_a_copy_that_can_be_trained() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, budget=0.5).eval()
    small = pfedgate.compact(gated, x)
    before = gated(x)
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.1)
    F.cross_entropy(small(x), torch.arange(3)).backward()
    assert all(p.grad is not None for p in small.parameters())
    optimizer.step()
    assert torch.equal(gated(x), before)
    assert not torch.equal(small(x), before)


def test_a_saved_one_does_not_need_this_library() -> None:
    model, x = build("attention")
    small = pfedgate.compact(gated_pair(model, x, 0.5)[0], x)
    file = io.BytesIO()
    torch.save(small, file)
    assert b"pfedgate" not in file.getvalue()  # of a pickle, names of modules are all that could lead here
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), small(x))


def _turns(x: Tensor) -> Tensor:
    return -x if float(x.detach().mean()) > 0.5 and len(x) > 2 else x


fx.wrap("_turns")
fx.wrap("len")


def test_functions_that_look_inside_are_called_not_copied() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(_turns(F.relu(m.a(x.flatten(1))))) / len(x)

    model = Of(forward, a=nn.Linear(192, 30), out=nn.Linear(30, 5))
    x = images()
    gated = gated_pair(model, x, pfedgate.Budget(params=0.5))[0].eval()
    small = pfedgate.compact(gated, x)
    gated(x)
    for other in (x, 9 * x, 9 * images(7), 9 * images(1)):
        check_compact(small, gated, other)


def test_a_place_that_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no way")

    model, x = build("norms")
    gated = gated_pair(model, x, 0.5)[0].eval()
    monkeypatch.setattr("pfedgate.gating.slicing.rules.norm_layers._spread", fails)
    with pytest.raises(CannotCompact, match=r"^group cannot be made part of a plain module: no way"):
        pfedgate.compact(gated, x)


def test_a_wrong_module_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("prelu")
    gated = gated_pair(model, x, 0.5)[0].eval()
    forgets = {F.prelu: lambda x, weight: (nn.PReLU(weight.numel(), init=7.0), {})}
    monkeypatch.setattr("pfedgate.gating.slicing.compact.LAYERS", forgets)
    with pytest.raises(CannotCompact, match="another result"):
        pfedgate.compact(gated, x)


def test_names_that_are_taken() -> None:
    """A module called as one of ours, a weight and running statistics that the forward reads itself."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.bn(m.live(x.flatten(1))))
        x = F.softmax(x, 1)  # completes x, so that there is an index
        y = F.linear(x, m.complete.weight, m.complete.bias) + m.complete(x)
        return m.out(y) + m.bn.running_mean.sum()

    model = Of(
        forward, live=nn.Linear(192, 30), bn=nn.BatchNorm1d(30), complete=nn.Linear(30, 20), out=nn.Linear(20, 5)
    )
    model.bn.running_mean.normal_()
    x = images()
    gated = gated_pair(model, x, pfedgate.Budget(params=0.5))[0].eval()
    small = pfedgate.compact(gated, x)
    gated(x)
    check_compact(small, gated, images(5))


def test_wrong_use_says_what_to_do() -> None:
    model, x = build("mlp")
    with pytest.raises(TypeError, match="takes a gated model"):
        pfedgate.compact(model, x)
    gated = pfedgate.gate(model, x, budget=0.5)
    with pytest.raises(ValueError, match="decides for each batch: give a batch"):
        pfedgate.compact(gated)
    with pytest.raises(ValueError, match="at least one"):
        pfedgate.compact(gated, [])
    flat = pfedgate.gate(model, x, budget=pfedgate.Budget(params=0.5), split="flat")
    with pytest.raises(CannotCompact, match="flat blocks cut through units"):
        pfedgate.compact(flat, x)
