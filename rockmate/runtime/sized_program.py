"""One program for all sizes of a step.

The code of a program that was emitted from a generic capture looks its numbers up by name. Other
sizes need other numbers and no other code.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

from rockmate.capture.size_template import SizedNumbers
from rockmate.graph.ir import Op, Storage
from rockmate.runtime.program import Argument, EmittedFunction, PlannedLayouts, Program


def specialize(program: Program, numbers: SizedNumbers) -> Program:
    """The program at the sizes of one call, with the same code."""
    return replace(
        program,
        forward=_sized(program.forward, numbers),
        backward=_sized(program.backward, numbers),
        backward_without=lambda undefined: _sized(program.backward_without(undefined), numbers),
        layouts=PlannedLayouts({role: numbers.layouts[role] for role in program.layouts.roles}),
    )


def _sized(function: EmittedFunction, numbers: SizedNumbers) -> EmittedFunction:
    """A method of a generated module, with numbers for the names that its code looks up."""
    method: Any = function.run
    code: FunctionType = method.__func__
    rebound = FunctionType(
        code.__code__,
        {**code.__globals__, **_sizes(function, numbers)},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    return replace(function, run=MethodType(rebound, method.__self__))


def _sizes(function: EmittedFunction, numbers: SizedNumbers) -> dict[str, int]:
    return {name: numbers.values.of(size.expression) for name, size in function.sizes.items()}


def difference(program: Program, numbers: SizedNumbers, concrete: Program) -> str:
    """The first difference between a program at one call's sizes and one emitted for those sizes.

    Returns:
        A description, empty if the programs are equal.
    """
    for half in ("forward", "backward"):
        mine, theirs = (getattr(each, half) for each in (program, concrete))
        sizes = {name: str(size) for name, size in _sizes(mine, numbers).items()}
        text = re.sub(r"\bsize_\d+\b", lambda name, known=sizes: known[name[0]], mine.code)
        lines, other_lines = text.splitlines(), theirs.code.splitlines()
        if lines != other_lines:
            different = (
                each for each in zip(lines, other_lines, strict=False) if each[0] != each[1]
            )
            lengths = f"{len(lines)} lines", f"{len(other_lines)} lines"
            line, other = next(different, lengths)
            return f"{line.strip()!r} instead of {other.strip()!r} in the {half}"
        if list(map(_place, mine.arguments)) != list(map(_place, theirs.arguments)):
            return f"other arguments of the {half}"
    if list(map(_place, program.saved)) != list(map(_place, concrete.saved)):
        return "other saved values"
    return "" if _results(program) == _results(concrete) else "other results"


def _results(program: Program) -> tuple[Any, ...]:
    results, gradients = program.results, program.gradients
    return results.roles, results.differentiable, gradients.roles, gradients.accumulated


def _place(argument: Argument) -> Any:
    """An argument in terms that two graphs of the same step share."""
    source = argument.source
    return argument.kind, source.index if isinstance(source, Storage | Op) else source
