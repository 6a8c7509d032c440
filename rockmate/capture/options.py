"""The options of a captured step that are checked before anything is captured."""

from __future__ import annotations


def num_in_flight_of(given: int | str) -> int:
    """The number of forwards before their backwards, which `options` has as a text.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        msg = f"in_flight is {given!r}; give the number of forwards before a backward, at least 1"
        raise ValueError(msg)
    return number


# The values of an option, the default first.
_CHOICES = {
    "differentiable": ("loss", "all"),
    "outputs": ("all", "loss"),
    "gradients": ("accumulated", "returned"),
    "kernels": ("eager", "fused"),
    "memory_format": ("as_given", "channels_last"),
}


def check_choices(**options: str) -> None:
    """Raises `ValueError` for an option that has none of its values."""
    for name, value in options.items():
        if value not in _CHOICES[name]:
            msg = f"{name} is {value!r}; choose one of {', '.join(map(repr, _CHOICES[name]))}"
            raise ValueError(msg)
