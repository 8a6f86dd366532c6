"""Where the units of a layer sit inside a tensor, and which layers must be cut together.

A *space* is a set of units (filters, neurons, heads) that live or die together everywhere they appear: a
convolution's filters, the batch norm that follows, and, across a residual sum, the filters of the other branch.
A *layout* says along which axis of a tensor the units of which spaces lie, so that a tensor that holds only the
live units can be read without guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Segments = tuple["Segment", ...]


@dataclass(frozen=True)
class Segment:
    """A run of `units * inner` positions along an axis; `inner` consecutive positions belong to one unit.

    `space` is None where every position is always present.

    >>> Segment(space=0, units=64, inner=25).length      # 64 channels flattened from 5 x 5 maps
    1600
    """

    space: int | None
    units: int
    inner: int = 1

    @property
    def length(self) -> int:
        return self.units * self.inner


def dense(length: int) -> Segments:
    """An axis on which nothing is ever left out."""
    return (Segment(None, length),)


def is_dense(segments: Segments) -> bool:
    """Whether no position along the axis can be missing."""
    return all(segment.space is None for segment in segments)


def length(segments: Segments) -> int:
    """Number of positions along an axis."""
    return sum(segment.length for segment in segments)


@dataclass(frozen=True)
class Layout:
    """The units of a tensor lie along `axis` (non-negative), in the order of `segments`; dropped ones are `fill`.

    A `fill` of NaN stands for numbers that nobody knows, and that something else will multiply with zero.
    """

    axis: int
    segments: Segments
    fill: float = 0.0

    @property
    def length(self) -> int:
        return length(self.segments)

    def moved(self, axis: int) -> Layout:
        return replace(self, axis=axis)

    def merged(self, trailing: int) -> Layout:
        """The layout after flattening `trailing` positions per unit into the axis."""
        return replace(self, segments=tuple(Segment(p.space, p.units, p.inner * trailing) for p in self.segments))


def layout_of(axis: int, segments: Segments) -> Layout | None:
    """A layout, or None when nothing along the axis can be missing."""
    return None if is_dense(segments) else Layout(axis, segments)


@dataclass
class Space:
    """One set of units while a network is analysed."""

    units: int
    producers: list[tuple[str, str]] = field(default_factory=list)  # (kind, place) of each layer that writes it
    consumers: set[str] = field(default_factory=set)  # kinds of layers that read it
    output: bool = False  # the network returns it


class Spaces:
    """Union-find over spaces: a residual sum ties two of them for good."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._space: list[Space] = []

    def new(self, units: int, kind: str, place: str) -> int:
        self._parent.append(len(self._parent))
        self._space.append(Space(units, [(kind, place)]))
        return len(self._parent) - 1

    def find(self, space: int) -> int:
        while self._parent[space] != space:
            self._parent[space] = self._parent[self._parent[space]]
            space = self._parent[space]
        return space

    def __getitem__(self, space: int) -> Space:
        return self._space[self.find(space)]

    @property
    def count(self) -> int:
        return len(self._parent)

    def roots(self) -> list[int]:
        return [i for i in range(len(self._parent)) if self.find(i) == i]

    def union(self, a: int, b: int) -> None:
        a, b = sorted((self.find(a), self.find(b)))
        if a == b:
            return
        self._parent[b] = a
        root, branch = self._space[a], self._space[b]
        root.producers.extend(branch.producers)
        root.consumers |= branch.consumers
        root.output |= branch.output

    def tie(self, a: Segments, b: Segments) -> bool:
        """Make two axes the same units; False when their structure differs (then nothing is changed)."""
        if len(a) != len(b):
            return False
        for p, q in zip(a, b, strict=True):
            if (p.units, p.inner) != (q.units, q.inner) or (p.space is None) != (q.space is None):
                return False
        for p, q in zip(a, b, strict=True):
            if p.space is not None and q.space is not None:
                self.union(p.space, q.space)
        return True

    def resolve(self, segments: Segments) -> Segments:
        return tuple(p if p.space is None else Segment(self.find(p.space), p.units, p.inner) for p in segments)

    def mark(self, segments: Segments, *, consumer: str | None = None, output: bool = False) -> None:
        for segment in segments:
            if segment.space is not None:
                space = self[segment.space]
                space.output |= output
                if consumer is not None:
                    space.consumers.add(consumer)
