"""Gate a module of your own with a budget, and train it on scikit-learn's digits. No federated learning here.

python examples/own_model.py --budget 0.3 --epochs 15
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pfedgate


class Net(nn.Module):
    """Two convolutions, a residual connection and a head: nothing here knows of gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.deep = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + F.relu(self.deep(x))
        return self.head(F.max_pool2d(x, 2).flatten(1))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.3, help="share of parameters, FLOPs and activation bytes")
    parser.add_argument("--epochs", type=int, default=15)
    chosen = parser.parse_args(given)

    torch.manual_seed(0)
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x))
    train, test = order[360:], order[:360]

    gated = pfedgate.gate(Net(), x[:64], budget=chosen.budget)
    print(gated.plan)
    print(gated.explain())
    optimizer = gated.optimizer("sgd", lr=0.05, gate_lr=0.1, momentum=0.9)

    most = 0.0
    for epoch in range(1, chosen.epochs + 1):
        gated.train()
        for rows in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(gated(x[rows]), y[rows]).backward()
            optimizer.step()
            most = max(most, *gated.last.cost.values())
        if epoch % 5 == 0 or epoch == chosen.epochs:
            gated.eval()
            with torch.no_grad():
                accuracy = (gated(x[test]).argmax(1) == y[test]).float().mean()
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, live units {gated.last.units}")
    print(f"the most that any step used of any resource: {most:.3f} of the dense model")


if __name__ == "__main__":
    main()
