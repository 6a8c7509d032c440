"""The check at import, for a version of PyTorch that this package was not tested with."""

from __future__ import annotations

import hashlib
import logging
import platform
from importlib import metadata
from pathlib import Path

import torch

from rockmate._torch.version import known_range
from rockmate._util import cache_folder
from rockmate.capture.behaviour import check_behaviour
from rockmate.checks.cases import tiny_case
from rockmate.checks.run import check_case
from rockmate.errors import UntestedVersionError

logger = logging.getLogger(__name__)


def check_once() -> None:
    """Tries each interface, and one tiny step eager and planned, once for these versions.

    A file in the user's cache folder notes that it has passed. It takes one to two seconds.

    Raises:
        UntestedVersionError: something differs; the text names it.
    """
    passed = _note()
    if passed is not None and passed.exists():
        return
    check_behaviour()
    row = check_case(tiny_case(), torch.device("cpu"))
    if row.failures:
        raise UntestedVersionError("torch", f"a tiny planned step failed: {row.failures[0]}")
    logger.warning(
        "PyTorch %s is outside of the versions tested (%s); the self-check passed. `rockmate "
        "check` tries more.",
        torch.__version__,
        known_range(),
    )
    try:
        if passed is not None:
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    except OSError:
        logger.info("the self-check cannot be noted in %s, so each process repeats it", passed)


def _note() -> Path | None:
    """The file that says that the check has passed for these versions on this machine."""
    versions = (
        torch.__version__,
        torch.version.git_version,
        metadata.version("rockmate-planner"),
        platform.python_version(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
    )
    folder = cache_folder()
    return folder and folder / hashlib.sha256(" ".join(versions).encode()).hexdigest()[:16]
