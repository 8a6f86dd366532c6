"""A small vision transformer (Dosovitskiy et al. 2021), pre-norm, written so that `torch.fx` can trace it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and a GELU feed-forward network, each with a residual connection."""

    def __init__(self, dim: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out: [batch, tokens, dim]."""
        n = self.norm1(x)
        x = x + self.attention(n, n, n, need_weights=False)[0]
        h: Tensor = self.fc2(self.gelu(self.fc1(self.norm2(x))))
        return x + h


class VisionTransformer(nn.Module):
    """Vision transformer: `depth` encoder blocks of `heads` heads over `patch`×`patch` pixels."""

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        *,
        patch: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        ffn: int = 128,
        dropout: float = 0.0,
        pooling: str = "mean",
    ) -> None:
        if len(input_shape) != 3:
            raise ValueError(f"images are (channels, height, width), got {input_shape}")
        if patch < 1 or input_shape[1] % patch or input_shape[2] % patch:
            raise ValueError(f"patch {patch} does not divide images of {input_shape[1]}×{input_shape[2]}")
        if heads < 1 or dim % heads:
            raise ValueError(f"dim {dim} cannot be shared by {heads} heads: it must be a multiple")
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling is 'mean' or 'cls', got {pooling!r}")
        super().__init__()
        self.patches = nn.Conv2d(input_shape[0], dim, patch, stride=patch)
        tokens = (input_shape[1] // patch) * (input_shape[2] // patch)
        # A class token collects what is classified; without one the mean over patches does.
        self.cls = nn.Parameter(torch.zeros(1, 1, dim)) if pooling == "cls" else None
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens + (self.cls is not None), dim))
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads, ffn, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.cls is not None:
            tokens = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(tokens + self.position))
        pooled = tokens.mean(1) if self.cls is None else tokens[:, 0]
        logits: Tensor = self.out(pooled)
        return logits
