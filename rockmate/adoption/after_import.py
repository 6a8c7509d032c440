"""Runs a function once a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any


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
