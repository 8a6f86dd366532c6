"""Keep freed memory for the next batch instead of giving it back to the system after each one.

A batch of a convolutional network frees and asks for the same hundred megabytes again and again. By default glibc
returns large blocks at once and the kernel clears every page anew: a sixth of a training step. Peak memory is the same.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of <malloc.h>
LARGEST_BLOCK = 32 * 1024 * 1024  # blocks up to here come from the heap; glibc accepts no more
KEPT = 512 * 1024 * 1024  # so much free memory may stay at the heap's end


@lru_cache(maxsize=1)
def steady() -> bool:
    """Ask the C library to keep freed memory; once per process. False where that is not possible or not wanted.

    Whoever has set glibc's own variables (MALLOC_…, GLIBC_TUNABLES) knows better: then nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP, LARGEST_BLOCK)) and bool(mallopt(_TRIM, KEPT))
