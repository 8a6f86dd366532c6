"""The switches of the gate, each with the reason for its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pfedgate.core.errors import unknown

_CHOICES = {
    "post_norm": ("blocks", "batch", "none"),
    "activation": ("centred", "linear", "sigmoid", "none"),
    "scope": ("batch", "sample", "client"),
    "init": ("random", "ones"),
    "ranking": ("magnitude", "nested", "random"),
}


@dataclass(frozen=True)
class GateConfig:
    """Every switch of the gate, with the reason for its default.

    >>> GateConfig(scope="batches")
    Traceback (most recent call last):
    ValueError: GateConfig.scope: unknown value 'batches': did you mean 'batch'? Known: batch, client, sample
    """

    # Normalise the input: clients differ in brightness and contrast, the gate should see the rest.
    pre_norm: bool = True
    # Over the L blocks; "batch" (the paper's BatchNorm) hides the batch from a gate that averages over it.
    post_norm: Literal["blocks", "batch", "none"] = "blocks"
    # M = 1 + r (2 sigmoid(z) - 1), around 1 so that depth does not shrink the signal. "linear" is 1 + r z,
    # unbounded. "sigmoid" is the paper's M in (0, 1); "none" its ablation, M = z as it leaves the post-
    # norm. G is a sigmoid in all of them: it only ranks blocks, and the knapsack wants positive values.
    activation: Literal["centred", "linear", "sigmoid", "none"] = "centred"
    # The r above: M stays in (1 - r, 1 + r). 1 lets a block be switched off smoothly but never negated.
    weight_range: float = 1.0
    # 2: own paths for M and G, as published. 1: G = M, half the size (ablation).
    paths: Literal[1, 2] = 2
    # One decision per batch, per sample, or per client (from the mean of all its training data: `Gate.remember`).
    scope: Literal["batch", "sample", "client"] = "batch"
    # The gate sees averages over p x p cells of an image, p positions of a sequence, p values of a flat vector.
    # None: the largest p that keeps the gate within max_share of the model, and within 2 % of its FLOPs.
    # 0: no pooling, the paper's flattened input.
    pool: int | None = None
    # The paper's own figure for gate size / model size (6.3 %); more is stored, but hardly learned from.
    max_share: float = 0.063
    # Channels are the last dimension of the input ([N, T, C]) instead of the second.
    channels_last: bool = False
    # A third, zero-initialised path to one additive value per class: it adapts the outputs to the client's labels.
    shift: bool = False
    # "ones": M is exactly 1 for any input at first. With budget 1 the gated model is then the wrapped one, bit for bit.
    init: Literal["random", "ones"] = "random"
    # Initial spread of M's path after the post-norm (.1: M between about .9 and 1.1; 1: between about .3 and
    # 1.7, noise that the shared model would have to unlearn), and its offset (3 with "sigmoid": M starts near .95).
    initial_scale: float = 0.1
    initial_bias: float = 0.0
    # In which order G ranks the blocks of a layer at first (see start.py); "random": by chance, other ones per batch.
    ranking: Literal["magnitude", "nested", "random"] = "magnitude"
    # Rankings to choose among, instead of a G of its own for every block (see start.py). 1: a G for every block.
    candidates: int = 1
    # Share of the last layer's kept blocks that all candidates have in common; it falls evenly to none of the first's.
    core: float = 1.0
    # Each sample goes to the candidate that it is predicted to do best under, learnt from the losses of all candidates
    # (`Gate.learn`): a client with several distributions has several masks. Off: one candidate, `Gate.choice`, for all.
    chooser: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"GateConfig.{name}: {unknown('value', str(value), choices)}")
        if self.paths not in (1, 2):
            raise ValueError(f"GateConfig.paths must be 1 or 2, got {self.paths}")
        if self.max_share <= 0 or not 0 < self.weight_range <= 1:
            raise ValueError(
                "GateConfig needs max_share > 0 and 0 < weight_range <= 1 (M must not turn negative), "
                f"got {self.max_share} and {self.weight_range}"
            )
        if self.candidates < 1 or not 0 <= self.core <= 1:
            raise ValueError(
                f"GateConfig needs candidates >= 1 and 0 <= core <= 1, got {self.candidates} and {self.core}"
            )
        if self.candidates > 1 and (self.ranking == "random" or self.paths == 1):
            raise ValueError("candidates are rankings: they need paths=2 and ranking 'nested' or 'magnitude'")
        if self.chooser and (self.candidates == 1 or self.scope != "batch"):
            raise ValueError("a chooser chooses among candidates: it needs candidates > 1, and scope='batch'")
        if self.pool is not None and self.pool < 0:
            raise ValueError(f"GateConfig.pool must be positive, 0 (none) or None (automatic), got {self.pool}")
        if self.weight_range != 1 and self.activation not in ("centred", "linear"):
            raise ValueError(f"GateConfig.weight_range has no meaning with activation={self.activation!r}")
        if self.init == "ones" and self.activation == "sigmoid":
            raise ValueError("a sigmoid at exactly 1 cannot learn: init='ones' needs activation='centred'")

    @classmethod
    def paper(cls, **changes: object) -> GateConfig:
        """The gate as published: BatchNorm over the batch, M a plain sigmoid. Only the pooling is ours."""
        return cls.of(
            {"post_norm": "batch", "activation": "sigmoid", "initial_scale": 1.0, "ranking": "random", **changes}
        )

    @classmethod
    def of(cls, value: GateConfig | Mapping[str, object] | str | None) -> GateConfig:
        """From a config, a mapping of options, ``"default"`` or ``"paper"``.

        >>> GateConfig.of("paper").activation, GateConfig.of({"paths": 1}).paths
        ('sigmoid', 1)
        """
        if isinstance(value, GateConfig):
            return value
        if value is None or value == "default":
            return cls()
        if isinstance(value, str):
            if value != "paper":
                raise ValueError(unknown("gate", value, ("default", "paper")))
            return cls.paper()
        names = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in names:
                raise ValueError(f"GateConfig: {unknown('option', name, names)}")
        return cls(**value)  # type: ignore[arg-type]
