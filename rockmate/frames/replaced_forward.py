"""Forwards of modules, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_BEFORE = "forward_before_frames"


def forwards_of(module: nn.Module) -> list[Any]:
    """The forwards of a module and of all within, as they are when none is replaced."""
    return [_original(each.forward) for each in module.modules()]


def _original(forward: Callable[..., Any]) -> Callable[..., Any]:
    while (before := getattr(forward, _BEFORE, None)) is not None:
        forward = before
    return forward


class ReplacedForwards:
    """Attributes of instances that stand in the way of their `forward`."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Replaces the forward of one."""
        table = vars(module)
        vars(forward)[_BEFORE] = module.forward
        self._before.append((table, table.get("forward")))
        table["forward"] = forward

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Has all as before within."""
        present = [(table, table["forward"]) for table, _ in self._before]
        self.put_back()
        try:
            yield
        finally:
            for table, forward in present:
                table["forward"] = forward

    def put_back(self) -> None:
        """Puts all back, the last one first."""
        for table, forward in reversed(self._before):
            if forward is None:
                del table["forward"]
            else:
                table["forward"] = forward
