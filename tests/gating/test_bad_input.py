"""Bad input: an error when the model is wrapped, that says what is wrong and what to do."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.compare import pretend
from tests.support.zoo import build
from torch import Tensor, nn

import pfedgate
from pfedgate import Block, Budget, InfeasibleBudget, Piece


def mlp() -> tuple[nn.Module, Tensor]:
    return build("mlp")


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (0, ValueError, "share in \\(0, 1\\]"),
        (0.0, ValueError, "share in \\(0, 1\\]"),
        (-0.5, ValueError, "share in \\(0, 1\\]"),
        (1.5, ValueError, "a share in \\(0, 1\\], got 1.5; for an absolute one name the resource"),
        (math.nan, ValueError, "got nan"),
        (True, TypeError, "must be a number"),
        ("half", TypeError, "must be a number"),
        ({"parms": 0.5}, ValueError, "did you mean 'params'"),
        (0.01, InfeasibleBudget, "smallest feasible 0.0"),
        (Budget(params=10), InfeasibleBudget, "smallest feasible"),
    ],
)
def test_budgets(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pfedgate.gate(*mlp(), budget)


def test_an_infeasible_budget_changes_nothing() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.3)
    with pytest.raises(pfedgate.InfeasibleBudget):
        gated.rebudget(0.001)
    gated(x)
    assert gated.last is not None
    assert gated.budget == gated.plan.budget(0.3)
    assert max(gated.last.cost.values()) <= 0.3
    copy.deepcopy(gated)(x)


def test_an_infeasible_budget_says_what_is_not_skipped_and_why() -> None:
    model, x = build("not_zero")
    gated = pfedgate.gate(model, x, 1.0, gate={"max_share": 9.0})
    assert gated.plan.network is not None
    place = gated.plan.network.notes[0][0]
    with pytest.raises(InfeasibleBudget, match=f"Not skipped: {place}"):
        gated.rebudget(0.001)


def test_numbers_of_numpy_are_budgets() -> None:
    """In single precision the largest cost within a share was searched for ever."""
    model, x = build("mlp")
    for share in (np.float32(0.5), np.float64(0.5)):
        assert pfedgate.gate(model, x, share).selector.limits == pfedgate.gate(model, x, 0.5).selector.limits


def test_the_gate_reads_through_the_embedding_of_the_input() -> None:
    """Positions are embedded, too, often first: they have fewer rows than there are words."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.words = nn.Embedding(7, 24), nn.Embedding(50, 24)
            self.up, self.out = nn.Linear(24, 40), nn.Linear(40, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.words(x) + self.positions(torch.arange(x.shape[1]))
            return self.out(torch.relu(self.up(h)).mean(1))

    gated = pfedgate.gate(Words(), torch.zeros(2, 7, dtype=torch.long), 0.6, gate={"max_share": 1.0})
    assert gated(torch.full((2, 7), 49)).shape == (2, 4)


def test_the_smallest_feasible_budget_is_feasible() -> None:
    model, x = build("cnn_cifar10")
    with pytest.raises(InfeasibleBudget) as caught:
        pfedgate.gate(model, x, 0.05)
    dense = pfedgate.gate(model, x, 1.0).plan.costs.dense()
    share = max(value / dense[resource] for resource, value in caught.value.smallest.items())
    with pytest.warns(UserWarning, match="only one selection|binds first"):
        gated = pfedgate.gate(model, x, share)
    gated(x)
    assert gated.last is not None
    assert max(gated.last.cost[resource] for resource in gated.selector.limits) <= share


def test_a_resource_that_the_blocks_cannot_save() -> None:
    with pytest.raises(ValueError, match="flat blocks are masked, not skipped, so they save no flops: bind params"):
        pfedgate.gate(*mlp(), Budget(flops=0.5), split="flat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "units"}, "unknown splitter 'units': did you mean 'unit'"),
        ({"execution": "slicd"}, "unknown execution 'slicd': did you mean 'sliced'"),
        ({"compensate": "shares"}, "unknown compensation 'shares': did you mean 'share'"),
        ({"straight_through": "ful"}, "unknown straight-through mode 'ful': did you mean 'full'"),
        ({"variant": "papr"}, "unknown variant 'papr': did you mean 'paper'"),
        ({"gate": {"scop": "batch"}}, "unknown option 'scop': did you mean 'scope'"),
        ({"gate": {"scope": "batches"}}, "unknown value 'batches': did you mean 'batch'"),
        ({"gate": "papers"}, "unknown gate 'papers': did you mean 'paper'"),
        ({"blocks": 1}, "blocks >= 2"),
        ({"smallest": 1.0}, "smallest < 1"),
        ({"output_blocks": 0}, "output_blocks >= 1"),
        ({"split": "flat", "execution": "sliced"}, "sliced execution is not possible: flat blocks cut through units"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pfedgate.gate(*mlp(), 0.5, **options)


def test_models() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        pfedgate.gate(lambda x: x, torch.zeros(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameters, so there is nothing to gate"):
        pfedgate.gate(nn.ReLU(), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="lazy layers without shapes yet: run it once"):
        pfedgate.gate(nn.Sequential(nn.LazyLinear(4)), torch.zeros(2, 4))


def test_forwards_that_need_more_than_one_input() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) + y

    with pytest.raises(ValueError, match="does not take this example: missing a required argument: 'y'"):
        pfedgate.gate(Two(), torch.zeros(2, 4))


@pytest.mark.parametrize("split", ["unit", "flat"])
@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        (torch.zeros(2, 3), ValueError, r"does not run on the example of shape \(2, 3\)"),
        (torch.zeros(2, 64, dtype=torch.float64), ValueError, "type torch.float64"),
        (torch.zeros(0, 64), ValueError, "the example is empty"),
        (torch.zeros(()), ValueError, "the example is empty"),
        ((2, 0), ValueError, r"positive sizes, the batch first, got \(2, 0\)"),
        ((), ValueError, "positive sizes"),
        (3, TypeError, "a batch \\(Tensor\\) or its shape, got int"),
    ],
)
def test_examples(example: Any, error: type[Exception], message: str, split: str) -> None:
    with pytest.raises(error, match=message):
        pfedgate.gate(mlp()[0], example, 0.5, split=split)


def test_batches_unlike_the_example() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5)
    with pytest.raises(ValueError, match="built for image inputs of rank 4"):
        gated(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="with 3 channels"):
        gated(torch.zeros(2, 1, 32, 32))
    with pytest.raises(ValueError, match="the batch is empty"):
        gated(x[:0])
    model, x = build("text_gru")
    gated = pfedgate.gate(model, x, 0.5)
    with pytest.raises(ValueError, match="integer tokens"):
        gated(x.float())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_importances_that_are_no_numbers(bad: float) -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5)
    importance = torch.rand(len(gated.plan.blocks))
    importance[int(gated.plan.optional[2])] = bad
    pretend(gated, importance)
    with pytest.raises(ValueError, match=r"cannot choose blocks: .*lower the gate's rate, clip its gradient"):
        gated(x)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("0.weight", 0, 4, 0)], "misses all of 0.bias"),
        ([("0.weight", 0, 3, 0), ("0.bias", 0, 4, 0)], "misses 1 positions of 0.weight.*keep=True"),
        (
            [("0.weight", 0, 4, 0), ("0.bias", 0, 4, 0), ("0.bias", 3, 4, 0)],
            "repeats part of 0.bias: it is in 'b1'",
        ),
        ([("0.weigth", 0, 4, 0)], "unknown parameter '0.weigth': did you mean '0.weight'"),
        ([("0.weight", 0, 5, 0)], r"0:5 is not inside 0.weight \(0:4\)"),
        ([("0.weight", 0, 4, 2)], "0.weight has no axis 2"),
        ([("0.weight", 0, 2, 0), ("0.weight", 0, 3, 1)], "split along two different axes"),
        ([], "returned no blocks"),
    ],
)
def test_splitters(pieces: list[Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=message):
        pfedgate.gate(
            model, torch.zeros(2, 3), split=lambda m: [Block(f"b{i}", (Piece(*p),)) for i, p in enumerate(pieces)]
        )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "the splitter returned NoneType; return a list of pfedgate.Block"),
        (["0.weight", "0.bias"], "the splitter's block 0 is a str; return a list"),
        ([Block("all", ("0.weight",))], "the pieces of block 'all' are no sequence of Piece"),  # type: ignore[arg-type]
        ([Block("all", Piece("0.weight", 0, 4))], "the pieces of block 'all' are no sequence of Piece"),  # type: ignore[arg-type]
    ],
)
def test_splitters_that_return_something_else(made: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pfedgate.gate(nn.Sequential(nn.Linear(3, 4)), torch.zeros(2, 3), split=lambda model: made)


def test_sequences_of_another_length() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(6, 64, batch_first=True), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(self.rnn(x)[0].mean(1))
            return result

    gated = pfedgate.gate(Steps(), torch.zeros(2, 9, 6), 0.5, gate={"max_share": 9.0})
    with pytest.raises(ValueError, match=r"with 9 channels, got shape \(2, 12, 6\) .*'channels_last': True"):
        gated(torch.zeros(2, 12, 6))
    gated = pfedgate.gate(Steps(), torch.zeros(2, 9, 6), 0.5, gate={"channels_last": True, "max_share": 9.0})
    assert gated(torch.zeros(2, 12, 6)).shape == (2, 4)


def test_splitters_that_find_nothing() -> None:
    model, x = build("text_cnn")
    with pytest.raises(ValueError, match=r"split='head' is not possible: no units were found.*Use split='unit'"):
        pfedgate.gate(model, x, split="head")


def test_class_shift_needs_logits() -> None:
    model, x = build("two_results")
    with pytest.raises(ValueError, match=r"returns logits of shape \[batch, classes\]"):
        pfedgate.gate(model, x, 0.5, gate={"shift": True, "max_share": 9.0})
