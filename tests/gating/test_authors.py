"""The authors' deviations: each switch does what our notes say, and their published densities come out."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedgate import Budget, InfeasibleBudget, gate
from pfedgate.gating.authors import AUTHORS, NUMBERS, AuthorsModel, authors_gate, deviations, equal_blocks
from pfedgate.gating.gate.config import GateConfig
from pfedgate.models import build

NETWORKS = {"cnn_cifar10": ((3, 32, 32), 10), "cnn_femnist": ((1, 28, 28), 62)}


def network(name: str, chosen: frozenset[str] = AUTHORS) -> AuthorsModel:
    shape, classes = NETWORKS[name]
    # The size of the gate does not matter here; pooled it is made faster.
    return authors_gate(build(name, shape, classes), torch.zeros(2, *shape), chosen - {"flat_input"})


def small(*changes: str, variant: str = "paper", **config: Any) -> AuthorsModel:
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3))
    settings = GateConfig(max_share=9.0, **config)
    return authors_gate(model, torch.randn(8, 6), deviations(variant, changes), settings, smallest=0.1)


def masks(gated: AuthorsModel, share: float, draws: int = 300) -> tuple[set[bytes], set[float]]:
    gated.rebudget(share)
    rng, found, densities = np.random.default_rng(0), set(), set()
    for _ in range(draws):
        kept = gated.plan.keep.copy()
        kept[gated.plan.optional] = gated.selector.select(rng.random(len(gated.plan.optional)))
        found.add(kept.tobytes())
        densities.add(round(gated.plan.live(kept).density, 6))
    return found, densities


# -- the consequences that the notes derive (D15)
@pytest.mark.parametrize(("name", "density"), [("cnn_cifar10", 0.2425), ("cnn_femnist", 0.2456)])
def test_at_three_tenths_there_is_one_mask(name: str, density: float) -> None:
    found, densities = masks(network(name), 0.3)
    assert len(found) == 1
    assert densities.pop() == pytest.approx(density, abs=5e-5)


@pytest.mark.parametrize(("name", "density"), [("cnn_cifar10", 0.432), ("cnn_femnist", 0.434)])
def test_at_one_half_there_are_sixteen_masks_of_one_density(name: str, density: float) -> None:
    found, densities = masks(network(name), 0.5)
    assert len(found) == 16
    assert max(densities) - min(densities) < 1e-5  # the last piece of a tensor may be a little smaller
    assert densities.pop() == pytest.approx(density, abs=5e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_at_one_tenth_the_budget_is_broken_and_only_here(name: str) -> None:
    found, densities = masks(network(name), 0.1)
    assert len(found) == 1
    assert densities.pop() == pytest.approx(0.2, abs=1e-4)
    with pytest.raises(InfeasibleBudget):
        network(name, AUTHORS - {"capacity"}).rebudget(0.1)
    with pytest.raises(InfeasibleBudget):
        network(name, frozenset({"equal_blocks"})).rebudget(0.1)


def test_the_papers_own_budget_leaves_a_choice() -> None:
    found, densities = masks(network("cnn_cifar10", frozenset()), 0.3, draws=100)
    assert len(found) > 1
    assert max(densities) <= 0.3


def test_the_gate_on_all_pixels_is_sixty_percent_of_the_network() -> None:
    shape, classes = NETWORKS["cnn_cifar10"]
    gated = authors_gate(build("cnn_cifar10", shape, classes), torch.zeros(2, *shape), AUTHORS)
    assert len(gated.plan.blocks) == 50
    assert gated.gate.fc.weight.numel() + 3 * 50 == 153_750
    assert gated.gate.size / gated.plan.size == pytest.approx(0.599, abs=1e-3)


# -- straight-through (D17), the law of the notes
def gradient_of_importance(gated: AuthorsModel, share: float) -> tuple[Tensor, np.ndarray[Any, Any]]:
    gated.rebudget(share)
    y = gated(torch.randn(8, 6))
    assert gated.last is not None
    (found,) = torch.autograd.grad(nn.functional.cross_entropy(y, torch.arange(8) % 3), gated.last.importance)
    return found, gated.last.kept


def test_dropped_pieces_have_a_gradient_in_the_paper_and_none_in_the_code() -> None:
    found, kept = gradient_of_importance(small(), 0.4)
    dropped = torch.from_numpy(~kept)
    assert dropped.any()
    assert (found[dropped] != 0).any()
    cut, kept = gradient_of_importance(small("D17"), 0.4)
    assert (cut[torch.from_numpy(~kept)] == 0).all()
    assert (cut[torch.from_numpy(kept)] != 0).any()
    single, kept = gradient_of_importance(small(variant="authors"), 0.5)
    assert (single[torch.from_numpy(~kept)] == 0).all()


# -- every other switch by itself
def test_names_and_numbers_choose_switches() -> None:
    assert deviations("paper") == frozenset()
    assert deviations("authors") == AUTHORS
    assert set(NUMBERS) - {"bi_level"} == AUTHORS
    assert deviations("authors", ["-D14", "D27"]) == AUTHORS - {"capacity", "by_operator"} | {"bi_level"}
    with pytest.raises(ValueError, match="did you mean 'greedy'"):
        deviations("paper", ["greed"])
    with pytest.raises(ValueError, match="did you mean 'authors'"):
        deviations("author")


def test_single_path_d12() -> None:
    gated = small("single_path")
    out = gated.gate(torch.randn(8, 6))
    assert out.importance is out.weights
    assert small().gate.paths == 2


def test_equal_blocks_d13() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 2))  # tensors of 63, 9, 18 and 2
    sizes: dict[str, list[int]] = {}
    for block in equal_blocks(model):
        assert block.keep == block.name.endswith("/0")
        sizes.setdefault(block.name.split("/")[0], []).append(block.pieces[0].stop - block.pieces[0].start)
    assert sizes == {
        "0.weight": [13, 13, 13, 13, 11],
        "0.bias": [2, 2, 2, 2, 1],
        "1.weight": [4, 4, 4, 4, 2],
        "1.bias": [1, 1],
    }


def best(value: Any, sizes: Any, room: float) -> float:
    items = range(len(value))
    return max(
        value[list(chosen)].sum()
        for count in range(len(value) + 1)
        for chosen in combinations(items, count)
        if sizes[list(chosen)].sum() <= room + 1e-9
    )


def test_capacity_and_exact_choice_against_brute_force() -> None:
    """D14 without D16: one room of (s - s_min) of what is not always kept, filled as well as possible."""
    model = nn.Linear(5, 2)  # 10 and 2: five pieces of 2, two of 1
    gated = authors_gate(model, torch.randn(4, 5), {"capacity", "equal_blocks"}, GateConfig(max_share=99.0))
    sizes = gated.plan.sizes[gated.plan.optional]
    for share in (0.3, 0.5, 0.8):
        gated.rebudget(share)
        room = round((share - 0.2) * sizes.sum())
        for seed in range(5):
            value = np.random.default_rng(seed).random(len(sizes))
            kept = gated.selector.select(value)
            assert sizes[kept].sum() <= room
            if room > 1:
                assert value[kept].sum() == pytest.approx(best(value, sizes, room), rel=1e-5)


def test_by_operator_keeps_a_room_for_each_kind() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    gated = authors_gate(model, torch.zeros(2, 1, 8, 8), {"by_operator", "equal_blocks"}, GateConfig(max_share=99.0))
    gated.rebudget(0.6)
    is_linear = gated._linear[gated.plan.optional]
    sizes = gated.plan.sizes
    value = np.where(is_linear, 0.9, 0.1)
    kept = gated.plan.keep.copy()
    kept[gated.plan.optional] = gated.selector.select(value)
    for kind in (gated._linear, ~gated._linear):
        share = sizes[kept & kind].sum() / sizes[kind].sum()
        assert 0.35 < share <= 0.6, "one kind must not use up the room of the other"


def test_greedy_rounds_and_takes_the_first_of_equals_d16() -> None:
    model = nn.Linear(5, 2)
    gated = authors_gate(model, torch.randn(4, 5), {"greedy", "equal_blocks"}, GateConfig(max_share=99.0))
    gated.rebudget(0.6)  # room for 7.2 - 3 of the optional pieces, which are 2, 2, 2, 2 and 1
    kept = gated.selector.select(np.array([0.51, 0.53, 0.54, 0.52, 0.46]))  # all five tenths
    assert kept.tolist() == [True, True, False, False, False]
    kept = gated.selector.select(np.array([0.51, 0.53, 0.56, 0.52, 0.96]))
    assert kept.tolist() == [False, False, True, False, True]


def test_full_budget_skips_the_selection_d18() -> None:
    for changes, expected in (((), True), (("D18",), False)):
        gated = small(*changes)
        gated(torch.randn(8, 6)).sum().backward()
        rows = gated.gate.fc.weight.grad
        assert rows is not None
        importance = rows[len(gated.plan.blocks) : 2 * len(gated.plan.blocks)]
        assert bool(importance.any()) == expected


def test_importance_is_clipped_without_a_gradient_below_d20() -> None:
    gated = small("clip_importance")
    gated.rebudget(0.5)
    with torch.no_grad():
        assert gated.gate.post_norm is not None
        gated.gate.post_norm.bias[1] -= 9.0  # all importances near 0
    gated(torch.randn(8, 6)).sum().backward()
    assert gated.last is not None
    assert (gated.last.importance == 0.2).all()
    bias = gated.gate.post_norm.bias.grad
    assert bias is not None
    assert not bias[1].any()
    assert bias[0].any(), "M is not clipped"


def test_relu_on_logits_d26() -> None:
    x = torch.randn(8, 6)
    torch.manual_seed(3)
    plain = small()
    torch.manual_seed(3)
    bent = small("D26")
    assert torch.equal(bent(x), plain(x).relu())
    assert (plain(x) < 0).any()


@pytest.mark.parametrize("moves", [False, True])
def test_momentum_and_decay_move_dropped_pieces_d25(moves: bool) -> None:
    gated = small(*(["move_dropped"] if moves else []))
    gated.rebudget(0.4)
    before = {name: p.detach().clone() for name, p in gated.model.named_parameters()}
    optimizer = gated.optimizer(lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer.zero_grad()
    gated(torch.randn(8, 6)).sum().backward()
    assert gated.last is not None
    live = gated.last.live
    optimizer.step()
    for name, parameter in gated.model.named_parameters():
        dropped = torch.from_numpy(~live.elements(name))
        same = (parameter.detach() == before[name])[dropped]
        assert not dropped.any() or bool(same.all()) != moves
        alive = ~dropped
        assert not torch.equal(parameter.detach()[alive], before[name][alive])


def test_logged_sparsity_leaves_out_what_is_always_kept_d21() -> None:
    gated = network("cnn_femnist")
    gated.rebudget(0.5)
    gated(torch.randn(2, 1, 28, 28))
    assert gated.last is not None
    assert gated.last.density == pytest.approx(0.434, abs=1e-3)
    assert gated.sparse_ratio == pytest.approx(0.234, abs=1e-3)


def test_copies_are_independent_and_of_the_same_kind() -> None:
    gated = small(variant="authors")
    gated.rebudget(0.5)
    twin = copy.deepcopy(gated)
    assert isinstance(twin, AuthorsModel)
    assert twin.chosen == gated.chosen
    x = torch.randn(8, 6)
    assert torch.equal(twin.eval()(x), gated.eval()(x))
    with torch.no_grad():
        next(twin.model.parameters()).zero_()
    assert next(gated.model.parameters()).any()
    with pytest.raises(ValueError, match="share of parameters"):
        gated.rebudget({"params": 0.5, "flops": 0.5})


# -- through the front door
def test_gate_knows_the_authors_variant() -> None:
    model, x = build("cnn_cifar10"), torch.randn(4, 3, 32, 32)
    gated = gate(model, x, 0.5, variant="authors", deviations=["-D22", "-relu_logits"], generator=generator())
    assert isinstance(gated, AuthorsModel)
    assert gated.chosen == AUTHORS - {"flat_input", "relu_logits"}
    same = authors_gate(model, x, gated.chosen, budget=0.5, generator=generator())
    assert torch.equal(gated(x), same(x))
    assert gated.last is not None
    assert gated.last.density == pytest.approx(0.432, abs=5e-4)  # not the budget, but what their code makes of it
    optimizer = gated.optimizer("sgd", lr=0.1, gate_lr=0.1)
    gated(x).square().mean().backward()
    optimizer.step()
    assert torch.isfinite(gated(x)).all()


def test_single_deviations_from_the_paper() -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 10))
    gated = gate(model, (2, 60), 0.5, variant="paper", deviations=["D17"])
    assert gated.straight_through == "kept"
    assert gate(model, (2, 60), 0.5, variant="paper").straight_through == "full"
    with pytest.raises(ValueError, match="need variant='paper'"):
        gate(model, (2, 60), 0.5, deviations=["D17"])
    with pytest.raises(ValueError, match="unknown deviation 'D99'"):
        gate(model, (2, 60), 0.5, variant="paper", deviations=["D99"])
    with pytest.raises(ValueError, match="knows one budget, a share of parameters"):
        gate(model, (2, 60), Budget(flops=0.5), variant="authors")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
