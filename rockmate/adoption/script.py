"""Runs a script, or a module, as Python does from its command line; waits for what it imports."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_OWN = str(Path(__file__).parents[1])
_START = getattr(sys.modules["__main__"], "__file__", None)  # the command's, in a `bin` folder


def run_script(given: list[str]) -> None:
    """Runs the file that is named first as `__main__`; its errors and `SystemExit` are raised."""
    path = Path(given[0]).absolute()
    with io.open_code(str(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module, loader = ModuleType("__main__"), SourceFileLoader("__main__", str(path))
    vars(module).update(__file__=str(path), __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    _begin(given, path.resolve().parent)
    exec(code, vars(module))


def run_module(given: list[str]) -> None:
    """Runs `python -m name` in this process; see `run_script`."""
    _begin(given, Path.cwd())
    runpy.run_module(given[0], run_name="__main__", alter_sys=True)


def _begin(given: list[str], folder: Path) -> None:
    sys.argv = given
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def hide_own_frames() -> None:
    """Has the traceback that ends the process show the script's frames alone."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> Any:
        waiting: list[BaseException | None] = [error]
        for each in waiting:
            if each is not None:
                each.__traceback__ = _without_own(each.__traceback__)
                linked = (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
                waiting += [other for other in linked if other not in waiting]
        return show(kind, error, error.__traceback__)

    sys.excepthook = hook


def _without_own(entry: TracebackType | None) -> TracebackType | None:
    """A traceback without frames of this package, and without those of `runpy`."""
    while entry is not None and _is_own(entry):
        entry = entry.tb_next
    if entry is not None:
        entry.tb_next = _without_own(entry.tb_next)
    return entry


def _is_own(entry: TracebackType) -> bool:
    name = entry.tb_frame.f_code.co_filename
    return name.startswith(_OWN) or name in (_START, "<frozen runpy>")


def after_import(name: str, then: Callable[[Any], None]) -> None:
    """Calls `then` with a module, now or when it is imported."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec that the other finders have, whose module is followed by the function."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        sys.meta_path.insert(0, self)  # who asks may only want to know whether there is one
        execute = spec and spec.loader.exec_module

        def run(module: Any) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self._then(module)

        if spec:
            spec.loader.exec_module = run
        return spec
