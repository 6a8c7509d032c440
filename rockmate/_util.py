"""Small things that packages share: types of arrays, a paused collector, what a terminal shows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses Python's automatic garbage collection.

    Each collection walks every object, and planning makes many small ones.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_terminal() -> bool:
    """Whether standard error is a terminal, where a progress bar clears itself.

    Elsewhere its last state stays in front of the next line, which may be an error.
    """
    return sys.stderr.isatty()
