"""Who holds which sample. Every function takes labels (or owners) and a seed and returns a `Partition`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pfedgate.core.seeds import numpy_generator

Ints = np.ndarray[Any, np.dtype[np.int64]]
RETRIES = 10


@dataclass(frozen=True)
class Partition:
    """Rows of client `ids[i]` are `rows[offsets[i]:offsets[i + 1]]`; `about` says how it was made."""

    ids: np.ndarray[Any, Any]
    rows: Ints
    offsets: Ints
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, client: int) -> Ints:
        """Rows of one client, by position."""
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def sizes(self) -> Ints:
        """How many samples each client has."""
        return np.diff(self.offsets)

    def over(self, rows: Ints) -> Partition:
        """Made for a subset of a pool: translate positions in the subset to rows of the pool."""
        return Partition(self.ids, rows[self.rows], self.offsets, self.about)


def numbered(clients: int) -> np.ndarray[Any, Any]:
    """Ids for clients that have no name, zero-padded so that they sort as they count.

    >>> numbered(11)[-2:].tolist()
    ['09', '10']
    """
    width = len(str(clients - 1))
    return np.char.zfill(np.arange(clients).astype(f"S{width}"), width).astype(np.str_)


def _pack(groups: list[Ints], about: Mapping[str, Any]) -> Partition:
    offsets = np.cumsum([0, *(len(group) for group in groups)]).astype(np.int64)
    return Partition(numbered(len(groups)), np.concatenate(groups).astype(np.int64), offsets, about)


def _check(samples: int, clients: int, least: int) -> None:
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    if samples < clients * max(least, 1):
        raise ValueError(
            f"{samples} samples cannot give {clients} clients at least {max(least, 1)} each: use at most "
            f"{samples // max(least, 1)} clients or min_samples of at most {samples // clients}"
        )


def iid(labels: Ints, clients: int, *, seed: int = 0, min_samples: int = 0) -> Partition:
    """Shuffle and deal: sizes differ by at most one.

    >>> iid(np.zeros(10, dtype=np.int64), 3).sizes().tolist()
    [4, 3, 3]
    """
    _check(len(labels), clients, min_samples)
    order = numpy_generator(seed, "partition", "iid").permutation(len(labels))
    return _pack(list(np.array_split(order, clients)), {"partition": "iid"})


def class_groups(classes: int, clusters: int, rng: np.random.Generator) -> list[Ints]:
    """Shuffled classes cut into `clusters` groups, the smaller groups first (FedEM)."""
    if not 1 <= clusters <= classes:
        raise ValueError(f"clusters must be between 1 and {classes} (the number of classes), got {clusters}")
    small, larger = classes // clusters, classes % clusters
    sizes = [small] * (clusters - larger) + [small + 1] * larger
    return np.split(rng.permutation(classes), np.cumsum(sizes)[:-1])


def dirichlet(
    labels: Ints,
    clients: int,
    *,
    alpha: float = 0.4,
    clusters: int | None = None,
    min_samples: int = 10,
    seed: int = 0,
) -> Partition:
    """Label Dirichlet by FedEM's procedure (Marfoq et al. 2021).

    For every label group the shares of the *clients* are drawn from Dirichlet(alpha) and the counts from a
    multinomial, so both labels and sizes differ between clients. `clusters` (their `n_components`) merges
    classes into that many groups; the default is one group per class.

    FedEM has no floor. Here the partition is drawn again while a client has fewer than `min_samples`, at
    most ten times; then the best draw is repaired by moving random samples from the largest clients, so it
    ends at any number of clients and any alpha. `about["draws"]` and `about["repaired"]` say what happened.

    >>> part = dirichlet(np.repeat(np.arange(10), 100), 20, alpha=0.1)
    >>> int(part.sizes().min()) >= 10, int(part.sizes().sum())
    (True, 1000)
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    _check(len(labels), clients, min_samples)
    classes = int(labels.max()) + 1
    best, lack, draws = np.empty(0, dtype=np.int64), len(labels) + 1, 0
    while lack and draws < RETRIES:
        draws += 1
        rng = numpy_generator(seed, "partition", "dirichlet", draws)
        owner = _draw(labels, clients, alpha, class_groups(classes, clusters or classes, rng), rng)
        missing = int(np.maximum(0, min_samples - np.bincount(owner, minlength=clients)).sum())
        if missing < lack:
            best, lack = owner, missing
    order = np.argsort(best, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(best, minlength=clients))[:-1])
    repaired, moved = _lift(groups, min_samples, numpy_generator(seed, "partition", "repair"))
    ids = numbered(clients)
    about = {
        "partition": "dirichlet",
        "alpha": alpha,
        "clusters": clusters or classes,
        "min_samples": min_samples,
        "draws": draws,
        "repaired": [str(ids[client]) for client in repaired],
        "moved": moved,
    }
    return _pack(groups, about)


def _draw(labels: Ints, clients: int, alpha: float, groups: list[Ints], rng: np.random.Generator) -> Ints:
    """The client of every sample."""
    group_of = np.empty(int(labels.max()) + 1, dtype=np.int64)
    for number, members in enumerate(groups):
        group_of[members] = number
    mine = group_of[labels]
    owner = np.empty(len(labels), dtype=np.int64)
    for number in range(len(groups)):
        rows = rng.permutation(np.flatnonzero(mine == number))
        shares = rng.dirichlet(np.full(clients, alpha))
        counts = rng.multinomial(len(rows), shares / shares.sum())
        owner[rows] = np.repeat(np.arange(clients), counts)
    return owner


def _lift(groups: list[Ints], least: int, rng: np.random.Generator) -> tuple[list[int], int]:
    """Move samples from the largest groups until none has fewer than `least`; in place."""
    largest = [(-len(group), client) for client, group in enumerate(groups) if len(group) > least]
    heapq.heapify(largest)
    repaired, moved = [], 0
    for client, group in enumerate(groups):
        need = least - len(group)
        if need <= 0:
            continue
        repaired.append(client)
        gained = [group]
        while need:
            # There is always a donor: the caller checked that the samples suffice for everyone's floor.
            size, donor = heapq.heappop(largest)
            give = min(need, -size - least)
            mixed = rng.permutation(groups[donor])
            gained.append(mixed[:give])
            groups[donor] = mixed[give:]
            need, moved = need - give, moved + give
            if len(groups[donor]) > least:
                heapq.heappush(largest, (-len(groups[donor]), donor))
        groups[client] = np.concatenate(gained)
    return repaired, moved


def pathological(labels: Ints, clients: int, *, shards: int = 2, seed: int = 0, min_samples: int = 0) -> Partition:
    """Sort by label, cut into clients × shards pieces, deal `shards` to each (McMahan et al. 2017).

    >>> part = pathological(np.repeat(np.arange(4), 10), 4, shards=1)
    >>> [len(set((part.of(i) // 10).tolist())) for i in range(4)]
    [1, 1, 1, 1]
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    _check(len(labels), clients, max(min_samples, shards))
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * shards)
    order = numpy_generator(seed, "partition", "pathological").permutation(len(pieces))
    groups = [
        np.concatenate([pieces[piece] for piece in order[client * shards : (client + 1) * shards]])
        for client in range(clients)
    ]
    least = min(len(group) for group in groups)
    if least < min_samples:
        raise ValueError(f"{shards} shards of {len(labels)} samples give a client {least}, fewer than {min_samples}")
    return _pack(groups, {"partition": "pathological", "shards": shards})


def pachinko(
    labels: Ints,
    coarse: Ints,
    clients: int,
    *,
    alpha: float = 0.4,
    beta: float = 10.0,
    seed: int = 0,
    min_samples: int = 0,
) -> Partition:
    """Pachinko allocation (Reddi et al. 2021): ⌊N/clients⌋ samples each, coarse label first, then fine.

    Per client the weights of coarse labels are Dirichlet(alpha), those of the fine labels within each
    Dirichlet(beta); samples are drawn without replacement and an exhausted label leaves the draw.

    >>> fine = np.repeat(np.arange(6), 20)
    >>> pachinko(fine, fine // 2, 5).sizes().tolist()
    [24, 24, 24, 24, 24]
    """
    if not (alpha > 0 and beta > 0):
        raise ValueError(f"alpha and beta must be positive, got {alpha} and {beta}")
    _check(len(labels), clients, min_samples)
    rng = numpy_generator(seed, "partition", "pachinko")
    fine_ids, parent = np.unique(np.stack([labels, coarse]), axis=1)
    if len(np.unique(fine_ids)) != len(fine_ids):
        raise ValueError("a fine label has two coarse labels: Pachinko needs a tree")
    stock = [rng.permutation(np.flatnonzero(labels == fine)).tolist() for fine in fine_ids]
    left = np.array([len(rows) for rows in stock])
    families = [np.flatnonzero(parent == top) for top in np.unique(coarse)]
    groups = []
    for _ in range(clients):
        over = rng.dirichlet(np.full(len(families), alpha))
        within = [rng.dirichlet(np.full(len(family), beta)) for family in families]
        mine = []
        for _ in range(len(labels) // clients):
            alive = np.array([left[family].any() for family in families])
            family = _pick(over, alive, rng)
            members = families[family]
            fine = members[_pick(within[family], left[members] > 0, rng)]
            left[fine] -= 1
            mine.append(stock[fine].pop())
        groups.append(np.array(mine, dtype=np.int64))
    return _pack(groups, {"partition": "pachinko", "alpha": alpha, "beta": beta})


def _pick(weights: np.ndarray[Any, Any], alive: np.ndarray[Any, Any], rng: np.random.Generator) -> int:
    shares = np.where(alive, weights, 0.0).cumsum()
    # A tiny alpha can leave every remaining label with weight zero: then all of them are equally likely.
    if shares[-1] <= 0:
        shares = alive.astype(float).cumsum()
    return int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))


def by_owner(
    owners: np.ndarray[Any, Any], *, keep: int | float | None = None, min_samples: int = 3, seed: int = 0
) -> Partition:
    """One client per owner, named after it, sorted by name.

    Owners with fewer than `min_samples` samples are left out (three is the least that can be split in
    train, validation and test). `keep` chooses some of the rest at random: a number, or a share below 1.

    >>> part = by_owner(np.array(["bo", "al", "bo", "al", "al", "bo", "cy"]))
    >>> part.ids.tolist(), part.sizes().tolist(), part.about["dropped"]
    (['al', 'bo'], [3, 3], 1)
    """
    names, codes, counts = np.unique(np.asarray(owners), return_inverse=True, return_counts=True)
    names = names.astype(np.str_)
    if (names == "").any():
        raise ValueError(f"{counts[names == ''][0]} samples have an empty owner: name it or leave them out")
    order = np.argsort(names, kind="stable")  # numbers sort differently as text
    large = order[counts[order] >= min_samples]
    if not len(large):
        raise ValueError(f"none of {len(names)} owners has {min_samples} samples (the most: {counts.max()})")
    if keep is not None:
        wanted = int(len(large) * keep + 1e-9) if isinstance(keep, float) and keep <= 1 else int(keep)
        if not 1 <= wanted <= len(large):
            raise ValueError(f"cannot keep {keep} of {len(large)} owners with {min_samples} samples or more")
        large = large[np.sort(numpy_generator(seed, "partition", "owners").permutation(len(large))[:wanted])]
    position = np.full(len(names), -1, dtype=np.int64)
    position[large] = np.arange(len(large))
    client = position[codes.reshape(-1)]
    rows = np.argsort(client, kind="stable")[np.count_nonzero(client < 0) :]
    offsets = np.concatenate([[0], np.cumsum(counts[large])]).astype(np.int64)
    dropped = int((counts < min_samples).sum())
    about = {"partition": "owner", "owners": len(names), "min_samples": min_samples, "dropped": dropped}
    return Partition(names[large], rows.astype(np.int64), offsets, about)
