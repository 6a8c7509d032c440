"""Times for tests: processor seconds, so that other work on the machine counts for little, and the
least of a few runs.

Limits in tests are a few times what a quiet machine takes: they catch a change of order, `bench/`
states the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def least_seconds(*calls: Callable[[], object]) -> float:
    """The least processor time among `calls`, which should do the same work."""
    seconds = []
    for call in calls:
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)
