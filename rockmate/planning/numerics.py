"""What plans may do to the numbers: add them in another order, or keep every bit.

Two things change the order of a sum. Chunks do, and gradients of one parameter from several uses,
each of which is added to `.grad` as it comes, so that it does not wait for the others. "bitwise"
leaves out chunks, and adds such gradients to each other first, as eager does.
"""

from __future__ import annotations

from typing import Literal

Numerics = Literal["any_order", "bitwise"]


def check_numerics(numerics: str, *, kernels: str = "eager") -> None:
    """Raises `ValueError` for a value that `Planner` does not take, alone or with these kernels."""
    if numerics not in ("any_order", "bitwise"):
        msg = f"numerics is {numerics!r}; choose 'any_order' or 'bitwise'"
        raise ValueError(msg)
    if numerics == "bitwise" and kernels == "auto":
        msg = (
            "numerics='bitwise' keeps the same bits at every budget, and kernels='auto' chooses "
            "kernels that round otherwise by the budget. Give kernels 'eager' or 'fused'."
        )
        raise ValueError(msg)
