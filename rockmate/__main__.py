"""The command `rockmate`, and `python -m rockmate`. Ctrl-C ends it quietly, also while it loads."""

import signal
import sys


def run() -> int:
    """Loads the command line, runs it, and gives its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore them
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # until PyTorch is loaded: its import loses one
    from rockmate.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
