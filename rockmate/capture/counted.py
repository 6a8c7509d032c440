"""Numbers that know whether anything depends on them, for counters in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Origin:
    """What all numbers counted from one have in common."""

    def __init__(self, value: int | float) -> None:
        self.value = value
        self.is_used = False


class _Counted:
    """A number that may be added to and shown; any other use of it in Python is noted.

    A tensor op takes its value without a note. It then stands in the graph, where it is seen.
    """

    origin: _Origin

    def __add__(self, other: Any) -> Any:
        return self._sum(other, 1)

    def __radd__(self, other: Any) -> Any:
        return self._sum(other, 1)

    def __sub__(self, other: Any) -> Any:
        return self._sum(other, -1)

    def _sum(self, other: Any, sign: int) -> Any:
        if type(other) not in (int, float):
            self.origin.is_used = True
            return NotImplemented
        return _counted(_plain(self) + sign * other, self.origin)


class _CountedInt(_Counted, int):
    """A counter that is an integer."""


class _CountedFloat(_Counted, float):
    """A counter with a fraction."""


_USES = (
    "abs bool ceil divmod eq float floor floordiv ge gt hash index int invert le lshift lt mod mul "
    "ne neg or and xor pos pow rand rdivmod rfloordiv rlshift rmod rmul ror round rpow rrshift "
    "rshift rsub rtruediv rxor truediv trunc"
)


def _noting(cls: type, name: str) -> Callable[..., Any]:
    base = getattr(cls, name)

    def use(self: _Counted, *others: Any) -> Any:
        self.origin.is_used = True
        return base(self, *others)

    return use


for _cls, _base in ((_CountedInt, int), (_CountedFloat, float)):
    for _name in (f"__{use}__" for use in _USES.split()):
        if hasattr(_base, _name):
            setattr(_cls, _name, _noting(_base, _name))


def _plain(number: Any) -> int | float:
    return int.__int__(number) if isinstance(number, int) else float.__float__(number)


def _counted(value: int | float, origin: _Origin) -> int | float:
    result = _CountedInt(value) if isinstance(value, int) else _CountedFloat(value)
    result.origin = origin
    return result


def counted(value: Any) -> Any:
    """A number that stands for a plain one; any other value as it is."""
    return _counted(value, _Origin(value)) if type(value) in (int, float) else value


def number_added(value: Any) -> int | float | None:
    """What was added to the number that a counter began with.

    None if the counter was used for anything else, or `value` is no counter.
    """
    if not isinstance(value, _Counted) or value.origin.is_used:
        return None
    return _plain(value) - value.origin.value
