"""Autocast, off while captured ops run: its casts are in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """Runs ops as they were captured; the user's autocast would cast what the graph leaves as it is. Costs nothing where it is off."""
    enabled = [device_type for device_type in ("cpu", "cuda") if torch.is_autocast_enabled(device_type)]
    return _switched_off(enabled) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _switched_off(device_types: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
