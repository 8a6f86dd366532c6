"""A network once its graph was read (`Network`), and the shape of a rule (`Rule`).

A `Network` is a program of steps that can run on live units only, the units along each axis of each parameter, the
cost of every operation, and a note for every place where units have to be restored, with the reason. It holds no
tensor and no module of the model it was read from, so copies of a model share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from pfedgate.gating.slicing.axes import Segments, Space

if TYPE_CHECKING:
    from pfedgate.gating.slicing.analysis import Analysis
    from pfedgate.gating.slicing.execute import Sliced

Layouts = Any  # Layout | None, or nested tuples of them for nodes that return several tensors


class CannotSlice(Exception):
    """A rule's answer when it cannot prove that leaving units out is exact; the text is the reason."""


class Untraceable(Exception):
    """The network as a whole cannot be followed; the text is the reason."""


@dataclass(frozen=True)
class Policy:
    """A splitter's wish: kinds of units that it may cut, and finished spaces that it takes back."""

    kinds: frozenset[str]
    refuse: Callable[[Space], bool]
    may: Callable[[str], bool] = lambda place: True  # which layers may be cut, by where they are


@dataclass(frozen=True)
class Operation:
    """FLOPs per sample of one operation at full width, and the units it writes and reads."""

    place: str
    flops: float
    written: Segments
    read: Segments


@dataclass(frozen=True)
class Activation:
    """Bytes per sample of a tensor that an operation allocates."""

    place: str
    nbytes: float
    segments: Segments


class Rule:
    """How one node of the graph is analysed (in the constructor) and run on live units (when called)."""

    out: Layouts = None
    view = False  # the result shares memory with an argument: it costs nothing to keep
    full = False  # the arguments must be complete tensors

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        raise NotImplementedError

    def __call__(self, run: Sliced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Ref(NamedTuple):
    """An argument that an earlier step computed; `layouts` only where it must be completed first."""

    slot: int
    layouts: Layouts = None


@dataclass(frozen=True)
class Arguments:
    """The arguments of a step. `plain`: no references inside lists, slices or keywords, and none to complete."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plain: bool


@dataclass(frozen=True)
class Step:
    """One node of the graph: its rule, its arguments, and slots to empty after it."""

    slot: int
    rule: Rule
    inputs: Arguments
    release: tuple[int, ...]
    place: str  # where a user finds it


class Programmed(NamedTuple):
    """A forward that was followed: its steps in training and in evaluation, and what it may be given."""

    training: list[Step]
    evaluation: list[Step]
    sizes: list[Any]  # of inputs, where the program was made for one size only
    keys: list[str]  # keyword arguments, in the order of their inputs


@dataclass
class Network:
    """The result of `trace.analyse`; `parts` is None when the module cannot be followed (then `reason` says why).

    The program of the whole forward has the place ""; else there are programs of regions, and the forward itself runs.
    """

    parts: dict[str, Programmed] | None
    reason: str = ""
    axes: dict[str, dict[int, Segments]] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)  # the axis of a parameter that its layer sums over
    spaces: dict[int, Space] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    alias: dict[int, int] = field(default_factory=dict)  # a space as a rule knew it -> the space it was tied into
    rest: list[str] = field(default_factory=list)  # parameters outside of regions
    hooked: set[str] = field(default_factory=set)  # layers that had hooks, which run as ever

    @property
    def program(self) -> Programmed | None:
        """The program of the whole forward, if it could be followed."""
        return None if self.parts is None else self.parts.get("")

    @property
    def several(self) -> bool:
        """Whether the program has inputs beside one tensor."""
        return self.program is not None and (len(self.program.sizes) > 1 or bool(self.program.keys))


def describe(node: fx.Node) -> str:
    """A place a user can find in their own code."""
    if node.op == "call_module":
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{target} ({node.name})"


def computes_weights(module: nn.Module) -> str:
    """What computes a layer's weights from its parameters (weight norm, spectral norm, ...); "" for plain ones."""
    if is_parametrized(module):
        lists: Any = module.parametrizations
        return ", ".join(type(one).__name__.strip("_") for steps in lists.values() for one in steps)
    hooks = [type(hook) for hook in module._forward_pre_hooks.values()]
    return ", ".join(kind.__name__ for kind in hooks if kind.__module__.startswith("torch.nn.utils."))


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs around the module's forward that a rule would leave out."""
    return any(hooks_of(module))


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """Where a module keeps its hooks, for as long as it lives."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
