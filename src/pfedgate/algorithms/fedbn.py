"""FedBN (Li et al. 2021, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization).

Shared: everything but BatchNorm. Private: weights, biases and running statistics of BatchNorm layers. These are found
by type: other libraries look for "bn" in names and miss the layers of a Sequential. A model without BatchNorm is
FedAvg's.

A novel client keeps the initial weights and biases and measures the statistics on its training data; nothing is
trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.modules import module, persistent_buffers
from pfedgate.core.state import pick, under
from pfedgate.core.types import Local, State
from pfedgate.training.fit import Batch, loop


@register("fedbn")
@dataclass(frozen=True)
class FedBN(parts.PrivatePart):
    """FedAvg with private BatchNorm layers."""

    paper = "Li et al. 2021, FedBN: Federated Learning on Non-IID Features"
    shares = "all but BatchNorm"
    keeps = "BatchNorm layers, statistics included"

    @property
    def own(self) -> parts.Part:
        """The tensors of all BatchNorm layers."""
        return parts.batch_norms(self.task)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """Statistics of a novel client: one pass over its training data, each batch counting alike."""
        if not self.own or local.n < 2:  # one sample has no variance
            return private
        model = module(self.task, parts.join(got, private), local.device)
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean over batches

        @torch.no_grad()
        def see(batch: Batch) -> Tensor:
            model(batch.x)
            return batch.x.new_zeros(())

        loop(replace(self.task, drop_last=True), local, see, epochs=1, stream="statistics")
        tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
        return under(parts.OWN, {name: value.detach() for name, value in pick(tensors, sorted(self.own)).items()})
