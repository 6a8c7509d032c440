"""What a user may pass as a budget, as bytes."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

from rockmate.errors import InvalidBudgetError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_FORMS = 'Write bytes as an int, a size as "6GiB" or "800MB", or a fraction of the peak without recomputation as a float in (0, 1].'

Budget = int | float | str


def size_text(num_bytes: int) -> str:
    """A size in the largest unit of 1024 that leaves at least one digit before the point."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes} bytes"


def is_share(budget: Budget | None) -> bool:
    """Whether a budget is a fraction of a peak, and not a number of bytes."""
    return isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral)


def parse_budget(budget: Budget, baseline_peak_bytes: int) -> int:
    """A budget in bytes, rounded down.

    Args:
        budget: bytes (int), a size with a unit (str: B, kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024), or a
            fraction in (0, 1] (float; text such as "0.5" is refused, which would be half a byte).
        baseline_peak_bytes: what a fraction is a fraction of.

    Raises:
        InvalidBudgetError: the value is none of these; the text names it.
    """
    if isinstance(budget, str):
        return _parse_size(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        msg = f"budget {budget!r} is a {type(budget).__name__}. {_FORMS}"
        raise InvalidBudgetError(msg)
    if isinstance(budget, numbers.Integral):
        if budget <= 0:
            msg = f"budget {budget} is not above 0 bytes. {_FORMS}"
            raise InvalidBudgetError(msg)
        return int(budget)
    fraction = float(budget)
    if math.isnan(fraction) or not 0.0 < fraction <= 1.0:
        msg = f"budget {budget} as a float is a fraction and must lie in (0, 1]. {_FORMS}"
        raise InvalidBudgetError(msg)
    return math.floor(fraction * baseline_peak_bytes)


def _parse_size(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        msg = f"budget {text!r} cannot be read. {_FORMS}"
        raise InvalidBudgetError(msg)
    number = Fraction(match[1])
    if not match[2] and "." in match[1] and 0 < number <= 1:
        msg = f"budget {text!r} is text, which is a number of bytes. A fraction is a float: write {float(number)}, without quotes. {_FORMS}"
        raise InvalidBudgetError(msg)
    size = math.floor(number * unit)
    if size <= 0:
        msg = f"budget {text!r} is not above 0 bytes. {_FORMS}"
        raise InvalidBudgetError(msg)
    return size
