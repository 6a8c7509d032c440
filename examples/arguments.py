"""The command line that the examples share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rockmate.errors import RockmateError


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments: model, budget, batch size, length, steps."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--model",
        help="name on the hub or folder of a Hugging Face model; without it a small one is built",
    )
    result.add_argument(
        "--budget",
        type=budget,
        default=0.6,
        help="activation budget: 0.6, 6GiB, or bytes (default: %(default)s)",
    )
    result.add_argument("--batch-size", type=int, default=4)
    result.add_argument("--length", type=int, default=64, help="tokens in a row")
    result.add_argument("--steps", type=int, default=8)
    return result


def budget(text: str) -> int | float | str:
    """A fraction, a number of bytes, or a size with a unit."""
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def run(main: Callable[[], None]) -> None:
    """Runs an example; an error that its user can act on prints its text and exits with 2."""
    try:
        main()
    except RockmateError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
