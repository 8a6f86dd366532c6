"""The mask that a client keeps: of its gate's candidates, the one with the lowest loss on a few of its own samples.

Where clients differ in what things look like, those who are alike gather on one candidate, without anybody telling
them; where nobody differs, most end on the same one. It is clustered learning (IFCA) inside one model: a common core,
blocks that only some train, and nothing but blocks on the wire.

All candidates are equally good at the start, and the first to be ahead would win for all. So a client draws the
candidate that it trains under, less likely the more it loses, and the drawing cools: at first any, at last the best.
A client predicts with the best of its last score. It scores every round at first, then less and less often.

With `gate.chooser` every sample has a candidate: a client with several distributions, several masks. The losses of each
scored sample under all candidates teach the gate to predict them; in training the same drawing favours some candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfedgate.algorithms.pfedgate.personal import Personal
from pfedgate.core.types import Local, State, Task
from pfedgate.training.fit import loop
from pfedgate.training.workspace import Batch

SELDOM = 4  # after n rounds, a client scores every (1 + n / SELDOM)-th
COLD = 0.01  # share of the heat that is left at the end of the run
SHARP = 0.1  # share of the mean loss by which a candidate must be better to be chosen e times as surely


def new(gate: State) -> State:
    """What a client remembers beside its new gate: when it is to score; nothing without candidates."""
    return {"masks/due": torch.tensor(0)} if "choice" in gate else {}


def choose(personal: Personal, private: State, local: Local, task: Task, probe: int, heat: float) -> State:
    """Set the loaded gate's choice, if the client is due to score; what it is to remember.

    With `heat` the choice is drawn, and the best one is remembered beside it.
    """
    gate, index = personal.gated.gate, local.round.index
    due = private.get("masks/due")
    if due is None or index < int(due) or personal.gated.selector.solver == "everything fits":
        return {} if due is None else {"masks/due": due}
    batches: list[Batch] = []

    def keep(batch: Batch) -> Tensor:
        batches.append(batch)
        return batch.x.new_zeros(())

    loop(task, local, keep, batch=probe, steps=1, stream="probe")
    if not batches:
        return {"masks/due": due}
    each = personal.losses(task.loss, batches[0])
    losses = each.mean(1).cpu()
    best = losses.argmin()
    noise = torch.rand(len(losses), generator=local.generator("candidate")).log().neg().log()  # Gumbel's, negative
    spread = heat * float(losses.mean().abs()) * COLD ** (index / local.round.rounds)
    gate.choice.copy_((losses + spread * noise).argmin())
    choice = {"masks/due": torch.tensor(index + 1 + index // SELDOM), "gate/choice": best}
    if gate.config.chooser:
        sharpness = 1 / (SHARP * float(losses.mean().abs()) + 1e-12)
        gate.learn(batches[0].x, each, sharpness)
        choice["gate/chooser_bias"] = gate.chooser_bias.cpu().clone()
        gate.chooser_bias -= (spread * sharpness * noise).to(gate.chooser_bias.device)
    return choice
