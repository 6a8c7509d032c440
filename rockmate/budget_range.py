"""Several budgets at once, as a person writes them: "0.2:1.0:9", "2GiB,4GiB", "0.25, 0.5, 800MB".

In text a number up to 1 is a fraction (nobody asks for one byte), a larger whole number is bytes, and everything else a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rockmate.budget import Budget, parse_budget
from rockmate.errors import InvalidBudgetError

_FORMS = 'Write first:last:count, as in "0.2:1.0:9" or "1GiB:4GiB:7", or a list, as in "2GiB,4GiB" or "0.25,0.5,800MB".'
_MAX_COUNT = 1000
_ANY_PEAK = 1 << 62  # what fractions are checked against before the peak is known


def parse_budgets(text: str) -> list[Budget]:
    """The budgets that a range or a list stands for, in the order in which they are written.

    Args:
        text: "first:last:count", both ends included, or budgets with commas between them; fractions in (0, 1], sizes or bytes.

    Raises:
        InvalidBudgetError: it is neither; the text names the part at fault.
    """
    budgets = _span(text) if ":" in text else [_one(part) for part in text.split(",")]
    check_budgets(budgets)
    return budgets


def check_budgets(budgets: Iterable[Budget]) -> None:
    """Raises `InvalidBudgetError` unless there is a budget and each can be read."""
    found = [parse_budget(budget, _ANY_PEAK) for budget in budgets]
    if not found:
        msg = f"there is no budget. {_FORMS}"
        raise InvalidBudgetError(msg)


def budgets_in_bytes(budgets: Iterable[Budget], baseline_peak_bytes: int) -> list[int]:
    """The budgets in bytes, ascending, each once."""
    return sorted({parse_budget(budget, baseline_peak_bytes) for budget in budgets})


def _span(text: str) -> list[Budget]:
    parts = text.split(":")
    if len(parts) != 3:
        msg = f"budgets {text!r} have {len(parts)} parts between colons. {_FORMS}"
        raise InvalidBudgetError(msg)
    first, last = _one(parts[0]), _one(parts[1])
    count = int(parts[2]) if parts[2].strip().isdigit() else 0
    if not 2 <= count <= _MAX_COUNT:
        msg = f"budgets {text!r} ask for {parts[2]!r} budgets; the count is a whole number from 2 to {_MAX_COUNT}. {_FORMS}"
        raise InvalidBudgetError(msg)
    if isinstance(first, float) and isinstance(last, float):
        return [round(first + (last - first) * step / (count - 1), 9) for step in range(count)]
    if isinstance(first, float) or isinstance(last, float):
        msg = f"budgets {text!r} go from a fraction to a size or back. {_FORMS}"
        raise InvalidBudgetError(msg)
    low, high = parse_budget(first, _ANY_PEAK), parse_budget(last, _ANY_PEAK)
    return [low + (high - low) * step // (count - 1) for step in range(count)]


def _one(text: str) -> Budget:
    """A budget as a person writes it, not yet checked."""
    stripped = text.strip()
    try:
        number = float(stripped)
    except ValueError:
        return stripped
    if math.isfinite(number) and number > 1 and number == int(number):
        return int(number)
    return number
