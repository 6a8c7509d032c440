"""A program for every size of a step: its code looks numbers up by name, so other sizes take other numbers and no new code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

from rockmate.capture.size_template import SizedNumbers
from rockmate.graph.ir import Op, Storage
from rockmate.runtime.emit import Argument, Program


def specialize(program: Program, numbers: SizedNumbers) -> Program:
    """A program that was emitted from a generic capture, at the sizes of one call; its code is shared, names of sizes included."""
    return replace(
        program,
        forward=_bound(program.forward, numbers.by_name),
        backward=_bound(program.backward, numbers.by_name),
        layouts={role: numbers.layouts[role] for role in program.layouts},
    )


def _bound(function: Any, numbers: Mapping[str, int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A method of a generated module with numbers for names that its code takes for globals."""
    code: FunctionType = function.__func__
    rebound = FunctionType(
        code.__code__,
        {**code.__globals__, **numbers},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    return MethodType(rebound, function.__self__)


def difference(program: Program, numbers: SizedNumbers, concrete: Program) -> str:
    """How a program differs, at one call's sizes, from one that was emitted for those sizes, in words; empty if in nothing."""
    for half in ("forward_code", "backward_code"):
        mine, theirs = (
            _with_numbers(getattr(program, half), numbers.by_name).splitlines(),
            getattr(concrete, half).splitlines(),
        )
        if mine != theirs:
            pairs = zip(mine, theirs, strict=False)
            line, other = next(
                (pair for pair in pairs if pair[0] != pair[1]),
                (f"{len(mine)} lines", f"{len(theirs)} lines"),
            )
            return f"{line.strip()!r} instead of {other.strip()!r} in the {half.partition('_')[0]}"
    for part in ("forward_arguments", "backward_arguments", "kept"):
        if list(map(_place, getattr(program, part))) != list(map(_place, getattr(concrete, part))):
            return f"other {part}"
    same = all(
        getattr(program, part) == getattr(concrete, part)
        for part in ("results", "gradients", "delivered", "differentiable")
    )
    return "" if same else "other results"


def _with_numbers(code: str, numbers: Mapping[str, int]) -> str:
    return re.sub(r"\bsize_\d+\b", lambda name: str(numbers[name[0]]), code)


def _place(argument: Argument) -> Any:
    """An argument in terms that two graphs of the same step share."""
    return argument.kind, argument.what.index if isinstance(
        argument.what, Storage | Op
    ) else argument.what
