"""One program for all sizes of a step.

The code of a program that was emitted from a generic capture looks its numbers up by name. Other
sizes need other numbers and no other code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from rockmate.capture.size_template import SizedNumbers
from rockmate.graph.ir import Op, Storage
from rockmate.runtime.program import Argument, BackwardVariant, Program


def specialize(program: Program, numbers: SizedNumbers) -> Program:
    """The program at the sizes of one call, with the same code."""
    return replace(
        program,
        forward=_bound(program.forward, numbers.by_name),
        backward=_bound(program.backward, numbers.by_name),
        backward_without=partial(_sized_variant, program, numbers),
        layouts={role: numbers.layouts[role] for role in program.layouts},
    )


def _sized_variant(
    program: Program, numbers: SizedNumbers, undefined: frozenset[int]
) -> BackwardVariant:
    variant = program.backward_without(undefined)
    further = {size.name: numbers.values.of(size.expression) for size in variant.sizes}
    return replace(variant, run=_bound(variant.run, {**numbers.by_name, **further}))


def _bound(function: Any, numbers: Mapping[str, int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A method of a generated module, with numbers for the names that its code looks up."""
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
    """The first difference between a program at one call's sizes and one emitted for those sizes.

    Returns:
        A description, empty if the programs are equal.
    """
    for half in ("forward_code", "backward_code"):
        code = getattr(program, half)
        by_name = lambda name: str(numbers.by_name[name[0]])  # noqa: E731
        mine = re.sub(r"\bsize_\d+\b", by_name, code).splitlines()
        theirs = getattr(concrete, half).splitlines()
        if mine != theirs:
            different = (pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1])
            lengths = f"{len(mine)} lines", f"{len(theirs)} lines"
            line, other = next(different, lengths)
            return f"{line.strip()!r} instead of {other.strip()!r} in the {half.partition('_')[0]}"
    for part in ("forward_arguments", "backward_arguments", "saved"):
        if list(map(_place, getattr(program, part))) != list(map(_place, getattr(concrete, part))):
            return f"other {part}"
    same = all(
        getattr(program, part) == getattr(concrete, part)
        for part in ("results", "gradients", "accumulated", "differentiable")
    )
    return "" if same else "other results"


def _place(argument: Argument) -> Any:
    """An argument in terms that two graphs of the same step share."""
    source = argument.source
    return argument.kind, source.index if isinstance(source, Storage | Op) else source
