"""A look at each node as the tracer makes it, while what made it still stands on Python's stack."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx.proxy import TracerBase

_LOCK = (
    threading.RLock()
)  # the tracer's class is shared by all threads; one capture looks for several things


@contextlib.contextmanager
def each_node(note: Callable[[fx.Node], None]) -> Iterator[None]:
    """Calls `note` with each node that is traced meanwhile."""
    with _LOCK:
        create_node = TracerBase.create_node

        def create_noted(self: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(self, *args, **kwargs)
            note(node)
            return node

        TracerBase.create_node = create_noted
        try:
            yield
        finally:
            TracerBase.create_node = create_node
