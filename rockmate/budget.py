"""What a user may pass as a budget, as bytes."""

from __future__ import annotations

import math
import numbers
import re
import reprlib
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from rockmate.errors import InvalidBudgetError, check_choice

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_SLOWDOWN = re.compile(r"([0-9]+(?:\.[0-9]*)?)x")
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_FORMS = (
    'Write bytes as an int, a size as "6GiB" or "800MB", or a fraction of the peak without '
    'recomputation as a float in (0, 1]; for plans also "knee" or "1.05x".'
)

Budget = int | float | str
# What happens if no schedule fits a budget: an error, or a plan with the smallest peak found.
OnInfeasible = Literal["error", "least"]


def check_on_infeasible(value: str) -> None:
    """Raises `InvalidArgumentError` unless the value is an `OnInfeasible`."""
    check_choice("on_infeasible", value, ("error", "least"))


def size_text(num_bytes: int) -> str:
    """A size in the largest unit of 1024 that leaves at least one digit before the point."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes} bytes"


def is_share(budget: Budget | None) -> bool:
    """Whether a budget is a fraction of a peak, and not a number of bytes."""
    return isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral)


def slowdown_of(budget: object) -> float | None:
    """What a budget chosen from the curve allows: 1.05 of "1.05x", 0 of "knee"; None of others.

    Raises:
        InvalidBudgetError: the slowdown is below 1, the time without recomputation.
    """
    match = _SLOWDOWN.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        return 0.0 if budget == "knee" else None
    if float(match[1]) < 1:
        msg = f"{budget} is less than the time without recomputation. Give 1 or more."
        raise InvalidBudgetError(msg)
    return float(match[1])


def parse_budget(budget: Budget, baseline_peak_bytes: int) -> int:
    """A budget in bytes, rounded down.

    Args:
        budget: bytes (int), a size with a unit (str: B, kB, MB, GB, TB are powers of 1000; KiB,
            MiB, GiB, TiB of 1024), or a fraction in (0, 1] (float; text such as "0.5" is refused,
            which would be half a byte).
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


def parse_memory(memory: int | str, what: str) -> int:
    """The memory of a device in bytes, of which nothing is a share.

    Raises:
        InvalidBudgetError: it is neither bytes above 0 nor a size; the text says `what` it is.
    """
    if isinstance(memory, float):
        msg = (
            f'{what} {memory} is a float. Write bytes as an int, or a size as "24GiB": there is '
            "nothing to take a share of."
        )
        raise InvalidBudgetError(msg)
    try:
        return parse_budget(memory, 0)
    except InvalidBudgetError as error:
        msg = f"{what} {reprlib.repr(memory)} cannot be read. Write bytes above 0, or a size as "
        raise InvalidBudgetError(f"{msg}24GiB or 800MB.") from error


def _parse_size(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        msg = f"budget {text!r} cannot be read. {_FORMS}"
        raise InvalidBudgetError(msg)
    number = Fraction(match[1])
    if not match[2] and "." in match[1] and 0 < number <= 1:
        msg = (
            f"budget {text!r} is text, which is a number of bytes. A fraction is a float: write "
            f"{float(number)}, without quotes. {_FORMS}"
        )
        raise InvalidBudgetError(msg)
    size = math.floor(number * unit)
    if size <= 0:
        msg = f"budget {text!r} is not above 0 bytes. {_FORMS}"
        raise InvalidBudgetError(msg)
    return size


_LIST_FORMS = (
    'Write first:last:count, as in "0.2:1.0:9" or "1GiB:4GiB:7", or a list, as in "2GiB,4GiB" or '
    '"0.25,0.5,800MB".'
)
_MAX_COUNT = 1000
# A peak for checking fractions before the true peak is known.
_ANY_PEAK = 1 << 62


def parse_budgets(text: str | Iterable[Budget]) -> list[Budget]:
    """The budgets that a range or a list stands for, in the order in which they are written.

    Args:
        text: "first:last:count", both ends included, or budgets with commas between them; fractions
            in (0, 1], sizes or bytes; or a list, which is taken as it is.

    Raises:
        InvalidBudgetError: it is neither; the text names the part at fault.
    """
    if not isinstance(text, str):
        if isinstance(text, Iterable):
            return list(text)
        raise InvalidBudgetError(f"budgets {text!r} are no list; for one, write [{text!r}].")
    budgets = _span(text) if ":" in text else [_one(part) for part in text.split(",")]
    check_budgets(budgets)
    return budgets


def check_budgets(budgets: Iterable[Budget]) -> None:
    """Raises `InvalidBudgetError` unless there is a budget and each can be read."""
    found = [parse_budget(budget, _ANY_PEAK) for budget in budgets]
    if not found:
        msg = f"there is no budget. {_LIST_FORMS}"
        raise InvalidBudgetError(msg)


def budgets_in_bytes(budgets: Iterable[Budget], baseline_peak_bytes: int) -> list[int]:
    """The budgets in bytes, ascending, each once."""
    return sorted({parse_budget(budget, baseline_peak_bytes) for budget in budgets})


def _span(text: str) -> list[Budget]:
    parts = text.split(":")
    if len(parts) != 3:
        msg = f"budgets {text!r} have {len(parts)} parts between colons. {_LIST_FORMS}"
        raise InvalidBudgetError(msg)
    first, last = _one(parts[0]), _one(parts[1])
    count = int(parts[2]) if parts[2].strip().isdigit() else 0
    if not 2 <= count <= _MAX_COUNT:
        msg = (
            f"budgets {text!r} ask for {parts[2]!r} budgets; the count is a whole number from 2 to "
            f"{_MAX_COUNT}. {_LIST_FORMS}"
        )
        raise InvalidBudgetError(msg)
    if isinstance(first, float) and isinstance(last, float):
        return [round(first + (last - first) * step / (count - 1), 9) for step in range(count)]
    if isinstance(first, float) or isinstance(last, float):
        msg = f"budgets {text!r} go from a fraction to a size or back. {_LIST_FORMS}"
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
    return int(stripped) if stripped.isdecimal() and number > 1 else number
