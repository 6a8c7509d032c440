"""Random numbers of Python and of NumPy, which no second run of a forward draws again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class ForeignRandom:
    """Whether a model draws such numbers.

    To compare states takes a tenth of a millisecond. So it is done once for each call of the model,
    and for each second run only where the model has been seen to draw.

    Attributes:
        is_drawn: whether numbers have been drawn in any call of the model.
    """

    def __init__(self) -> None:
        self.is_drawn = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a call of the model."""
        before = None if self.is_drawn else _state()
        try:
            yield
        finally:
            self.is_drawn = self.is_drawn or before != _state()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Around runs beside those of the script: numbers that they draw are drawn again.

        Each second run within is refused if it draws.
        """
        before, was_drawn = _state(), self.is_drawn
        self.is_drawn = True
        try:
            yield
        finally:
            drawn = before != _state()
            self.is_drawn = was_drawn or drawn
            if drawn:
                _put(before)

    @contextmanager
    def refused(self, error: Callable[[], Exception]) -> Iterator[None]:
        """Around a second run.

        Args:
            error: is raised if it draws.
        """
        before = _state() if self.is_drawn else None
        yield
        if self.is_drawn and before != _state():
            raise error()


def _put(state: tuple[Any, ...]) -> None:
    of_python, *of_numpy = state
    random.setstate(of_python)
    name, keys, *others = of_numpy
    state_of_numpy: Any = (name, np.frombuffer(keys, np.uint32), *others)
    np.random.set_state(state_of_numpy)


def _state() -> tuple[object, ...]:
    of_numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), *(
        each.tobytes() if isinstance(each, np.ndarray) else each for each in of_numpy
    )
