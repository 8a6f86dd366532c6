"""Switchable norm against a plain implementation, and the law that lets the gate read its input once."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pfedgate.gating.gate.features import EPS, SwitchableNorm, moments
from pfedgate.gating.gate.network import BlockNorm


class Whole(SwitchableNorm):
    """Normalises an input itself; the gate gives averages of it and the moments."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.flatten(2) if x.dim() > 2 else x.unsqueeze(2), *moments(x)).reshape(x.shape)


SHAPES = [(6, 5), (6, 3, 9), (6, 3, 8, 12), (4, 2, 4, 6, 8)]


def reference(norm: SwitchableNorm, x: Tensor) -> Tensor:
    """Luo et al., as in the publication: every statistic over its own dimensions of the raw input."""
    space = tuple(range(2, x.dim()))
    flat = x.dim() == 2
    parts = [(0, *space), (1, *space)] if flat else [(0, *space), (1, *space), space]
    means = torch.stack([x.mean(dims, keepdim=True).expand_as(x) for dims in parts])
    variances = torch.stack([x.var(dims, correction=0, keepdim=True).expand_as(x) for dims in parts])
    if not norm.training:
        shape = (1, -1, *[1] * len(space))
        means[0] = norm.running_mean.view(shape)
        variances[0] = norm.running_var.view(shape)
    mean = torch.einsum("k,k...->...", F.softmax(norm.mixture[0], 0), means)
    var = torch.einsum("k,k...->...", F.softmax(norm.mixture[1], 0), variances)
    affine = (-1, *[1] * len(space))
    return (x - mean) / torch.sqrt(var + EPS) * norm.weight.view(affine) + norm.bias.view(affine)


def randomised(channels: int, rank: int, seed: int = 0, **options: bool) -> Whole:
    norm = Whole(channels, rank, **options)
    rng = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=rng)
    norm.running_mean.normal_(generator=rng)
    norm.running_var.uniform_(0.5, 2, generator=rng)
    return norm


def contrasting_batch(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    scale = 1 + torch.rand(shape[0], shape[1], *[1] * (len(shape) - 2), generator=rng)
    return torch.randn(shape, generator=rng) * scale + 2 * scale - 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_with_its_gradients(shape: tuple[int, ...], training: bool) -> None:
    x = contrasting_batch(shape)
    ours = randomised(shape[1], len(shape)).train(training)
    plain = copy.deepcopy(ours)
    out, wanted = ours(x), reference(plain, x)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    out.square().mean().backward()
    wanted.square().mean().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


@given(
    n=st.integers(1, 5),
    channels=st.integers(1, 4),
    cells=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    per_cell=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    training=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pooling_commutes_with_normalising(
    n: int, channels: int, cells: tuple[int, int], per_cell: tuple[int, int], training: bool, seed: int
) -> None:
    x = contrasting_batch((n, channels, cells[0] * per_cell[0], cells[1] * per_cell[1]), seed)
    norm = randomised(channels, 4, seed).train(training)
    twin = copy.deepcopy(norm)
    normalised_first = F.adaptive_avg_pool2d(norm(x), cells).flatten(2)
    pooled_first = SwitchableNorm.forward(twin, F.adaptive_avg_pool2d(x, cells).flatten(2), *moments(x))
    torch.testing.assert_close(pooled_first, normalised_first, rtol=1e-5, atol=1e-5)


def test_moments_survive_a_large_offset() -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    _, var = moments(x + 4096)
    torch.testing.assert_close(var, (x + 4096).double().var((2, 3), correction=0).float(), rtol=1e-4, atol=0)
    assert torch.equal(moments(torch.full((1, 1, 4, 4), 255.0))[1], torch.zeros(1, 1))


def test_flat_features_mix_two_statistics_and_others_three() -> None:
    assert SwitchableNorm(5, 2).mixture.shape == (2, 2)
    assert SwitchableNorm(5, 3).mixture.shape == (2, 3)


def test_mixtures_of_mean_and_variance_are_separate() -> None:
    x = contrasting_batch((6, 3, 9))
    norm = Whole(3, 3)
    with torch.no_grad():
        norm.mixture[0] = torch.tensor([100.0, 0, 0])  # mean: batch only
        norm.mixture[1] = torch.tensor([0.0, 0, 100])  # variance: instance only
    wanted = (x - x.mean((0, 2), keepdim=True)) / torch.sqrt(x.var(2, correction=0, keepdim=True) + EPS)
    torch.testing.assert_close(norm(x), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics_move_in_training_only(shape: tuple[int, ...]) -> None:
    norm = Whole(shape[1], len(shape))
    start = copy.deepcopy(norm.state_dict())
    norm.eval()(contrasting_batch(shape))
    assert all(torch.equal(value, start[name]) for name, value in norm.state_dict().items())
    norm.train()(contrasting_batch(shape))
    dims = (0, *range(2, len(shape)))
    # The first batch replaces the arbitrary start, the second counts one half.
    torch.testing.assert_close(norm.running_mean, contrasting_batch(shape).mean(dims))
    torch.testing.assert_close(norm.running_var, contrasting_batch(shape).var(dims, correction=0))
    norm(contrasting_batch(shape, seed=2))
    half = (contrasting_batch(shape).mean(dims) + contrasting_batch(shape, seed=2).mean(dims)) / 2
    torch.testing.assert_close(norm.running_mean, half)
    for _ in range(8):
        norm(contrasting_batch(shape, seed=2))
    kept = norm.running_mean.clone()  # ten batches: from here on a moving average at 1/10
    norm(contrasting_batch(shape, seed=3))
    norm(contrasting_batch(shape, seed=3))
    assert int(norm.batches_seen) == 12
    torch.testing.assert_close(norm.running_mean, 0.81 * kept + 0.19 * contrasting_batch(shape, seed=3).mean(dims))


def test_batches_of_one_estimate_the_spread_between_samples() -> None:
    norm = Whole(1, 2)
    for step in range(200):
        norm(torch.full((1, 1), 5.0 + (-1) ** step))
    torch.testing.assert_close(norm.running_mean, torch.tensor([5.0]), rtol=0.02, atol=0)
    torch.testing.assert_close(norm.running_var, torch.tensor([1.0]), rtol=0.15, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_one(shape: tuple[int, ...], training: bool) -> None:
    norm = Whole(shape[1], len(shape))
    norm(contrasting_batch(shape))
    norm.train(training)
    one = norm(contrasting_batch((1, *shape[1:]), seed=5))
    assert torch.isfinite(one).all()
    assert one.std() > 0.1  # not normalised away against itself


def test_without_tracking_samples_are_independent_and_nothing_is_estimated() -> None:
    norm = randomised(3, 4, track=False)
    x = contrasting_batch((5, 3, 8, 8))
    before = copy.deepcopy(norm.state_dict())
    together = norm(x)
    alone = torch.cat([norm(x[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_block_norm_over_blocks_ignores_the_batch() -> None:
    norm = BlockNorm(2, 7, kind="blocks")
    z = contrasting_batch((5, 2, 7))
    out = norm(z)
    torch.testing.assert_close(out[:1], norm(z[:1]))
    torch.testing.assert_close(out.mean(2), torch.zeros(5, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(2, correction=0), torch.ones(5, 2), atol=1e-3, rtol=0)
    assert not list(norm.buffers())


def test_block_norm_over_the_batch_is_torch_batchnorm() -> None:
    norm, torchs = BlockNorm(2, 7, kind="batch"), torch.nn.BatchNorm1d(14)
    z = contrasting_batch((5, 2, 7))
    torch.testing.assert_close(norm(z).flatten(1), torchs(z.flatten(1)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_mean, z.mean(0))
    before = copy.deepcopy(norm.state_dict())
    one = norm(z[:1])  # a batch of one: running statistics, and no estimate from it
    torch.testing.assert_close(one, norm.eval()(z[:1]))
    norm(z)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
