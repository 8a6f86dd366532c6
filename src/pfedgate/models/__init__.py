"""The paper's networks and a few more, all plain `nn.Module`s that `torch.fx` can trace.

Nothing here is special to pfedgate: `pfedgate.gate` wraps these exactly as it wraps your own module.

>>> model = build("cnn_cifar10")
>>> sum(p.numel() for p in model.parameters())
256830
>>> build("mlp", (64,), 10, hidden=[32])(example("mlp", batch=3)).shape
torch.Size([3, 10])
"""

from pfedgate.models.registry import ModelInfo, build, describe, example, names, options

__all__ = ["ModelInfo", "build", "describe", "example", "names", "options"]
