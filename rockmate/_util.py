"""Small things that packages share: arrays, results, attributes, collector, terminal, files."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def once_for_each(function: Callable[[_Key], _Result]) -> Callable[[_Key], _Result]:
    """The function, which computes its result once for each argument while that lives."""
    known: WeakKeyDictionary[_Key, _Result] = WeakKeyDictionary()

    @wraps(function)
    def found(key: _Key) -> _Result:
        if key not in known:
            known[key] = function(key)
        return known[key]

    return found


_ROOT = str(Path(__file__).parent)


STAGE_DELAY_S = 2.0
_stages: ContextVar[tqdm[Any] | None] = ContextVar("stages", default=None)


@contextmanager
def stages_shown(*, is_shown: bool = True) -> Iterator[None]:
    """Shows on a terminal which stage runs within, once it takes longer than two seconds.

    The first `progress_bar` within takes its place.
    """
    if not is_shown or not is_terminal():
        yield
        return
    with tqdm(bar_format="{desc} [{elapsed}]", delay=STAGE_DELAY_S, leave=False) as bar:
        ended, token = threading.Event(), _stages.set(bar)
        clock = threading.Thread(target=_run_clock, args=(bar, ended), daemon=True)
        clock.start()
        try:
            yield
        finally:
            ended.set()
            clock.join()
            _stages.reset(token)
    sys.stderr.write("\r\x1b[K")  # a bar around, as of a trainer: what is logged next stands alone


def _run_clock(bar: tqdm[Any], ended: threading.Event) -> None:
    while not ended.wait(1.0):
        if bar.format_dict["elapsed"] > STAGE_DELAY_S:
            bar.refresh()


def progress_bar(*given: Any, disable: bool | None = False, **options: Any) -> tqdm[Any]:
    """A bar of tqdm, which ends the bar of stages around."""
    if not disable:
        end_stages()
    return tqdm(*given, disable=disable, **options)


def end_stages() -> None:
    """Closes the bar around, before anything else is shown."""
    if (bar := _stages.get()) is not None:
        bar.close()


def begin_stage(name: str) -> None:
    """Tells the bar around, if there is one, what begins."""
    bar = _stages.get()
    if bar is not None:
        bar.set_description(name, refresh=bar.format_dict["elapsed"] > STAGE_DELAY_S)


@contextmanager
def attributes_set(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes within, each an owner, a name and a value, and then puts them back.

    What was inherited, or absent, is so again. A class is set past what its metaclass does.
    """

    def put(owner: Any, *what: Any) -> None:
        (type.__setattr__ if isinstance(owner, type) else setattr)(owner, *what)

    before = [
        (owner, name, vars(owner).get(name, getattr(owner, name, None)), name in vars(owner))
        for owner, name, _ in places
    ]
    try:
        for owner, name, value in places:
            put(owner, name, value)
        yield
    finally:
        for owner, name, value, is_own in reversed(before):
            if is_own or name not in vars(owner):
                put(owner, name, value)
            else:
                (type.__delattr__ if isinstance(owner, type) else delattr)(owner, name)


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
    except OSError as error:  # names the file that was asked for
        raise type(error)(error.errno, error.strerror, str(path)) from None
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


def file_of(value: Any) -> str:
    """The file of a module, or of a class; one of this package where there is none."""
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    return str(getattr(value, "__file__", None) or _ROOT)


@cache
def is_users(file: str) -> bool:
    """Whether code is neither of an installed package, nor of Python's library, nor of this one."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):  # of another prefix
        return False
    is_of = any(map(Path(file).is_relative_to, (*places, _ROOT)))
    return not (is_of or file.startswith("<frozen"))
