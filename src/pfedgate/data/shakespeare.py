"""Shakespeare by role, for the next character: a client is a role, as in LEAF (Caldas et al. 2018).

The text is "tiny Shakespeare" (Karpathy 2015, in the public domain): speeches between empty lines, each under a line
with the role and a colon. It is read from a local file of that form or fetched once from its source.
"""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.data import cache
from pfedgate.data.federation import Federation
from pfedgate.data.own import from_arrays

SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_ROLE = re.compile(r"(?:\A|\n\n)([A-Z][^\n:]{0,40}):\n")


def shakespeare(
    path: str | Path | None = None,
    *,
    length: int = 80,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> Federation:
    """A federation of roles; a sample is `length` characters of a role's speeches, its labels are the next ones.

    path      a text file; else shakespeare/input.txt in `data_dir` or PFEDGATE_DATA; else fetched into the cache
    length    characters of a sample; LEAF's 80

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "play.txt"
    >>> _ = file.write_text("\\n\\n".join(f"{role}:\\n{'To be or not. ' * 9}" for role in ("Ann", "Bob")))
    >>> shakespeare(file, length=10)
    Federation('shakespeare', 2 clients, 24 samples of shape (10,), language of 13)
    """
    text = _file(path, data_dir, cache_dir).read_text(encoding="utf-8")
    pieces = _ROLE.split(text)
    if length < 1 or len(pieces) < 3:
        raise ValueError(
            f"no roles found: speeches stand under a line such as 'ROMEO:', and length={length} is above 0"
        )
    speeches: dict[str, list[str]] = {}
    for role, speech in zip(pieces[1::2], pieces[2::2], strict=True):
        speeches.setdefault(role, []).append(speech.strip())
    letters = sorted(set(text))
    codes = {letter: code for code, letter in enumerate(letters)}
    rows, owners = [], []
    for role, parts in speeches.items():
        tokens = np.array([codes[letter] for letter in "\n".join(parts)], dtype=np.int64)
        starts = range(0, len(tokens) - length, length)
        rows += [tokens[start : start + length + 1] for start in starts]
        owners += [role] * len(starts)
    if not rows:
        raise ValueError(f"no role says more than {length} characters: choose a smaller length")
    windows = np.stack(rows)
    return from_arrays(
        windows[:, :-1], windows[:, 1:], owners=owners, task="language",
        **{"name": "shakespeare", "classes": len(letters), **options},
    )  # fmt: skip


def _file(path: str | Path | None, data_dir: str | Path | None, cache_dir: str | Path | None) -> Path:
    """The text: the file named, a local copy, or one fetched from the source."""
    if path is not None:
        if not (given := Path(path).expanduser()).is_file():
            raise FileNotFoundError(f"no text file {given}")
        return given
    if root := data_dir or os.environ.get("PFEDGATE_DATA"):
        local = Path(root).expanduser() / "shakespeare" / "input.txt"
        if local.is_file():
            return local

    def fetch(place: Path) -> None:
        try:
            with urllib.request.urlopen(SOURCE, timeout=60) as answer:
                (place / "input.txt").write_bytes(answer.read())
        except OSError as error:
            raise ConnectionError(
                f"cannot fetch Shakespeare from {SOURCE}: {error}. Save that file as shakespeare/input.txt in a folder "
                "and name the folder with data_dir or PFEDGATE_DATA, or give path."
            ) from error

    return cache.entry("shakespeare", cache.key(SOURCE), fetch, cache_dir) / "input.txt"
