"""What the gate reads: every kind of input, fast paths against plain ones, tokens, a client's memory."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gates import BLOCKS, SHAPES, batch, make_gate
from torch import Tensor, nn
from torch.nn import functional as F

from pfedgate.gating.gate.features import Reader, hashed
from pfedgate.gating.gate.network import Gate, GateConfig


@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 13)),
    pool=st.integers(1, 5),
    layout=st.sampled_from(["contiguous", "channels_last", "transposed", "sliced"]),
)
def test_images_are_read_as_plainly_written_down(size: tuple[int, int, int], pool: int, layout: str) -> None:
    x = torch.randn(4, *size, generator=torch.Generator().manual_seed(0)) + 3
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "sliced":
        x = torch.cat([x, x], 3)[:, :, :, ::2]
    seen = Reader(x, pool)(x)
    cells = (min(pool, x.shape[2]), min(pool, x.shape[3]))
    torch.testing.assert_close(seen.pooled, F.adaptive_avg_pool2d(x, cells).flatten(2))
    torch.testing.assert_close(seen.mean, x.mean((2, 3)))
    torch.testing.assert_close(seen.var, x.var((2, 3), correction=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "features"),
    [("flat", 10), ("long flat", 64), ("sequence", 32), ("image", 48), ("volume", 54), ("tokens", 128)],
)
def test_number_of_features(kind: str, features: int) -> None:
    gate = make_gate(kind=kind)
    assert gate.reader.features == features
    assert gate.read(batch(kind)).pooled.flatten(1).shape == (6, features)


def test_long_inputs_of_other_lengths_are_fine_when_pooled() -> None:
    gate = make_gate(kind="sequence").eval()
    assert gate(torch.randn(2, 4, 57)).weights.shape == (BLOCKS,)
    assert gate(torch.randn(2, 4, 3)).weights.shape == (BLOCKS,)
    assert make_gate(kind="image").eval()(torch.randn(2, 3, 17, 40)).weights.shape == (BLOCKS,)
    with pytest.raises(ValueError, match="without pooling"):
        make_gate(GateConfig(pool=0))(torch.randn(2, 3, 9, 8))


@pytest.mark.parametrize("kind", [k for k in SHAPES if k != "tokens"])
def test_dtypes_and_gradients_of_the_input_do_not_matter(kind: str) -> None:
    x = batch(kind)
    gate = make_gate(kind=kind).eval()
    wanted = gate(x).weights
    torch.testing.assert_close(gate(x.double().requires_grad_()).weights, wanted)
    torch.testing.assert_close(gate(x.half()).weights, wanted, rtol=1e-2, atol=1e-2)
    wide = 1000 * x
    torch.testing.assert_close(gate.read(wide.half()).var, gate.read(wide).var, rtol=1e-2, atol=1)  # no overflow
    asked = x.clone().requires_grad_()
    gate(asked).weights.sum().backward()
    assert asked.grad is None
    torch.testing.assert_close(copy.deepcopy(gate).double()(x).weights, wanted.double(), rtol=1e-4, atol=1e-4)


def test_integer_images_are_numbers_not_tokens() -> None:
    x = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    gate = Gate(x, BLOCKS, model_size=10**6).eval()
    torch.testing.assert_close(gate(x).weights, gate(x.float()).weights)


def test_channels_in_the_last_dimension() -> None:
    x = batch("sequence")
    first = make_gate(kind="sequence").eval()
    last = Gate(x.mT, BLOCKS, GateConfig(channels_last=True), model_size=10**6).eval()
    last.load_state_dict(first.state_dict())
    torch.testing.assert_close(last(x.mT).weights, first(x).weights)


def test_tokens_go_through_the_models_embedding_which_stays_the_models() -> None:
    embedding = nn.Embedding(1000, 6)
    tokens = batch("tokens")
    gate = make_gate(kind="tokens", embedding=embedding)
    assert gate.reader.channels == 6
    shared = {id(p) for p in embedding.parameters()}
    assert not any(id(p) in shared or 1000 in p.shape for p in gate.parameters())
    assert not any(module is embedding for module in gate.modules())
    assert not any("embedding" in name for name in gate.state_dict())
    gate(tokens).weights.square().sum().backward()
    assert embedding.weight.grad is None
    before = gate.eval()(tokens).weights
    with torch.no_grad():
        embedding.weight += torch.randn_like(embedding.weight)
    assert not torch.equal(gate(tokens).weights, before)  # shared, not copied

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.gate = embedding, gate

    twin = copy.deepcopy(Both())
    with torch.no_grad():
        twin.model.weight.zero_()
    assert float(twin.gate.read(tokens).pooled.abs().max()) == 0  # a copy of both shares within itself
    assert float(gate.read(tokens).pooled.abs().max()) > 0


def test_hashed_tokens_are_fixed_distinct_and_centred() -> None:
    values = hashed(torch.arange(20_000).unsqueeze(0))[0]
    assert values.abs().max() <= 3**0.5
    assert values.mean(0).abs().max() < 0.03
    torch.testing.assert_close(torch.cov(values.T), torch.eye(16), rtol=0, atol=0.04)
    assert len(torch.unique(values, dim=0)) == 20_000
    # Written down, so that a client reads tomorrow what it read today.
    torch.testing.assert_close(hashed(torch.tensor([[7]]))[0, 0, :3], torch.tensor([-1.5978563, -0.2779926, 0.4991017]))
    assert torch.equal(hashed(torch.tensor([[7]], dtype=torch.int32)), hashed(torch.tensor([[7]])))
    assert not list(make_gate(kind="tokens").buffers())[3:]  # only the three of the norm, no table


@pytest.mark.parametrize(
    ("kind", "x", "message"),
    [
        ("image", torch.zeros(2, 3, 8), "image inputs of rank 4"),
        ("image", torch.zeros(2, 1, 8, 8), "with 3 channels"),
        ("image", torch.zeros(0, 3, 8, 8), "empty batch"),
        ("flat", torch.zeros(2, 11), "with 10 channels"),
        ("tokens", torch.zeros(2, 12), "integer tokens"),
        ("tokens", torch.zeros(2, 12, 3, dtype=torch.int64), "integer tokens"),
    ],
)
def test_other_inputs_than_the_example_are_refused(kind: str, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gate(kind=kind)(x)


@pytest.mark.parametrize("shape", [(3,), (2, 1, 1, 1, 1, 1), (0, 3, 8, 8)])
def test_unreadable_examples_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rank 2 to 5"):
        Gate(torch.zeros(shape), 3, model_size=10**6)


def test_a_client_is_the_mean_of_its_data() -> None:
    gate = make_gate(GateConfig(scope="client", shift=True))
    data = torch.cat([batch(seed=11), batch(n=3, seed=12)])
    torch.testing.assert_close(gate.client_features, F.adaptive_avg_pool2d(data.mean(0), 4).flatten(1))
    torch.testing.assert_close(gate.client_mean, data.mean((0, 2, 3)))
    torch.testing.assert_close(gate.client_var, data.var((0, 2, 3), correction=0))
    assert int(gate.client_samples) == 9
    assert gate.pre_norm is not None  # the client is the batch, so its statistics are the batch's
    assert torch.equal(gate.pre_norm.running_mean, gate.client_mean)
    assert torch.equal(gate.pre_norm.running_var, gate.client_var)
    out = gate(batch(seed=1))
    assert torch.equal(out.weights, gate(batch(n=1, seed=2)).weights)
    assert torch.equal(out.weights, gate.eval()(batch(seed=3)).weights)
    other = make_gate(GateConfig(scope="client", shift=True))
    other.remember([data[:4], data[4:]])
    torch.testing.assert_close(other(data).weights, out.weights)
    other.remember([data + torch.randn(3, 8, 8)])
    assert not torch.allclose(other(data).weights, out.weights)


def test_a_client_that_remembers_nothing_is_told() -> None:
    gate = Gate(batch(), BLOCKS, GateConfig(scope="client"), model_size=10**6)
    with pytest.raises(RuntimeError, match=r"call gate\.remember"):
        gate(batch())
    with pytest.raises(ValueError, match="got no data"):
        gate.remember([])
    with pytest.raises(ValueError, match="scope='client'"):
        make_gate().remember([batch()])
