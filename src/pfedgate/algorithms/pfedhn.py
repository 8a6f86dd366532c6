"""pFedHN (Shamsian et al. 2021, Personalized Federated Learning using Hypernetworks).

On the server: a network H that makes a client's whole model from a vector v_i of its own. A model travels each way: the
client trains the one it got, the server turns the difference got − trained into gradients of H and of v_i, by one
vector-Jacobian product per client, and steps. Private: nothing. Scored: H(v_i), without local training.

Departures: with several clients a round (official: one) H takes one step with the mean of their gradients; one step
each diverges. H starts near the common initial model (official: at random). Vectors have a fixed length (official: 1 +
clients/4), and only those of the round's clients move, by momentum and decay, too. Clients train for the task's epochs
(official: 50 steps). Buffers are averaged. Mind the server: the last layer of H holds `hidden` times the model and as
much momentum (the paper's complexity table leaves that out). A novel client learns a vector under a frozen H, which
goes down once, after training, instead of gradients going up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import initial, module, skeleton
from pfedgate.core.seeds import generator, key
from pfedgate.core.state import flat, inside, shapes, split, to, under, unflat
from pfedgate.core.types import Card, Local, Optim, Round, State, Task, Update
from pfedgate.training.fit import Batch, fit, loop
from pfedgate.training.workspace import Stepper

HYPER, VECTOR, MOMENTUM, BUFFER, OVER = "hyper/", "vector/", "momentum/", "buffer/", "over"


@register("pfedhn")
@dataclass(frozen=True)
class PFedHN(Algorithm):
    """A network on the server makes every client's model."""

    vector: int = 32  # length of v
    hidden: int = 100  # units of every hidden layer of H
    hidden_layers: int = 3  # 0: H is linear
    server_lr: float = 0.01  # official
    server_momentum: float = 0.9  # official
    server_decay: float = 1e-3  # official
    server_clip: float = 50.0  # L2 norm of gradients of H and of a vector; official
    spread: float = 0.1  # spread of the first models H makes, as a share of the spread of the initial parameters
    adapt_epochs: int = 1  # a novel client's epochs on its vector
    adapt_lr: float = 0.1  # its gradient passes through all of H: larger than the task's

    paper = "Shamsian et al. 2021, Personalized Federated Learning using Hypernetworks"
    shares = "the whole model, made for each client"
    apart = "every client's model is another one, made for it by a hypernetwork"
    keeps = "nothing (its vector lies on the server)"

    def __post_init__(self) -> None:
        if min(self.vector, self.hidden, self.hidden_layers + 1) < 1:
            raise ValueError(f"vector and hidden are at least 1, hidden_layers not negative; got {self.options()}")

    @classmethod
    def example(cls, task: Task) -> PFedHN:
        """A small network on the server."""
        return cls(task, vector=8, hidden=16)

    def init_server(self, seed: int) -> State:
        """H, around the common initial model."""
        parameters, buffers = self.split(initial(self.task, seed))
        layers = [self.hidden] * self.hidden_layers
        hyper = new_hyper(parameters, self.vector, layers, self.spread, generator(seed, "hyper"))
        return {**under(HYPER, hyper), **under(BUFFER, buffers), OVER: torch.tensor(False)}

    def send(self, server: State, card: Card, round: Round) -> State:
        """The client's model; a client without a vector also gets H once training is over, to find its own."""
        hyper = settled(inside(HYPER, server))
        model = {**self._model(hyper, self.vector_of(server, card, round)), **inside(BUFFER, server)}
        return {**model, **under(HYPER, hyper)} if server[OVER] and _place(card) not in server else model

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs from the model that was made for the client."""
        done = fit(self.task, got, local)
        return Update(done.state, local.n, done.metrics), {}

    def merger(self, server: State, round: Round) -> HyperStep:
        """Differences become gradients of H and of the clients' vectors."""
        return HyperStep(self, server, round)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's vector, learnt through H, which stands still."""
        if not (hyper := to(settled(inside(HYPER, got)), local.device)):
            return private
        vector = self.vector_of({}, local.card, local.round).to(local.device)
        stepper = Stepper(self.task.optim, self.adapt_lr * local.round.factor)
        model = module(self.task, got, local.device).train()

        def step(batch: Batch) -> Tensor:
            v = vector.detach().requires_grad_()
            loss = self.task.loss(functional_call(model, self._model(hyper, v), (batch.x,)), batch.y).mean()
            (gradient,) = torch.autograd.grad(loss, v)
            stepper.clip(gradient)
            stepper.step(vector, gradient)
            return loss.detach()

        loop(self.task, local, step, epochs=self.adapt_epochs)
        return {"vector": vector.cpu()}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model that H makes."""
        own = self._model(settled(inside(HYPER, got)), private["vector"]) if "vector" in private else {}
        return module(self.task, {**got, **own})

    def vector_of(self, server: State, card: Card, round: Round) -> Tensor:
        """The client's vector: the server's, or a draw of the client's own."""
        if (vector := server.get(_place(card))) is not None:
            return vector
        return torch.randn(self.vector, generator=generator(round.seed, VECTOR, card.id))

    def split(self, model: State) -> tuple[State, State]:
        """Parameters, in the model's order, and buffers."""
        names = [name for name, _ in skeleton(self.task.model).named_parameters()]
        return {name: model[name] for name in names}, split(model, names.__contains__)[1]

    def _model(self, hyper: State, vector: Tensor) -> State:
        parameters = skeleton(self.task.model).named_parameters()
        return unflat(generate(hyper, vector), [(name, value.shape) for name, value in parameters])


class HyperStep:
    """A merger that takes one step of H with the mean of the clients' gradients, and one of each client's vector."""

    def __init__(self, algorithm: PFedHN, server: State, round: Round) -> None:
        self.algorithm, self.server, self.round = algorithm, server, round
        rates = (algorithm.server_lr, algorithm.server_momentum, algorithm.server_decay)
        self.optim = Optim("sgd", *rates, clip=algorithm.server_clip)
        self.hyper, self.merged = settled(inside(HYPER, server)), dict(server)
        self.gradient, self.count = torch.zeros_like(flat(self.hyper)), 0
        self.buffers = WeightedMean(inside(BUFFER, server), round.total)

    def add(self, card: Card, update: Update) -> str | None:
        """The client's difference: a gradient of H to be averaged, and a step of the client's vector."""
        vector, place = self.algorithm.vector_of(self.server, card, self.round), _place(card)
        trained, rest = self.algorithm.split(update.shared)
        gradient, own = pull_back(self.hyper, vector, generate(self.hyper, vector) - flat(trained))
        momentum = f"{MOMENTUM}{place}/"
        self.merged[place], slots = descend(vector, own, self.optim, inside(momentum, self.server))
        self.merged.update(under(momentum, slots))
        self.gradient.add_(gradient)
        self.count += 1
        return self.buffers.add(card, Update(rest, update.weight))

    def around(self, card: Card, update: Update) -> State:
        """The model that was made for the client, and the buffers."""
        vector = self.algorithm.vector_of(self.server, card, self.round)
        got = {**self.algorithm._model(self.hyper, vector), **inside(BUFFER, self.server)}
        return {name: got[name] for name, value in update.shared.items() if value.is_floating_point()}

    def result(self) -> State:
        """The server's State after the step of H."""
        mean, slots = self.gradient.div_(max(self.count, 1)), inside(MOMENTUM + HYPER, self.server)
        psi, slots = descend(flat(self.hyper), mean, self.optim, slots)
        hyper = settled(unflat(psi, shapes(self.hyper)))
        over = {OVER: torch.tensor(self.round.index + 1 == self.round.rounds)}
        moved = {**under(HYPER, hyper), **under(MOMENTUM + HYPER, slots), **under(BUFFER, self.buffers.result())}
        return {**self.merged, **moved, **over}


def _place(card: Card) -> str:
    return f"{VECTOR}{key(0, card.id):016x}"  # any text may be a client's name; no name is the beginning of another


# -- the hypernetwork, as functions over a State: vectors in, all parameters of a model out
def new_hyper(model: State, vector: int, hidden: list[int], spread: float, rng: torch.Generator) -> State:
    """A hypernetwork whose models start around `model`.

    Every parameter differs from the given one by about `spread` times the spread of the tensor it belongs to.

    >>> hyper = new_hyper({"w": torch.arange(4.0)}, 3, [5], 0.0, torch.Generator())
    >>> generate(hyper, torch.randn(3)).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    hyper: State = {}
    widths = [vector, *hidden]
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = (3 / inputs) ** 0.5 * 2**0.5  # He: the size of what passes through stays the same
        hyper[f"{layer}.weight"] = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=rng)
        hyper[f"{layer}.bias"] = torch.zeros(outputs)
    sizes = [float(value.std(correction=0)) or 0.01 for value in model.values()]
    scale = torch.cat([torch.full((v.numel(),), size) for v, size in zip(model.values(), sizes, strict=True)])
    last = torch.randn(len(scale), widths[-1], generator=rng) * (spread * widths[-1] ** -0.5)
    return {**hyper, "out.weight": last * scale[:, None], "out.bias": flat(model).clone()}


def settled(hyper: State) -> State:
    """The same, with the same bits of results wherever it came from: names in order, memory aligned.

    A product of matrix and vector is rounded otherwise where the matrix begins in the middle of a cache line, as it may
    when it was read from a file or is a piece of a longer vector.
    """
    return {name: v if v.data_ptr() % 64 == 0 else v.clone() for name, v in sorted(hyper.items())}


def generate(hyper: State, vector: Tensor) -> Tensor:
    """H(v): all parameters of a model, one after the other."""
    for layer in range(len(hyper) // 2 - 1):
        vector = torch.relu(F.linear(vector, hyper[f"{layer}.weight"], hyper[f"{layer}.bias"]))
    return F.linear(vector, hyper["out.weight"], hyper["out.bias"])


def pull_back(hyper: State, vector: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of H (as one vector) and of v: the vector-Jacobian product of `generate` with `difference`."""
    leaves = {name: value.detach().requires_grad_() for name, value in hyper.items()}
    v = vector.detach().requires_grad_()
    *of_hyper, of_vector = torch.autograd.grad(generate(leaves, v), [*leaves.values(), v], difference)
    return torch.cat([gradient.reshape(-1) for gradient in of_hyper]), of_vector


def descend(value: Tensor, gradient: Tensor, optim: Optim, slots: State) -> tuple[Tensor, State]:
    """One step of an optimiser: the new value, and its buffers for the next one."""
    moved, stepper = value.clone(), Stepper(optim, slots=slots)
    stepper.clip(gradient)
    stepper.step(moved, gradient)
    return moved, stepper.slots()
