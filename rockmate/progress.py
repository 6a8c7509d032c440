"""Whether progress bars can be shown."""

from __future__ import annotations

import sys


def is_terminal() -> bool:
    """Whether standard error is a terminal, where a progress bar clears itself.

    Elsewhere its last state stays in front of the next line, which may be an error.
    """
    return sys.stderr.isatty()
