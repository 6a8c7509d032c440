"""Refuses a PyTorch whose private interfaces are not known to be those of this package."""

from __future__ import annotations

import torch

_OLDEST, _NEWEST = (2, 11), (2, 15)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raises `ImportError` that names the admitted range if `version` is outside it."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _OLDEST <= (major, minor) <= _NEWEST:
        oldest, newest = ".".join(map(str, _OLDEST)), ".".join(map(str, _NEWEST))
        msg = (
            f"rockmate supports torch {oldest} to {newest} and found {version}. Model capture uses "
            "interfaces of PyTorch that change between releases. Install a torch in that range."
        )
        raise ImportError(msg)
