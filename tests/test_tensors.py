from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfedgate.core.mergers import WeightedMean, merge
from pfedgate.core.state import (  # fmt: skip
    clone,
    digest,
    equal,
    finite,
    flat,
    inside,
    nbytes,
    pick,
    shapes,
    split,
    under,
    unflat,
)
from pfedgate.core.types import Card, State, Update


def sent(*pairs: tuple[State, float]) -> list[tuple[Card, Update]]:
    return [(Card(str(at), 1), Update(state, weight)) for at, (state, weight) in enumerate(pairs)]


def vector(seed: int, size: int = 50) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_mean_is_the_weighted_mean(weights: list[int]) -> None:
    states = [{"a": vector(at), "b": vector(at + 100).view(5, 10)} for at in range(len(weights))]
    mean = merge(WeightedMean(clone(states[0])), sent(*zip(states, map(float, weights), strict=True)))
    for name in ("a", "b"):
        expected = sum(w * s[name].double() for w, s in zip(weights, states, strict=True)) / sum(weights)
        assert torch.equal(mean[name], expected.float())


@given(st.integers(1, 2**29))
def test_mean_of_one_client_is_that_client(weight: int) -> None:
    state = {"a": vector(1) * 1e-3, "b": vector(2) * 1e5}
    assert equal(merge(WeightedMean({"a": vector(3), "b": vector(4)}), sent((state, float(weight)))), state)


def test_mean_over_all_counts_the_others_as_unchanged() -> None:
    server, a, b = ({"w": vector(at)} for at in range(3))
    mean = merge(WeightedMean(server, 10.0), sent((a, 2.0), (b, 3.0)))
    expected = server["w"] + 0.2 * (a["w"] - server["w"]) + 0.3 * (b["w"] - server["w"])
    torch.testing.assert_close(mean["w"], expected)


def test_counters_are_maxed_and_statistics_averaged() -> None:
    server = {"running": torch.zeros(2), "tracked": torch.tensor(5)}
    states = [
        {"running": torch.tensor([1.0, 2.0]), "tracked": torch.tensor(7)},
        {"running": torch.tensor([3.0, 4.0]), "tracked": torch.tensor(6)},
    ]
    mean = merge(WeightedMean(server), sent((states[0], 1.0), (states[1], 1.0)))
    assert mean["running"].tolist() == [2, 3]
    assert mean["tracked"].item() == 7
    assert mean["tracked"].dtype is torch.int64


def test_clients_that_send_different_names() -> None:
    server = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.full((2,), 9.0)}
    states = [({"a": torch.ones(2)}, 1.0), ({"a": torch.zeros(2), "b": torch.zeros(2)}, 3.0)]
    mean = merge(WeightedMean(server), sent(*states))
    assert mean["a"].tolist() == [0.25, 0.25]
    assert mean["b"].tolist() == [0, 0]
    assert mean["c"].tolist() == [9, 9]  # nobody sent it
    assert list(mean) == ["a", "b", "c"]


def test_types_survive_the_mean() -> None:
    server = {"half": torch.zeros(2, dtype=torch.float16), "double": torch.zeros(2, dtype=torch.float64)}
    state = {"half": torch.ones(2, dtype=torch.float16), "double": torch.full((2,), 1 / 3, dtype=torch.float64)}
    mean = merge(WeightedMean(server), sent((state, 3.0)))
    assert {name: value.dtype for name, value in mean.items()} == {"half": torch.float16, "double": torch.float64}
    assert equal(mean, state)


def test_no_update_leaves_the_server_as_it_is() -> None:
    server = {"w": vector(0)}
    assert equal(merge(WeightedMean(server), []), server)


def test_flat_copies_only_when_it_must() -> None:
    whole = torch.arange(6.0)
    state = unflat(whole, [("a", torch.Size([2])), ("b", torch.Size([2, 2]))])
    assert flat(state).data_ptr() == whole.data_ptr()
    swapped = {"b": state["b"], "a": state["a"]}
    assert flat(swapped).tolist() == [2, 3, 4, 5, 0, 1]
    assert flat({"b": state["b"].t(), "a": state["a"]}).tolist() == [2, 4, 3, 5, 0, 1]
    assert flat({"b": state["b"]}).tolist() == [2, 3, 4, 5]
    assert shapes(state) == [("a", torch.Size([2])), ("b", torch.Size([2, 2]))]
    with pytest.raises(ValueError, match="does not fit"):
        unflat(whole, [("a", torch.Size([7]))])


def test_names() -> None:
    state = {"a.w": torch.ones(1), "b.w": torch.zeros(1)}
    chosen, others = split(state, lambda name: name.startswith("a."))
    assert {**chosen, **others} == state
    assert inside("x/", under("x/", state)) == state
    with pytest.raises(KeyError, match=r"did you mean 'a\.w'"):
        pick(state, ["a.v"])


def test_digest_sees_names_types_shapes_and_bits() -> None:
    base = {"w": torch.zeros(4)}
    different: list[State] = [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.tensor([0, 0, 0, 1e-45])},
        {},
    ]
    assert len({digest(state) for state in [base, *different]}) == 6
    assert digest({"w": torch.zeros(8)[::2]}) == digest(base)


def test_finite() -> None:
    assert finite({"w": torch.ones(3), "n": torch.tensor(1), "empty": torch.zeros(0)})
    assert finite({"w": torch.full((4,), 3e38)})  # its dot product overflows, its values do not
    assert not finite({"w": torch.tensor([1.0, float("nan")])})
    assert not finite({"a": torch.ones(2), "w": torch.tensor([1.0, float("-inf")])})
    assert nbytes({"w": torch.ones(3), "n": torch.tensor(1)}) == 20
