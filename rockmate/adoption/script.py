"""Runs a script, or a module of a package, as Python does when it is named on its command line."""

from __future__ import annotations

import io
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rockmate.errors import RockmateError

_OWN = str(Path(__file__).parents[1])


def run_script(path: str, arguments: list[str]) -> None:
    """Runs the file as `__main__`; its errors and `SystemExit` are raised.

    Raises:
        OSError: the file cannot be read.
    """
    name = str(Path(path).absolute())
    with io.open_code(name) as file:
        source = file.read()
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", name)
    vars(module).update(__file__=name, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"], sys.argv = module, [path, *arguments]
    _set_first_path(str(Path(name).resolve().parent))
    try:
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    except BaseException:
        _hide_own_frames()
        raise


def run_module(name: str, arguments: list[str]) -> None:
    """Runs `python -m name` in this process; see `run_script`."""
    sys.argv = [name, *arguments]
    _set_first_path(str(Path.cwd()))
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except BaseException:
        _hide_own_frames()
        raise


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _hide_own_frames() -> None:
    """Has the traceback that ends the process show the script's frames alone."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> Any:
        seen, waiting = set[int](), [error]
        while waiting:
            each = waiting.pop()
            if id(each) not in seen:
                seen.add(id(each))
                each.__traceback__ = _without_own(each)
                linked = (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
                waiting += [other for other in linked if other is not None]
        return show(kind, error, error.__traceback__)

    sys.excepthook = hook


def _without_own(error: BaseException) -> TracebackType | None:
    """The traceback without frames of this package, but those that raised its own errors."""
    frames = list[TracebackType]()
    entry = error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    last = max((at for at, each in enumerate(frames) if not _is_own(each)), default=-1)
    is_own = isinstance(error, RockmateError)
    kept = [each for at, each in enumerate(frames) if not _is_own(each) or (is_own and at > last)]
    for each, following in zip(kept, [*kept[1:], None], strict=True):
        each.tb_next = following
    return kept[0] if kept else None


def _is_own(entry: TracebackType) -> bool:
    name = entry.tb_frame.f_code.co_filename
    return name.startswith(_OWN) or name == "<frozen runpy>"
