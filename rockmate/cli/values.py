"""Values of the command line's arguments."""

from __future__ import annotations

import argparse


def names(text: str) -> tuple[str, ...]:
    """Names between commas, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def fraction(text: str) -> float:
    """A number above 0, up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def positive(text: str) -> int:
    """A whole number from 1."""
    return at_least(text, 1)


def at_least_two(text: str) -> int:
    """A whole number from 2."""
    return at_least(text, 2)  # a language model predicts the second token from the first


def at_least(text: str, smallest: int) -> int:
    """A whole number from `smallest`."""
    value = int(text)
    if value < smallest:
        raise argparse.ArgumentTypeError(f"{text} is below {smallest}")
    return value
