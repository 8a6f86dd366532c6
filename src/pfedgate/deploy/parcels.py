"""What a message carries: some plain values as JSON, and byte strings, each one array of uint8. No pickle, ever.

A State or an update is one byte string (`wire`), however many tensors or blocks it has: an array for each of them
would take several times the bytes and the time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ABOUT, BODIES, TEXT = "about", "bodies", "json"


class ParcelError(ValueError):
    """A message that is not one of ours."""


@dataclass(frozen=True)
class Parcel:
    """Plain values, and byte strings that they refer to by position."""

    about: dict[str, Any]
    bodies: Sequence[bytes] = field(default_factory=tuple)

    def body(self, at: Any) -> bytes:
        """The byte string at a position that came from outside."""
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self.bodies):
            raise ParcelError(f"there is no body {at!r} among {len(self.bodies)}")
        return self.bodies[at]


def to_records(parcel: Parcel) -> Any:
    """A parcel as Flower's RecordDict."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {str(at): Array(np.frombuffer(body, dtype=np.uint8)) for at, body in enumerate(parcel.bodies)}
    about = ConfigRecord({TEXT: json.dumps(parcel.about)})
    return RecordDict({ABOUT: about, BODIES: ArrayRecord(arrays)} if arrays else {ABOUT: about})


def from_records(records: Any) -> Parcel:
    """The parcel in a RecordDict, checked: anything else is a ParcelError that says what is wrong."""
    try:
        about = json.loads(records[ABOUT][TEXT])
        if not isinstance(about, dict):
            raise ParcelError(f"{ABOUT} is {type(about).__name__}, not a table")
        arrays = records.get(BODIES, {})
        bodies = []
        for at in range(len(arrays)):
            array = arrays[str(at)].numpy()
            if array.dtype != np.uint8 or array.ndim != 1:
                raise ParcelError(f"body {at} is {array.dtype} {array.shape}, not bytes")
            bodies.append(array.tobytes())
    except ParcelError:
        raise
    except Exception as error:  # whatever a sender may have put there, in whatever way it fails to be read
        raise ParcelError(f"not a pfedgate message: {type(error).__name__}: {error}") from error
    return Parcel(about, bodies)
