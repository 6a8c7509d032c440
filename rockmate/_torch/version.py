"""The version of this package; those of PyTorch that it was tested with, or by behaviour."""

from __future__ import annotations

import os
import sys
from importlib import metadata

PACKAGE_VERSION = "0.1.0"
_OLDEST, _NEWEST = (2, 11), (2, 15)
SKIP_CHECK = "ROCKMATE_SKIP_CHECK"


def known_range() -> str:
    """The range in words."""
    return f"{_text(_OLDEST)} to {_text(_NEWEST)}"


def installed_version() -> str:
    """The version of PyTorch, which need not be imported for it."""
    torch = sys.modules.get("torch")
    return metadata.version("torch") if torch is None else torch.__version__


def is_tested(version: str | None = None) -> bool:
    """Whether a version is a release within the tested range; nightly builds are none."""
    version = version or installed_version()
    is_release = not any(word in version for word in ("dev", "a0", "rc"))
    return is_release and _OLDEST <= _release(version) <= _NEWEST


def is_check_skipped() -> bool:
    """Whether the user has asked to go on without checks of behaviour."""
    return os.environ.get(SKIP_CHECK, "") not in ("", "0")


def refuse_older(version: str | None = None) -> None:
    """Raises `ImportError` for a version that lacks what this package calls."""
    version = version or installed_version()
    if _release(version) < _OLDEST:
        msg = (
            f"rockmate needs torch {_text(_OLDEST)} or later and found {version}. Install a newer "
            f"one: pip install 'torch>={_text(_OLDEST)}'."
        )
        raise ImportError(msg)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
