"""Networks that the laws of gating are checked on: ours, and small ones with every operation that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate import models


class Of(nn.Module):
    """A network from layers and a function that calls them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.how = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def images(n: int = 3, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size)


def tokens(n: int = 3, length: int = 7) -> Tensor:
    return torch.randint(0, 20, (n, length))


def grouped() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.b(F.relu(m.a(x)))).mean((2, 3)))

    return Of(forward, a=nn.Conv2d(3, 24, 3), b=nn.Conv2d(24, 48, 3, groups=12), out=nn.Linear(48, 5)), images()


def depthwise() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU6(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24, padding_mode="circular"), nn.BatchNorm2d(24), nn.ReLU6(),
        nn.Conv2d(24, 40, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5),
    ), images()  # fmt: skip


def concatenation() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.relu(m.a(x))
        both = torch.cat([a, F.gelu(m.b(a)), x], dim=1)
        both = m.bn(both)
        rows = torch.cat([F.relu(m.c(both)), F.relu(m.d(both))], dim=2)
        return m.out(rows.mean(dim=[2, 3]))

    return Of(
        forward, a=nn.Conv2d(3, 20, 3, padding=1), b=nn.Conv2d(20, 12, 3, padding=1),
        bn=nn.BatchNorm2d(35), c=nn.Conv2d(35, 24, 3), d=nn.Conv2d(35, 24, 3, padding=(1, 0)), out=nn.Linear(24, 5),
    ), images()  # fmt: skip


def norms() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.silu(m.group(m.a(x)))
        x = F.leaky_relu(m.one(m.b(x)), 0.1)
        x = x.flatten(2).transpose(1, 2)
        return m.out(m.layer(m.c(x)).max(1).values)

    return Of(
        forward, a=nn.Conv2d(3, 24, 3), group=nn.GroupNorm(6, 24), b=nn.Conv2d(24, 20, 3), one=nn.GroupNorm(1, 20),
        c=nn.Linear(20, 30), layer=nn.LayerNorm(30), out=nn.Linear(30, 5),
    ), images()  # fmt: skip


def prelu() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.PReLU(24), nn.Conv2d(24, 20, 3), nn.PReLU(), nn.Flatten(), nn.Linear(320, 5)
    ), images()


def not_zero() -> tuple[nn.Module, Tensor]:
    """f(0) != 0: what is dropped still counts for the next layer, as one half or as a share of one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.sigmoid(m.a(x.flatten(1)))
        x = torch.softmax(m.b(x), dim=1)
        x = F.relu(m.c(x)) + 1
        return torch.log_softmax(m.out(m.norm(x)), dim=1)

    return Of(
        forward, a=nn.Linear(192, 40), b=nn.Linear(40, 30), c=nn.Linear(30, 20),
        norm=nn.BatchNorm1d(20, affine=False), out=nn.Linear(20, 5),
    ), images()  # fmt: skip


def unknown() -> tuple[nn.Module, Tensor]:
    """Modules without a rule, with and without parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.ConvTranspose2d(24, 12, 3, groups=2), nn.Softmax2d(),
        nn.Conv2d(12, 24, 3), nn.LocalResponseNorm(3), nn.Softplus(), nn.Flatten(), nn.Linear(864, 5),
    ), images()  # fmt: skip


def shared() -> tuple[nn.Module, Tensor]:
    """One layer at two places, and two layers with one weight."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x.flatten(1)))
        x = m.norm(F.relu(m.twice(m.norm(x)))) + x
        x = F.relu(m.twice(x))
        return m.out(torch.tanh(m.tied(x)) + m.other(x))

    model = Of(
        forward, a=nn.Linear(192, 30), twice=nn.Linear(30, 30), norm=nn.BatchNorm1d(30),
        tied=nn.Linear(30, 24), other=nn.Linear(30, 24, bias=False), out=nn.Linear(24, 5),
    )  # fmt: skip
    model.other.weight = model.tied.weight
    return model, images()


def clash() -> tuple[nn.Module, Tensor]:
    """A weight that is used as an embedding and, transposed, as the output; a layer read along two axes."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        y = F.relu(m.mix(x)) + F.relu(m.mix(x.flip(1)))
        return m.head(F.relu(m.down(y)).mean(1))

    model = Of(
        forward, embed=nn.Embedding(20, 24), mix=nn.Linear(24, 30), down=nn.Linear(30, 24),
        head=nn.Linear(24, 20, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    return model, tokens()


def tied() -> tuple[nn.Module, Tensor]:
    """A language model whose embedding is its output layer: one weight, written along an axis and read along it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.embed(x)
        return m.out(h + m.down(F.gelu(m.up(m.norm(h)))))

    model = Of(
        forward, embed=nn.Embedding(20, 24), norm=nn.LayerNorm(24), up=nn.Linear(24, 48), down=nn.Linear(48, 24),
        out=nn.Linear(24, 20, bias=False),
    )  # fmt: skip
    model.out.weight = model.embed.weight
    return model, tokens()


def squeeze_excite() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x))
        s = torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3))))))
        x = x * s.unsqueeze(-1).unsqueeze(-1) * 0.5
        t = torch.tanh(m.gate(x)) * m.scale
        return m.out((t * x / 2).amax((2, 3)))

    return Of(
        forward, a=nn.Conv2d(3, 30, 3), down=nn.Linear(30, 12), up=nn.Linear(12, 30), gate=nn.Conv2d(30, 30, 1),
        scale=nn.Parameter(torch.randn(30, 1, 1)), out=nn.Linear(30, 5),
    ), images()  # fmt: skip


def recurrent(kind: str = "LSTM", **options: Any) -> tuple[nn.Module, Tensor]:
    options = {"num_layers": 1, "bidirectional": False, "batch_first": True, **options}
    first = options["batch_first"]

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        states, last = m.rnn(x if first else x.transpose(0, 1))
        last = last[1] if isinstance(m.rnn, nn.LSTM) else last
        pooled = states.mean(1 if first else 0)
        return m.out(torch.cat([F.relu(m.fc(pooled)), last[-1]], 1))

    wide = 2 if options["bidirectional"] else 1
    return Of(
        forward, embed=nn.Embedding(20, 12), rnn=getattr(nn, kind)(12, 20, **options), fc=nn.Linear(20 * wide, 16),
        out=nn.Linear(36, 5),
    ), tokens()  # fmt: skip


def one_dimension() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.elu(m.a(x)), 2)
        x = x.view(x.size(0), x.shape[1], -1)
        x = F.relu(m.b(x)).permute(0, 2, 1).contiguous()
        x = x.reshape(-1, x.size(-1))
        return m.out(F.relu(m.c(x)).reshape(-1, 4, 24).sum(1))

    return Of(
        forward, a=nn.Conv1d(3, 20, 3, padding=1), b=nn.Conv1d(20, 30, 3, dilation=2, padding="same"),
        c=nn.Linear(30, 24), out=nn.Linear(24, 5),
    ), torch.randn(3, 3, 8)  # fmt: skip


def residual_blocks() -> tuple[nn.Module, Tensor]:
    """In-place functions, a projection, a difference, and units dropped at random (in training)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.relu(m.bn(m.a(x)))
        y = m.b(x)
        y += m.short(x)
        y = F.relu(y, inplace=True)
        z = m.d(F.relu(m.c(y))) - y
        return m.out(F.dropout(F.avg_pool2d(z, 4), 0.0, training=m.training).flatten(1))

    return Of(
        forward, a=nn.Conv2d(3, 16, 3, padding=1), bn=nn.BatchNorm2d(16), relu=nn.ReLU(inplace=True),
        b=nn.Conv2d(16, 24, 3, padding=1, stride=2), short=nn.Conv2d(16, 24, 1, stride=2),
        c=nn.Conv2d(24, 20, 1), d=nn.Conv2d(20, 24, 1), out=nn.Linear(24, 5),
    ), images()  # fmt: skip


def attention(**options: Any) -> tuple[nn.Module, Tensor]:
    """Attention written with the module, without batch_first, and by hand."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x).transpose(0, 1)
        x = x + m.attend(query=x, key=x, value=x, need_weights=False)[0]
        x = x.transpose(0, 1)
        q, k, v = m.q(x), m.k(x), m.v(x)
        x = m.o(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v) + x
        return m.out(m.norm(x)[:, 0])

    return Of(
        forward, embed=nn.Embedding(20, 24), attend=nn.MultiheadAttention(24, 6), q=nn.Linear(24, 12),
        k=nn.Linear(24, 12), v=nn.Linear(24, 18), o=nn.Linear(18, 24), norm=nn.LayerNorm(24), out=nn.Linear(24, 5),
    ), tokens()  # fmt: skip


def linear_attention() -> tuple[nn.Module, Tensor]:
    """As EfficientViT attends: no softmax, several scales side by side, a row of ones that counts, sums divided."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.hardswish(m.bn(m.stem(x)))
        qkv = m.qkv(x)
        both = torch.cat([qkv, m.mix(m.spread(qkv))], dim=1)
        batch, _, high, wide = both.shape
        q, k, v = both.reshape(batch, -1, 3 * 4, high * wide).transpose(-1, -2).chunk(3, dim=-1)
        q, k, v = F.relu(q), F.relu(k), F.pad(v, (0, 1), value=1.0)
        y = q @ (k.transpose(-1, -2) @ v)
        y = y[..., :-1] / (y[..., -1:] + 1e-5)
        y = m.project(y.transpose(-1, -2).reshape(batch, -1, high, wide)) + x
        return m.out(y.mean((2, 3)))

    return Of(
        forward, stem=nn.Conv2d(3, 16, 3), bn=nn.BatchNorm2d(16), qkv=nn.Conv2d(16, 48, 1, bias=False),
        spread=nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False),
        mix=nn.Conv2d(48, 48, 1, groups=12, bias=False), project=nn.Conv2d(32, 16, 1), out=nn.Linear(16, 5),
    ), images()  # fmt: skip


def two_results() -> tuple[nn.Module, Tensor]:
    def forward(m: Any, x: Tensor) -> dict[str, Any]:
        x = F.relu(m.a(x.flatten(1)))
        return {"logits": m.out(x), "more": (m.other(x), torch.zeros(2) + m.offset.sum())}

    offset = nn.Parameter(torch.ones(3))
    return Of(forward, a=nn.Linear(192, 40), out=nn.Linear(40, 5), other=nn.Linear(40, 30), offset=offset), images()


SMALL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{network.__name__: network for network in (
        grouped, depthwise, concatenation, norms, prelu, not_zero, unknown, shared, clash, tied, squeeze_excite,
        one_dimension, attention, linear_attention, two_results,
    )},
    "residual": residual_blocks,
    "lstm": recurrent,
    "lstm_deep": lambda: recurrent(num_layers=2, bidirectional=True),
    "gru_deep": lambda: recurrent("GRU", num_layers=2, batch_first=False),
    "gru_both_ways": lambda: recurrent("GRU", bidirectional=True),
    "rnn": lambda: recurrent("RNN", bias=False),
}  # fmt: skip
# Batches small enough to be quick, large enough for batch norm.
OURS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    name: (lambda name=name: (models.build(name), models.example(name, batch=3)))
    for name in ("cnn_femnist", "cnn_cifar10", "cnn_cifar100", "mlp", "resnet", "vit", "text_cnn", "text_gru")
}
OURS["vit"] = lambda: (models.build("vit", depth=2, pooling="cls"), models.example("vit", batch=3))


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(len(name))
    return {**OURS, **SMALL}[name]()
