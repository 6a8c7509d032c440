"""TODO: progress."""

from __future__ import annotations

import sys


def is_terminal() -> bool:
    """Whether standard error is a terminal: elsewhere, a bar that clears itself stays in front of the next line, which may be an error."""
    return sys.stderr.isatty()
