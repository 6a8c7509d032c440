"""The command `rockmate`, and `python -m rockmate`. Ctrl-C ends it quietly, also while it loads."""

import signal
import sys


def run() -> int:
    """Loads the command line, runs it, and gives its exit code."""
    # Until PyTorch is loaded, whose import loses one. A shell may ignore them.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rockmate.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
