"""Text classifiers, and a model of the next token, on integer tokens of shape [batch, length]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class TextCNN(nn.Module):
    """Text: embedding, two 1-d convolutions, maximum over time (after Kim 2014)."""

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        vocabulary: int = 1000,
        dim: int = 32,
        channels: int = 64,
        kernel: int = 3,
    ) -> None:
        _check_tokens(input_shape)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that padding keeps the length, got {kernel}")
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.conv1 = nn.Conv1d(dim, channels, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv1d(channels, channels, kernel, padding=kernel // 2)
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.out = nn.Linear(channels, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of token sequences."""
        x = self.embedding(tokens).transpose(1, 2)
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        logits: Tensor = self.out(self.pool(x).flatten(1))
        return logits


class TextGRU(nn.Module):
    """Text: embedding, gated recurrent unit, last state or mean over time."""

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        vocabulary: int = 1000,
        dim: int = 32,
        hidden: int = 64,
        layers: int = 1,
        pooling: str = "last",
    ) -> None:
        _check_tokens(input_shape)
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling is 'last' or 'mean', got {pooling!r}")
        super().__init__()
        self.pooling = pooling
        self.embedding = nn.Embedding(vocabulary, dim)
        self.gru = nn.GRU(dim, hidden, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of token sequences."""
        states = self.gru(self.embedding(tokens))[0]
        pooled = states.mean(1) if self.pooling == "mean" else states[:, -1]
        logits: Tensor = self.out(F.relu(self.fc(pooled)))
        return logits


class TokenGRU(nn.Module):
    """Next token: embedding, gated recurrent unit, an output for every position."""

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        dim: int = 16,
        hidden: int = 128,
        layers: int = 1,
    ) -> None:
        _check_tokens(input_shape)
        super().__init__()
        self.embedding = nn.Embedding(classes, dim)  # tokens that come in are those that go out
        self.gru = nn.GRU(dim, hidden, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after every position."""
        logits: Tensor = self.out(self.gru(self.embedding(tokens))[0])
        return logits


def _check_tokens(input_shape: Shape) -> None:
    if len(input_shape) != 1:
        raise ValueError(f"token sequences are (length,), got {input_shape}")
