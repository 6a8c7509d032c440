"""Packages that only some commands need, and that an extra of the distribution brings."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
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
        raise MissingExtraError(f"{purpose} needs {name} ({error}). {_advice(extra)}") from error


def require_all(extras: Mapping[str, str], purpose: str) -> None:
    """Looks for several packages at once; none is imported.

    Args:
        extras: of each package the extra that brings it.
        purpose: as for `require`.

    Raises:
        MissingExtraError: some are not installed.
    """
    missing = {name: extra for name, extra in extras.items() if not importlib.util.find_spec(name)}
    if missing:
        extra = ",".join(sorted(set(missing.values())))
        raise MissingExtraError(f"{purpose} needs {' and '.join(missing)}. {_advice(extra)}")


def _advice(extra: str) -> str:
    return f"Install what is missing, in the checkout of rockmate: pip install '.[{extra}]'"
