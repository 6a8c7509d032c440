"""Small things that packages share: arrays, the collector, what a terminal shows, files."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file beside `path` and renames it: whatever stops it, a file that is there stays.

    A pipe or a device is written to directly.
    """
    target = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """What is worth keeping between processes: `ROCKMATE_CACHE`, else the user's cache folder.

    None if that is "off", or the user has no home.
    """
    given = os.environ.get("ROCKMATE_CACHE")
    if given:
        return None if given == "off" else Path(given)
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if folder.startswith("~") else Path(folder) / "rockmate"
