"""The models: exact sizes, layer names, traceable, trainable, and clear about wrong input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from pfedgate import models


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "params"),
    [
        ("cnn_femnist", (1, 28, 28), 62, 2_278_334),
        ("cnn_femnist", (1, 28, 28), 10, 2_171_786),  # the figure the paper prints
        ("cnn_cifar10", (3, 32, 32), 10, 256_830),
        ("cnn_cifar100", (3, 32, 32), 100, 3_537_444),
        ("lenet5_wide", (3, 32, 32), 100, 4_146_300),
        ("mlp", (64,), 10, 64 * 64 + 64 + 64 * 10 + 10),
    ],
)
def test_parameter_counts_are_those_of_the_paper(name: str, shape: tuple[int, ...], classes: int, params: int) -> None:
    assert count(models.build(name, shape, classes)) == params


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("cnn_femnist", ["conv1", "conv2", "fc1", "out"]),
        ("cnn_cifar10", ["conv1", "conv2", "fc1", "fc2", "out"]),
        ("cnn_cifar100", ["conv1", "conv2", "fc1", "out"]),
        ("lenet5_wide", ["conv1", "conv2", "fc1", "fc2", "out"]),
        ("cnn_digits", ["conv1", "conv2", "fc1", "out"]),
        ("mlp", ["fc1", "out"]),
    ],
)
def test_layer_names(name: str, layers: list[str]) -> None:
    expected = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert list(models.build(name).state_dict()) == expected


@pytest.mark.parametrize("name", models.names())
def test_every_model_can_be_traced_and_computes_the_same(name: str) -> None:
    model = models.build(name).eval()
    x = models.example(name, batch=3)
    info = next(m for m in models.describe() if m.name == name)
    assert info.params == count(model)
    out = model(x)
    assert out.shape == {"unet": (3, 3, 16, 16), "token_gru": (3, 32, 65)}.get(name, (3, info.classes))
    torch.testing.assert_close(fx.symbolic_trace(model)(x), out)


@pytest.mark.parametrize("name", models.names())
def test_every_model_learns_a_batch_by_heart(name: str) -> None:
    model = models.build(name)
    x, y = models.example(name, batch=4), torch.tensor([0, 1, 2, 3])
    if name in ("unet", "token_gru"):  # a label for every position: which of two halves of the inputs it belongs to
        y = (x[:, 0] > 0).long() if name == "unet" else (x > 30).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) if name != "token_gru" else model(x).movedim(-1, 1), y)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters()), "a parameter is not used"
        optimizer.step()
    right = model.eval()(x).argmax(-1 if name == "token_gru" else 1) == y
    assert right.float().mean() > (0.7 if y.ndim > 1 else 0.99)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet", {"depth": 14, "width": 0.5}),
        ("vit", {"pooling": "cls", "depth": 1, "heads": 2}),
        ("text_gru", {"pooling": "mean", "layers": 2}),
        ("text_cnn", {"kernel": 5, "channels": 8}),
        ("mlp", {"hidden": [32, 16], "dropout": 0.1}),
        ("cnn_digits", {"width": 0.25}),
    ],
)
def test_options_work_and_trace(name: str, options: dict[str, object]) -> None:
    model = models.build(name, **options).eval()
    x = models.example(name)
    assert count(model) != count(models.build(name))
    torch.testing.assert_close(fx.symbolic_trace(model)(x), model(x))


def test_resnet_depth_is_its_number_of_weighted_layers() -> None:
    model = models.build("resnet", depth=20)
    main_path = [m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    assert len(main_path) == 20
    kinds = {type(m) for n, m in model.named_modules() if n.endswith("shortcut")}
    assert kinds == {nn.Identity, nn.Sequential}


def test_width_scales_hidden_sizes_but_not_the_output() -> None:
    model = models.build("cnn_cifar10", width=0.5)
    sizes = [getattr(model, name).weight.shape[0] for name in ("conv1", "conv2", "fc1", "fc2", "out")]
    assert sizes == [16, 32, 60, 42, 10]


def test_other_image_sizes_fit() -> None:
    assert models.build("cnn_cifar10", (1, 28, 28), 7)(torch.randn(2, 1, 28, 28)).shape == (2, 7)
    assert models.build("vit", (1, 8, 8), 10, patch=2)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert models.build("resnet", (1, 8, 8), 10)(torch.randn(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("cnn_cifer10",), {}, "did you mean 'cnn_cifar10'"),
        (("cnn_cifar10", (3, 32)), {}, "channels, height, width"),
        (("cnn_cifar10", (3, 8, 8)), {}, "8×8 is too small"),
        (("cnn_cifar10", (3, 32, 32), 0), {}, "positive sizes"),
        (("cnn_cifar10",), {"width": 0}, "must be positive"),
        (("mlp",), {"hidden": [0]}, "positive"),
        (("resnet",), {"depth": 9}, "6n"),
        (("resnet",), {"width": -1}, "positive"),
        (("resnet", (3,)), {}, "channels, height, width"),
        (("vit",), {"patch": 5}, "does not divide"),
        (("vit",), {"heads": 3}, "multiple"),
        (("vit",), {"pooling": "max"}, "'mean' or 'cls'"),
        (("vit", (3,)), {}, "channels, height, width"),
        (("text_cnn",), {"kernel": 2}, "odd"),
        (("text_gru",), {"pooling": "max"}, "'last' or 'mean'"),
        (("text_gru", (1, 2)), {}, "length"),
    ],
)
def test_wrong_input_says_what_is_wrong(args: tuple[object, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(*args, **options)  # type: ignore[arg-type]


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match="'resnet': unknown option 'dept': did you mean 'depth'"):
        models.build("resnet", dept=8)
