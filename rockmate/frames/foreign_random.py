"""Random numbers of Python and of NumPy, which no second run of a forward draws again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rockmate.state.random_state import ForeignState


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
        before = None if self.is_drawn else ForeignState.now()
        try:
            yield
        finally:
            self.is_drawn = self.is_drawn or before != ForeignState.now()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Around runs beside those of the script: numbers that they draw are drawn again.

        Each second run within is refused if it draws.
        """
        before, was_drawn = ForeignState.now(), self.is_drawn
        self.is_drawn = True
        try:
            yield
        finally:
            drawn = before != ForeignState.now()
            self.is_drawn = was_drawn or drawn
            if drawn:
                before.restore()

    @contextmanager
    def refused(self, error: Callable[[], Exception]) -> Iterator[None]:
        """Around a second run.

        Args:
            error: is raised if it draws.
        """
        before = ForeignState.now() if self.is_drawn else None
        yield
        if self.is_drawn and before != ForeignState.now():
            raise error()
