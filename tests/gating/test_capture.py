"""Forwards that torch.fx cannot follow are captured with torch.export: sliced as exactly as others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import check_sliced, gated_pair
from tests.support.zoo import build
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget
from pfedgate.gating.slicing import trace
from pfedgate.gating.slicing.rules.operations import aligned

WIDTH, HEADS, STEPS = 32, 4, 6
SMALL = {"pool": 1, "max_share": 10.0}


class Norm(nn.Module):
    """Root mean square, written out as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Queries, keys and values apart, in one, by parts, or fewer keys than queries; fused, or step by step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, size = how, WIDTH // HEADS
        self.kv = 2 if how == "grouped" else HEADS
        if how in ("one", "parts"):
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, self.kv * size)
            self.v = nn.Linear(WIDTH, self.kv * size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        shape, size = x.shape[:-1], WIDTH // HEADS
        if self.how == "one":
            q, k, v = self.qkv(x).view(*shape, 3, HEADS, size).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = self.qkv(x).chunk(3, dim=-1) if self.how == "parts" else (self.q(x), self.k(x), self.v(x))
            q, k, v = (part.view(*shape, -1, size).transpose(1, 2) for part in parts)
        if self.how == "grouped":
            k, v = (
                one[:, :, None].expand(-1, -1, HEADS // self.kv, -1, -1).reshape(x.shape[0], HEADS, -1, size)
                for one in (k, v)
            )
        if self.how == "steps":
            scores = q @ k.transpose(-1, -2) / size**0.5 + torch.ones(STEPS, STEPS).tril().log().to(x)
            y = F.softmax(scores, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*shape, -1))


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.attend = Norm(), Norm(), Attention(how)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attend(self.one(x))
        h = self.two(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """As fx cannot follow: it looks at sizes, passes keywords, returns a dataclass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor, **options: Any) -> dict[str, Tensor]:
        if tokens.shape[1] > STEPS:
            raise ValueError("too long")
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, **options)
        return {"state": x, "logits": self.head(self.norm(x)[:, -1])}


@pytest.mark.filterwarnings("ignore:under Budget")
@pytest.mark.parametrize("how", ["apart", "one", "parts", "grouped", "steps"])
def test_language_models_are_sliced_by_heads_and_neurons(how: str) -> None:
    model, x = Language(how).double(), torch.randint(50, (3, STEPS))
    sliced, masked = gated_pair(model, x, Budget(params=1.0, flops=1.0))
    costs = sliced.plan.costs
    assert costs.smallest()["flops"] < 0.3 * costs.dense()["flops"]
    for share in (1.0, 0.6, 0.4):
        for training in (True, False):
            for gated in (sliced, masked):
                gated.rebudget(Budget(params=share, flops=share)).train(training)
            check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    sliced.verify(x)
    more = torch.randint(50, (5, STEPS))
    check_sliced(sliced, masked, more, out=1e-9, grad=1e-8)
    heads = [units for place, units in sliced.last.units.items() if "attend" in place and "out" not in place]  # type: ignore[union-attr]
    assert len(heads) == 2
    assert max(heads) < HEADS


@pytest.mark.parametrize("how", ["one", "grouped"])
def test_heads_of_captured_models_can_be_all_that_is_cut(how: str) -> None:
    model, x = Language(how).double(), torch.randint(50, (3, STEPS))
    sliced, masked = gated_pair(model, x, Budget(params=0.6), split="head")
    check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    kinds = {kind for space in sliced.plan.network.spaces.values() for kind, _ in space.producers}  # type: ignore[union-attr]
    assert kinds == {"heads", "linear"}


def test_a_result_that_is_no_tensor_comes_back_as_it_is() -> None:
    class Boxed(Language):
        def forward(self, tokens: Tensor, **options: Any) -> Any:
            return super().forward(tokens, **options)["logits"], [super().forward(tokens)["state"]], None

    model, x = Boxed("apart").double(), torch.randint(50, (3, STEPS))
    gated = pfedgate.gate(model, x, 0.5, execution="sliced", gate=SMALL)
    logits, (state,), nothing = gated(x)
    assert logits.shape == (3, 7)
    assert state.shape == (3, STEPS, WIDTH)
    assert nothing is None


def test_batch_statistics_of_dropped_channels_do_not_move_in_a_captured_model() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(scale=0.5)
            self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
            self.deep, self.head = nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 5)

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            x = F.hardswish(self.norm(self.stem(x)))
            x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
            return self.head(self.deep(x).mean((2, 3)) if x.shape[0] > 1 else self.deep(x).amax((2, 3)))

    model, x = Image().double(), torch.randn(4, 3, 8, 8).double()
    sliced, masked = gated_pair(model, x, 1.0)
    for share in (0.7, 0.4):
        for training in (True, False):
            for gated in (sliced, masked):
                gated.rebudget(share).train(training)
            check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    assert sliced.execution == "sliced"
    assert int(sliced.model.get_submodule("norm").num_batches_tracked) == 2  # type: ignore[arg-type]


def test_sizes_that_were_not_captured_are_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.hidden, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 40), nn.Linear(40, 5)

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            x = F.relu(self.stem(x))
            return self.head(F.relu(self.hidden(x.flatten(1) if x.shape[0] else x)))

    gated = pfedgate.gate(Flat(), torch.randn(4, 3, 8, 8), 0.5, gate=SMALL, execution="sliced")
    assert gated(torch.randn(7, 3, 8, 8)).shape == (7, 5)
    with pytest.raises(ValueError, match=r"captured for inputs of shape \(any, 3, 8, 8\), got \(4, 3, 9, 9\)"):
        gated(torch.randn(4, 3, 9, 9))


def test_what_no_rule_knows_counts_in_full() -> None:
    """A fault: FLOPs that were counted are forgotten when shapes are looked up for another batch."""

    class Upside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.heads = nn.ConvTranspose1d(8, 8, 3), nn.Linear(STEPS + 2, 32)
            self.out = nn.Linear(32, 4)

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            h = self.heads(F.relu(self.up(x))).view(x.shape[0], 8, 4, -1).transpose(1, 2)
            return self.out(F.relu(h.transpose(1, 2).flatten(2)) if x.shape[0] else x)

    model, x = Upside(), torch.randn(3, 8, STEPS)
    gated = pfedgate.gate(model, x, Budget(params=0.9), gate=SMALL, execution="sliced")
    places = {one.place for one in gated.plan.network.operations}  # type: ignore[union-attr]
    assert {"heads", "out"} < places
    assert len(places) == 3
    gated.verify(x)


def test_only_chosen_modules_are_gated_and_the_budget_is_of_the_whole_model() -> None:
    model, x = Language("apart").double(), torch.randint(50, (3, STEPS))
    for modules in ("*.attend", lambda place: ".attend." in f"{place}."):
        gated = pfedgate.gate(model, x, Budget(params=0.9), modules=modules, gate=SMALL, execution="sliced")
        layers = {block.name.rpartition("/")[0] for block in gated.plan.blocks if not block.keep}
        assert layers
        assert all(".attend." in layer for layer in layers)
        assert gated.plan.costs.smallest()["params"] > 0.5 * gated.plan.size
    with pytest.warns(UserWarning, match=r"no units were found that can be skipped in modules '\*\.mlp'"):
        pfedgate.gate(model, x, 0.9, modules="*.mlp", gate=SMALL)


@pytest.mark.parametrize("name", ["depthwise", "norms", "squeeze_excite", "attention", "residual", "gru_both_ways"])
def test_what_fx_follows_is_as_exact_when_it_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: a rule that knows modules and not what they do."""

    def never(*given: Any) -> None:
        raise trace.Untraceable("not now")

    monkeypatch.setattr(trace, "_follow", never)
    model, x = build(name)
    x = x.double() if x.is_floating_point() else x
    sliced, masked = gated_pair(model.double(), x, Budget(params=0.9))
    for training in (True, False):
        for gated in (sliced, masked):
            gated.train(training)
        check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    sliced.verify(x)


def test_products_of_matrices_that_are_not_cut_count_in_full() -> None:
    """A fault: what has a rule is taken for cheap, also where the rule does not apply."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.a(x))
            return self.b(torch.matmul(h, h.transpose(1, 2)) @ h)

    gated = pfedgate.gate(Scores(), torch.randn(3, STEPS, 16), Budget(params=0.5), gate=SMALL, execution="sliced")
    places = [one.place for one in gated.plan.network.operations]  # type: ignore[union-attr]
    assert places == ["a", "matmul (matmul)", "matmul (matmul_1)", "b"]
    gated.verify(torch.randn(3, STEPS, 16))


def test_paths_that_are_dropped_at_random_in_training_are_followed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up, self.down, self.head = (
                nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 4),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.down(F.gelu(self.up(x)))
            if self.training:
                kept = y.new_empty(y.shape[0], 1).bernoulli_(0.8)
                kept.div_(0.8)
                y = y * kept
            return self.head(x + y)

    model, x = Block().double(), torch.randn(6, 16).double()
    sliced, masked = gated_pair(model, x, Budget(params=0.5))
    for training in (True, False):
        results = []
        for gated in (sliced, masked):
            torch.manual_seed(3)
            results.append(gated.train(training)(x))
        assert torch.allclose(*results, atol=1e-12)
    assert sliced.execution == "sliced"


def test_shuffled_channels_are_followed() -> None:
    """A fault: parts of an axis that holds two positions of each unit are taken for as many units."""

    class Shuffle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 12, 3), nn.Conv2d(3, 12, 3)
            self.deep, self.head = nn.Conv2d(12, 12, 1), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
            n, _, h, w = x.shape
            x = x.view(n, 2, 12, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
            a, b = x.chunk(2, 1)
            return self.head(torch.cat([a, F.relu(self.deep(b))], 1).mean((2, 3)))

    model, x = Shuffle().double(), torch.randn(3, 3, 8, 8).double()
    sliced, masked = gated_pair(model, x, Budget(params=0.6))
    for share in (0.9, 0.6):
        for gated in (sliced, masked):
            gated.rebudget(Budget(params=share))
        check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    sliced.verify(x)


def test_axes_of_a_reshape_are_matched_by_what_they_hold() -> None:
    assert aligned((3, 6, 32), (3, 6, 4, 8), 2) == ([2], [2, 3])
    assert aligned((18, 32), (3, 6, 32), 1) == ([1], [2])
    assert aligned((3, 4, 2, 6, 8), (3, 8, 6, 8), 1) == ([1, 2], [1])


def test_layers_of_torch_without_a_rule_are_followed_by_what_they_do() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).double(), torch.randn(3, STEPS, WIDTH).double()
    sliced, masked = gated_pair(model, x, Budget(params=0.5, flops=0.5))
    for training in (True, False):
        for gated in (sliced, masked):
            gated.train(training)
        check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    assert sliced.verify(x)["counted"] < 0.55


def test_frozen_parameters_are_gated_and_never_stepped() -> None:
    model, x = Language("apart").double(), torch.randint(50, (3, STEPS))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("head", "blocks.1.attend")))
    sliced, masked = gated_pair(model, x, Budget(params=0.6, flops=0.6))
    check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
    before = {name: parameter.detach().clone() for name, parameter in sliced.model.named_parameters()}
    optimizer = sliced.optimizer("adamw", lr=0.1, weight_decay=0.1)
    optimizer.zero_grad()
    sliced(x)["logits"].square().sum().backward()
    optimizer.step()
    moved = {name for name, p in sliced.model.named_parameters() if not torch.equal(p, before[name])}
    assert "head.weight" in moved
    assert all(name.startswith(("head", "blocks.1.attend")) for name in moved)


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_and_tied_embeddings(tied: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(40, 16, sparse=not tied)
            self.hidden = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
            self.head = nn.Linear(16, 40, bias=False)
            if tied:
                self.head.weight = self.words.weight

        def forward(self, tokens: Tensor, **options: Any) -> Tensor:
            return self.head(F.relu(self.hidden(self.words(tokens).mean(1) if tokens.shape[0] else tokens)))

    x = torch.randint(40, (3, STEPS))
    sliced, masked = gated_pair(Words().double(), x, Budget(params=0.9))
    check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)


class Remembering(nn.Module):
    """As LeViT: in evaluation it looks biases up once, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.memory = nn.Parameter(torch.randn(12)), {}
        self.register_buffer("places", torch.arange(40) % 12)
        self.a, self.b, self.out = nn.Linear(8, 40), nn.Linear(40, 30), nn.Linear(30, 5)

    def train(self, mode: bool = True) -> Remembering:
        self.memory = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            bias = self.biases[self.places]
        else:
            bias = self.memory.setdefault(str(x.device), self.biases[self.places])
        return self.out(F.relu(self.b(F.relu(self.a(x)) * bias)))


def test_what_a_forward_remembers_of_its_parameters_is_computed_anew() -> None:
    torch.manual_seed(0)
    model, x = Remembering().double(), torch.randn(4, 8, dtype=torch.float64)
    sliced, masked = gated_pair(model, x, Budget(params=0.6))
    check_sliced(sliced, masked, x, out=1e-10, grad=1e-9)
    for gated in (sliced, masked):
        gated.model.train().eval()  # its own way to forget
    check_sliced(sliced.eval(), masked.eval(), x, out=1e-10, grad=1e-9)
    with torch.no_grad():
        before = sliced(x)
        for gated in (sliced, masked):
            gated.model.biases.mul_(2)
    assert not torch.equal(sliced(x), before)
    assert not model.memory
