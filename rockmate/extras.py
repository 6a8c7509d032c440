"""Packages that only some commands need, and that an extra of the distribution brings."""

from __future__ import annotations

import importlib
from typing import Any

from rockmate.errors import RockmateError


class MissingExtraError(RockmateError, ImportError):
    """An optional package is not installed; the text says what to install."""


def require(name: str, *, extra: str, purpose: str) -> Any:
    """The optional module `name`.

    Args:
        name: as it is imported.
        extra: of this distribution, that brings it.
        purpose: what needs it, to begin the error's text with.

    Raises:
        MissingExtraError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = (
            f"{purpose} needs {name} ({error}). Install the extra, in a checkout: "
            f"pip install '.[{extra}]'"
        )
        raise MissingExtraError(msg) from error
