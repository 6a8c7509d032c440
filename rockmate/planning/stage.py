"""A stage of planning, and how long it takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rockmate.collector import gc_paused

logger = logging.getLogger(__name__)


@contextmanager
def timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the seconds of a stage to `timings`; garbage collection is paused."""
    begin = time.perf_counter()
    try:
        with gc_paused():
            yield
    finally:
        seconds = time.perf_counter() - begin
        timings[stage] = timings.get(stage, 0.0) + seconds
        logger.debug("%s took %.2f s", stage, seconds)
