"""Splitters: how a model's parameters become the L blocks that a gate weighs and a budget keeps or drops.

`unit` (default)  whole output units with their bias and norm; dropped ones are neither computed nor read
`head`            attention heads and the hidden neurons of feed-forward layers; everything else is always kept
`channel`         the inputs that a layer reads
`flat`            the paper's operator-free rule: every tensor, flattened, in B pieces (cannot be skipped, only masked)
any callable      `model -> list[Block]`

Blocks of one group cost the same: the first one is always kept and takes up what does not divide evenly, so that
choosing among the others is choosing how many (see `selection/budget.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import nn

from pfedgate.core.errors import unknown
from pfedgate.gating.inputs import Given
from pfedgate.gating.slicing.axes import Segments, Space, is_dense
from pfedgate.gating.slicing.steps import Network, Policy, computes_weights
from pfedgate.gating.slicing.trace import analyse

SPLITTERS = ("unit", "head", "channel", "flat")
_UNITS = frozenset({"conv", "linear", "embedding", "parameter", "heads", "attention", "recurrent"})


@dataclass(frozen=True)
class Piece:
    """Entries `start:stop` of a parameter along `axis`, or of the flattened parameter when `axis` is None."""

    parameter: str
    start: int
    stop: int
    axis: int | None = 0


@dataclass(frozen=True)
class Block:
    """A part of the model that is kept or dropped as a whole."""

    name: str
    pieces: tuple[Piece, ...]
    keep: bool = False


@dataclass(frozen=True)
class Cut:
    """How `units` are grouped: `first` units always kept, then `count` blocks of `step` units."""

    units: int
    first: int
    step: int
    count: int

    def block_of(self) -> npt.NDArray[np.int64]:
        """Number of the block of each unit, the first one being 0."""
        numbers = np.arange(self.units) - self.first
        return np.where(numbers < 0, 0, numbers // max(self.step, 1) + 1)


VECTOR = 4  # numbers of live units that processors like: 16 channels take less time than 14


def cut(units: int, blocks: int, smallest: float) -> Cut:
    """Group units into about `blocks` blocks, all but the first of equal size.

    The first block holds at least the share `smallest` (the paper's s_min) and as little more as possible, but up to
    half more if all numbers of live units are multiples of four then.

    >>> cut(120, blocks=10, smallest=0.05), cut(32, blocks=10, smallest=0.1)
    (Cut(units=120, first=8, step=16, count=7), Cut(units=32, first=4, step=4, count=7))
    """
    least = max(1, int(units * smallest))
    if units - least <= blocks + 1:  # few units: every one but the first is a block
        return Cut(units, least, 1, units - least)
    options = []
    for count in range(max(2, blocks - 3), blocks + 2):
        widest = (units - least) // count
        for step in {widest, max(1, widest - widest % VECTOR)}:
            first = units - step * count
            aligned = first % VECTOR == step % VECTOR == 0 and first <= 1.5 * units * smallest
            options.append((not aligned, first, abs(count - (blocks - 1)), count, step))
    _, first, _, count, step = min(options)
    return Cut(units, first, step, count)


@dataclass(frozen=True)
class Owner:
    """Which block each entry of a parameter belongs to, along one axis (None: flattened)."""

    axis: int | None
    block: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """A model cut into blocks; `plan.BlockPlan` adds costs."""

    blocks: tuple[Block, ...]
    owners: dict[str, Owner]
    network: Network | None
    cuts: dict[int, Cut]  # space -> how its units are grouped
    first_block: dict[int, int]  # space -> number of its first block
    notes: Sequence[str] = ()  # what is kept whole for want of a way to drop parts of it, where there is no network


def _chosen(modules: str | Callable[[str], bool]) -> Callable[[str], bool]:
    """Whether a layer is in one of the modules that a pattern names.

    >>> chosen = _chosen("*.mlp")
    >>> chosen("blocks.0.mlp.fc1"), chosen("blocks.0.attn.qkv")
    (True, False)
    """
    if callable(modules):
        return modules
    pattern = modules

    def inside(place: str) -> bool:
        names = place.split(".")
        return any(fnmatchcase(".".join(names[:end]), pattern) for end in range(1, len(names) + 1))

    return inside


def _policy(split: str, keep_output: bool, may: Callable[[str], bool]) -> Policy:
    def unit(space: Space) -> bool:
        only_parameters = all(kind == "parameter" for kind, _ in space.producers)
        return only_parameters or (keep_output and space.output)

    def head(space: Space) -> bool:
        kinds = {kind for kind, _ in space.producers}
        neurons = kinds == {"linear"} and space.consumers == {"linear"}
        return space.output or not (kinds == {"heads"} or neurons)

    if split == "unit":
        return Policy(_UNITS, unit, may)
    if split == "head":
        return Policy(frozenset({"heads", "linear"}), head, may)
    return Policy(frozenset({"input"}), lambda space: False, may)


def split_model(
    model: nn.Module,
    example: Given,
    how: str | Callable[[nn.Module], Sequence[Block]],
    *,
    blocks: int,
    smallest: float,
    keep_output: bool,
    output_blocks: int,
    modules: str | Callable[[str], bool] = "*",
) -> Split:
    """Apply a splitter and check that it covers every parameter exactly once."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shapes:
        raise ValueError("the model has no parameters, so there is nothing to gate")
    if callable(how):
        own = _checked(how(model))
        return Split(own, _owners(own, shapes), None, {}, {})
    if how not in SPLITTERS:
        raise ValueError(unknown("splitter", how, SPLITTERS))
    if how == "flat":
        computed = sorted(_computed(model))
        flat = tuple(
            block
            for name, shape in shapes.items()
            for block in _flat(name, shape, blocks, 1.0 if name in computed else smallest)
        )
        notes = [f"{name} is kept whole, because the weights of its layer are computed from it" for name in computed]
        return Split(flat, _owners(flat, shapes), None, {}, {}, notes)
    network = analyse(model, example, _policy(how, keep_output, _chosen(modules)))
    if network.parts is not None and not network.spaces:
        places = "; ".join(f"{place}: {why}" for place, why in network.notes[:3])
        where = "" if modules == "*" else f" in modules {modules!r}"
        reason = f"no units were found that can be skipped{where}" + (f" ({places})" if places else "")
        network = Network(None, reason=reason)
    if network.parts is None:
        if how != "unit":
            raise ValueError(f"split={how!r} is not possible: {network.reason}. Use split='unit' or 'flat'")
        rows = tuple(_by_module(model, blocks, smallest, keep_output))
        return Split(rows, _owners(rows, shapes), network, {}, {})
    return _by_space(network, shapes, how, blocks, smallest, output_blocks)


def _checked(returned: object) -> tuple[Block, ...]:
    """The result of a user's splitter, if it is blocks of pieces."""
    expected = "return a list of pfedgate.Block(name, pieces), each piece a pfedgate.Piece(parameter, start, stop)"
    if not isinstance(returned, Iterable):
        raise TypeError(f"the splitter returned {type(returned).__name__}; {expected}")
    blocks = tuple(returned)
    for number, block in enumerate(blocks):
        if not isinstance(block, Block):
            raise TypeError(f"the splitter's block {number} is a {type(block).__name__}; {expected}")
        if not isinstance(block.pieces, Sequence) or not all(isinstance(piece, Piece) for piece in block.pieces):
            raise TypeError(f"the pieces of block {block.name!r} are no sequence of Piece; {expected}")
    return blocks


def _flat(name: str, shape: tuple[int, ...], blocks: int, smallest: float) -> Iterable[Block]:
    """The paper's rule, literally: floor(d * s_min) always kept, the rest in B - 1 pieces, the last may be smaller."""
    size = int(np.prod(shape, dtype=np.int64))
    first = int(size * smallest)
    step = max(1, -(-(size - first) // max(blocks - 1, 1)))
    edges = sorted({0, first, *range(first, size, step), size})
    for i, (start, stop) in enumerate(pairwise(edges)):
        yield Block(f"{name}/{i}", (Piece(name, start, stop, axis=None),), keep=i == 0 and first > 0)


def _computed(model: nn.Module) -> set[str]:
    """Parameters from which layers compute their weights: a mask on them is none on the weights, or makes them NaN."""
    names = set()
    for place, module in model.named_modules():
        if computes_weights(module):
            inner = [name for name, _ in module.named_parameters() if name not in ("weight", "bias")]
            names |= {f"{place}.{name}" if place else name for name in inner}
    return names


def _by_module(model: nn.Module, blocks: int, smallest: float, keep_output: bool) -> Iterable[Block]:
    """Without a graph: rows of every layer, each layer by itself; the last layer is taken for the output."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        layers.setdefault(name.rpartition(".")[0], {})[name] = tuple(parameter.shape)
    computed = _computed(model)
    last = [layer for layer, own in layers.items() if any(len(shape) > 1 for shape in own.values())][-1:]
    for layer, own in layers.items():
        heights = {shape[0] for shape in own.values() if shape}
        plain = len(heights) == 1 and any(len(shape) > 1 for shape in own.values()) and not own.keys() & computed
        if not plain or (keep_output and layer in last):
            pieces = tuple(Piece(n, 0, shape[0] if shape else 1, 0 if shape else None) for n, shape in own.items())
            yield Block(layer or "model", pieces, keep=True)
            continue
        plan = cut(heights.pop(), blocks, smallest)
        edges = [0, *(plan.first + plan.step * i for i in range(plan.count + 1))]
        for i, (start, stop) in enumerate(pairwise(edges)):
            pieces = tuple(Piece(n, start, stop, 0 if shape else None) for n, shape in own.items())
            yield Block(f"{layer}/{i}", pieces, keep=i == 0)


def _by_space(
    network: Network, shapes: dict[str, tuple[int, ...]], how: str, blocks: int, smallest: float, output_blocks: int
) -> Split:
    named: list[Block] = []
    cuts: dict[int, Cut] = {}
    first_block: dict[int, int] = {}
    for space, info in network.spaces.items():
        cuts[space], first_block[space] = cut(info.units, blocks, smallest), len(named)
        place = info.producers[0][1]
        named.extend(Block(f"{place}/{i}", (), keep=i == 0) for i in range(cuts[space].count + 1))
    owners: dict[str, Owner] = {}

    def numbered(name: str, *new: Block) -> int:
        """The number of the first block of this name, after which the others follow; they are added if it is new."""
        number = next((i for i, b in enumerate(named) if b.name == name), len(named))
        if number == len(named):
            named.extend(new)
        return number

    def whole(name: str) -> int:
        """The block of a layer that is never dropped."""
        layer = name.rpartition(".")[0] or name
        return numbered(layer, Block(layer, (), keep=True))

    for name, shape in shapes.items():
        axes = network.axes.get(name, {})
        axis = _owner_axis(axes, network.reads.get(name), how)
        if axis is not None:
            block = axis_blocks(axes[axis], cuts, first_block)
            owners[name] = Owner(axis, np.where(block < 0, whole(name), block) if (block < 0).any() else block)
        elif name in network.outputs and shape:
            # The output layer is kept whole, but weighed finely: much of personalisation is here.
            key = f"{name.rpartition('.')[0] or name} outputs"
            number = min(shape[0], output_blocks)
            start = numbered(f"{key}/0", *(Block(f"{key}/{i}", (), keep=True) for i in range(number)))
            owners[name] = Owner(0, start + np.arange(shape[0]) * number // shape[0])
        else:
            owners[name] = Owner(0 if shape else None, np.full(shape[:1] or (1,), whole(name)))
    pieces: list[list[Piece]] = [[] for _ in named]
    for name, owner in owners.items():
        for number, start, stop in _runs(owner.block):
            pieces[number].append(Piece(name, start, stop, owner.axis))
    filled = tuple(Block(b.name, tuple(p), b.keep) for b, p in zip(named, pieces, strict=True))
    return Split(filled, owners, network, cuts, first_block)


def _owner_axis(axes: Mapping[int, Segments], reads: int | None, how: str) -> int | None:
    """Units own the weights that write them. Heads, neurons and channels also own those that read them."""
    cuttable = [axis for axis, segments in axes.items() if not is_dense(segments)]
    written = [axis for axis in cuttable if axis != reads]
    if written:
        return written[0]
    return cuttable[0] if cuttable and how != "unit" else None


def axis_blocks(segments: Segments, cuts: Mapping[int, Cut], first_block: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Block of each position along an axis; -1 where it belongs to no space."""
    pieces = []
    for segment in segments:
        if segment.space is None:
            pieces.append(np.full(segment.length, -1, np.int64))
        else:
            pieces.append(np.repeat(first_block[segment.space] + cuts[segment.space].block_of(), segment.inner))
    return np.concatenate(pieces)


def _runs(block: npt.NDArray[np.int64]) -> Iterable[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(block)]
    for start, stop in pairwise(edges):
        yield int(block[start]), start, stop


def _owners(blocks: Sequence[Block], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Owner]:
    """Check a splitter's blocks and turn them into one table per parameter."""
    if not blocks:
        raise ValueError("the splitter returned no blocks; return a list of pfedgate.Block")
    tables: dict[str, npt.NDArray[np.int64]] = {}
    axes: dict[str, int | None] = {}
    for number, block in enumerate(blocks):
        for piece in block.pieces:
            if piece.parameter not in shapes:
                raise ValueError(f"block {block.name!r}: " + unknown("parameter", piece.parameter, tuple(shapes)))
            shape = shapes[piece.parameter]
            if axes.setdefault(piece.parameter, piece.axis) != piece.axis:
                raise ValueError(f"{piece.parameter} is split along two different axes; use one axis per parameter")
            if piece.axis is not None and not 0 <= piece.axis < len(shape):
                raise ValueError(f"block {block.name!r}: {piece.parameter} has no axis {piece.axis}")
            size = int(np.prod(shape, dtype=np.int64)) if piece.axis is None else shape[piece.axis]
            table = tables.setdefault(piece.parameter, np.full(size, -1, np.int64))
            if not 0 <= piece.start < piece.stop <= size:
                raise ValueError(
                    f"block {block.name!r}: {piece.start}:{piece.stop} is not inside {piece.parameter} (0:{size})"
                )
            if (table[piece.start : piece.stop] >= 0).any():
                other = blocks[int(table[piece.start : piece.stop].max())].name
                raise ValueError(
                    f"the splitter repeats part of {piece.parameter}: it is in {other!r} and in {block.name!r}; "
                    "every entry must be in exactly one block"
                )
            table[piece.start : piece.stop] = number
    for name in shapes:
        if name not in tables or (tables[name] < 0).any():
            missing = "all" if name not in tables else f"{int((tables[name] < 0).sum())} positions"
            raise ValueError(
                f"the splitter misses {missing} of {name}; every entry must be in exactly one block "
                "(put what should never be dropped into a block with keep=True)"
            )
    return {name: Owner(axes[name], tables[name]) for name in shapes}
