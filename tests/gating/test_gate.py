"""The gate: its size, every switch, and the promises other parts build on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gates import BLOCKS, CLASSES, SHAPES, batch, changed_entries, make_gate, weighed_loss
from torch import Tensor

from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.gate.features import moments
from pfedgate.gating.gate.network import Gate


def configs() -> st.SearchStrategy[GateConfig]:
    """Every combination of switches that is not refused."""
    fields = {
        "pre_norm": st.booleans(),
        "post_norm": st.sampled_from(["blocks", "batch", "none"]),
        "activation": st.sampled_from(["centred", "linear", "sigmoid", "none"]),
        "paths": st.sampled_from([1, 2]),
        "scope": st.sampled_from(["batch", "sample", "client"]),
        "shift": st.booleans(),
    }
    return st.fixed_dictionaries(fields).map(GateConfig.of)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    ("shape", "d", "blocks", "classes"),
    [
        ((1, 3, 32, 32), 256_830, 53, 10),
        ((1, 1, 28, 28), 2_278_334, 43, 62),
        ((1, 3, 32, 32), 3_537_444, 43, 100),
        ((1, 3, 32, 32), 3_537_444, 142, 100),
    ],
)
def test_size_on_the_papers_networks(shape: tuple[int, ...], d: int, blocks: int, classes: int, shift: bool) -> None:
    gate = Gate(torch.zeros(shape), blocks, GateConfig(shift=shift), model_size=d, classes=classes)
    features = 16 * shape[1]  # the finest pooling fits
    few = 6 * blocks + 2 * shape[1] + 6 + shift * (features + 1) * classes
    assert gate.size == 2 * features * blocks + few
    assert gate.size <= 0.063 * d


@pytest.mark.parametrize(("blocks", "size"), [(24, 2460), (49, 5010)])
def test_size_of_the_prototype_whose_accuracy_is_known(blocks: int, size: int) -> None:
    gate = Gate(torch.zeros(1, 3, 16, 16), blocks, GateConfig(pool=4, max_share=1), model_size=31_582)
    assert gate.size == size


def test_the_papers_gate_on_all_pixels_is_larger_than_the_model() -> None:
    with pytest.warns(UserWarning, match=r"325,962 parameters, 126\.9% of the model's 256,830"):
        gate = Gate(torch.zeros(1, 3, 32, 32), 53, GateConfig.paper(pool=0), model_size=256_830)
    assert gate.size == 2 * 3072 * 53 + 6 * 53 + 12


def test_pooling_is_as_fine_as_the_share_allows() -> None:
    cells = {}
    for size in (50_000, 30_000, 15_000, 6_000):
        gate = Gate(torch.zeros(1, 3, 32, 32), 25, model_size=size)
        cells[size] = gate.reader.cells[0]
        assert gate.size <= 0.063 * size
    assert cells == {50_000: 4, 30_000: 3, 15_000: 2, 6_000: 1}
    with pytest.warns(UserWarning, match="use fewer blocks"):
        assert Gate(torch.zeros(1, 3, 32, 32), 25, model_size=1000).reader.cells == (1, 1)


@given(config=configs(), kind=st.sampled_from(sorted(SHAPES)), n=st.integers(1, 5), training=st.booleans())
def test_every_combination_of_switches(config: GateConfig, kind: str, n: int, training: bool) -> None:
    gate = make_gate(config, kind).train(training)
    x = batch(kind, n, seed=3)
    twin, before = copy.deepcopy(gate), copy.deepcopy(gate.state_dict())
    out = gate(x)
    assert out.weights.shape == out.importance.shape == (BLOCKS,)
    assert (out.shift is None) == (not config.shift)
    assert out.shift is None or out.shift.shape == (CLASSES,)
    again = twin(x)
    for mine, theirs in zip(out, again, strict=True):
        assert mine is None or torch.isfinite(mine).all()
        assert mine is None or torch.equal(mine, theirs)
    if config.activation == "centred":
        assert bool(((out.weights > 0) & (out.weights < 2)).all())
    if config.paths == 1:
        assert torch.equal(out.importance, out.weights)
    else:
        assert bool(((out.importance > 0) & (out.importance < 1)).all())
    moved = changed_entries(gate, before)
    if not training or config.scope != "batch":
        assert not moved
    assert all("running" in name or "batches_seen" in name for name in moved)
    weighed_loss(out).backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("post_norm", ["blocks", "batch", "none"])
@pytest.mark.parametrize("scope", ["batch", "sample", "client"])
@pytest.mark.parametrize("activation", ["centred", "linear", "sigmoid", "none"])
def test_gradients_reach_every_parameter(post_norm: Any, scope: Any, activation: Any) -> None:
    gate = make_gate(GateConfig(post_norm=post_norm, scope=scope, activation=activation, shift=True))
    torch.nn.init.normal_(gate.fc.weight)  # the class rows start at zero, which would stop the chain there
    weighed_loss(gate(batch())).backward()
    for name, parameter in gate.named_parameters():
        # A norm over the batch takes the bias before it off again.
        if (name, post_norm, scope) != ("fc.bias", "batch", "batch"):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@given(
    n=st.integers(1, 300),
    seed=st.integers(0, 99),
    training=st.booleans(),
    kind=st.sampled_from(sorted(SHAPES)),
)
def test_init_ones_is_exactly_one(n: int, seed: int, training: bool, kind: str) -> None:
    for activation in ("centred", "linear", "none"):
        for post_norm in ("blocks", "batch", "none"):
            config = GateConfig.of({"init": "ones", "activation": activation, "post_norm": post_norm, "shift": True})
            gate = make_gate(replace(config, weight_range=1.0 if activation == "none" else 0.3), kind, seed)
            out = gate.train(training)(100 * batch(kind, n, seed) if kind != "tokens" else batch(kind, n, seed))
            assert torch.equal(out.weights, torch.ones(BLOCKS))
            assert out.shift is not None
            assert torch.equal(out.shift, torch.zeros(CLASSES))
            assert out.importance.std() > 0  # blocks are still told apart
            weighed_loss(out).backward()  # and M can leave 1
            moves = gate.fc.bias.grad if gate.post_norm is None else gate.post_norm.bias.grad
            assert moves is not None
            assert moves.flatten()[:BLOCKS].abs().min() > 0


def test_the_default_is_the_formula_of_the_findings() -> None:
    gate, x = make_gate(GateConfig(shift=True, initial_scale=1.0)), batch(n=5)
    torch.nn.init.normal_(gate.fc.weight)
    h = torch.nn.functional.adaptive_avg_pool2d(_switchable(gate, x), 4).flatten(1)
    z = h @ gate.fc.weight.T + gate.fc.bias
    norm = torch.nn.functional.layer_norm
    weights = (2 * torch.sigmoid(norm(z[:, :BLOCKS], (BLOCKS,)))).mean(0)
    importance = torch.sigmoid(norm(z[:, BLOCKS : 2 * BLOCKS], (BLOCKS,))).mean(0)
    out = gate(x)
    torch.testing.assert_close(out.weights, weights)
    torch.testing.assert_close(out.importance, importance)
    torch.testing.assert_close(out.shift, z[:, 2 * BLOCKS :].mean(0))


def _switchable(gate: Gate, x: Tensor) -> Tensor:
    norm = copy.deepcopy(gate.pre_norm)
    assert norm is not None
    return norm(x.flatten(2), *moments(x)).view_as(x)  # type: ignore[no-any-return]


def test_batchnorm_hides_the_batch_from_the_gate_and_block_norm_does_not() -> None:
    def difference(config: GateConfig) -> float:
        gate = make_gate(config)
        dark, bright = batch(n=64, seed=1) - 1, batch(n=64, seed=2).abs() + 1
        return (gate(dark).weights - gate(bright).weights).abs().max().item()

    assert difference(GateConfig.paper(pre_norm=False)) < 0.05
    assert difference(GateConfig(pre_norm=False, initial_scale=1.0)) > 0.3


def test_range_scale_and_bias_of_the_weights() -> None:
    wild = make_gate(GateConfig(weight_range=0.25, initial_scale=100.0))(batch()).weights
    assert wild.min() >= 0.75
    assert wild.max() <= 1.25
    assert wild.std() > 0.05
    calm = make_gate(GateConfig(initial_scale=0.01))(batch()).weights
    assert 0 < (calm - 1).abs().max() < 0.02
    for post_norm in ("batch", "none"):
        config = GateConfig.paper(initial_bias=3.0, initial_scale=0.1, post_norm=post_norm)
        assert make_gate(config)(batch()).weights.mean().item() == pytest.approx(0.95, abs=0.02)


def test_scope_sample_depends_on_nothing_but_the_sample() -> None:
    for post_norm in ("blocks", "batch"):
        gate = make_gate(GateConfig.of({"scope": "sample", "post_norm": post_norm, "shift": True}))
        x = batch()
        for training in (True, False):
            each = gate.train(training).per_sample(x)
            for i in range(len(x)):
                alone = gate(x[i : i + 1])
                torch.testing.assert_close(alone.weights, each.weights[i])
                torch.testing.assert_close(alone.importance, each.importance[i])
        torch.testing.assert_close(gate(x).weights, each.weights.mean(0))


def test_a_gate_trained_on_batches_can_decide_per_sample() -> None:
    gate = make_gate()
    gate(batch())
    other = make_gate(GateConfig(scope="sample"), seed=5)
    other.load_state_dict(gate.state_dict())
    torch.testing.assert_close(other(batch(n=1)).weights, gate.eval()(batch(n=1)).weights)


def test_what_was_read_can_be_kept_and_picked_from() -> None:
    gate, x = make_gate(GateConfig(shift=True)).eval(), batch(n=20)
    seen, rows = gate.read(x), torch.tensor([3, 1, 17])
    picked = gate.decide(type(seen)(*(part[rows] for part in seen)))
    for kept, fresh in zip(picked, gate(x[rows]), strict=True):
        torch.testing.assert_close(kept, fresh)


@pytest.mark.parametrize("config", [GateConfig(), GateConfig.paper(), GateConfig(scope="client", shift=True)])
def test_state_dict_round_trip(config: GateConfig) -> None:
    gate = make_gate(config)
    gate(batch(seed=4))
    fresh = Gate(batch(), BLOCKS, config, model_size=10**6, classes=CLASSES)
    fresh.load_state_dict(gate.state_dict())
    for mine, theirs in zip(gate.eval()(batch(n=4)), fresh.eval()(batch(n=4)), strict=True):
        assert mine is None or torch.equal(mine, theirs)


def test_a_generator_decides_the_initialisation_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = make_gate(seed=1), make_gate(seed=1), make_gate(seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.fc.weight, same.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    bound = one.reader.features**-0.5
    assert 0.9 * bound < one.fc.weight.abs().max() <= bound


@pytest.mark.parametrize("post_norm", ["blocks", "batch", "none"])
def test_drawing_anew_is_building_anew(post_norm: Any) -> None:
    config = GateConfig(post_norm=post_norm, initial_scale=0.5, initial_bias=0.25, shift=True)
    fresh, redrawn = make_gate(config, seed=2), make_gate(config, seed=1).draw(torch.Generator().manual_seed(2))
    assert not changed_entries(redrawn, fresh.state_dict())
    redrawn.draw(torch.Generator().manual_seed(2))  # scale and offset of M's path are not applied twice
    assert not changed_entries(redrawn, fresh.state_dict())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("config", [GateConfig(), GateConfig.paper()])
def test_clients_can_be_stacked_with_vmap(config: GateConfig, training: bool) -> None:
    gates = [make_gate(config, seed=s).train(training) for s in range(3)]
    params, buffers = torch.func.stack_module_state(gates)
    x = torch.stack([batch(seed=s) for s in range(3)])

    def weights(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(gates[0], (params, buffers), (x,)).weights

    stacked = torch.vmap(weights)(params, buffers, x)
    torch.testing.assert_close(stacked, torch.stack([g(xi).weights for g, xi in zip(gates, x, strict=True)]))
    running = torch.stack([g.pre_norm.running_var for g in gates])
    torch.testing.assert_close(buffers["pre_norm.running_var"], running)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "clients"}, "did you mean 'client'"),
        ({"post_norm": "block"}, "did you mean 'blocks'"),
        ({"activation": "centered"}, "did you mean 'centred'"),
        ({"init": "one"}, "did you mean 'ones'"),
        ({"postnorm": "none"}, "unknown option 'postnorm': did you mean 'post_norm'"),
        ({"paths": 3}, "must be 1 or 2"),
        ({"pool": -1}, "must be positive"),
        ({"weight_range": 1.5}, "M must not turn negative"),
        ({"weight_range": 0.5, "activation": "sigmoid"}, "no meaning"),
        ({"init": "ones", "activation": "sigmoid"}, "cannot learn"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateConfig.of(options)


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match="did you mean 'paper'"):
        GateConfig.of("papers")
    with pytest.raises(ValueError, match="pass classes"):
        Gate(batch(), 4, GateConfig(shift=True), model_size=10**6)
    with pytest.raises(ValueError, match="at least one block"):
        Gate(batch(), 0, model_size=10**6)


def test_repr_shows_size_and_share() -> None:
    text = repr(make_gate())
    assert "9 blocks from 48 features (image)" in text
    assert "of the model" in text
