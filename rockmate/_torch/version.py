"""Refuses a PyTorch whose private tracing interface is not known to be the one that `capture` uses."""

from __future__ import annotations

import torch

_OLDEST, _NEWEST = (2, 11), (2, 13)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raises `ImportError`, naming the range, if `version` is outside it."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _OLDEST <= (major, minor) <= _NEWEST:
        msg = (
            f"rockmate supports torch {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]} and found {version}: the interface that "
            "it captures models with changes between releases. Install a torch in that range."
        )
        raise ImportError(msg)
