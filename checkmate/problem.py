"""The precedence-constrained knapsack of rematerialization, as numbers, and its solution.

A directed acyclic graph of forward *ops*, each making one or more *values* (storages). The backward
reads the `required` values. A value is **available** to the backward when it is

* *given*: no op makes it, as a block's input, a parameter or a carried value; it costs nothing; or
* *saved* at the end of the forward, which costs its bytes; or
* made by a *recomputed* op, which costs the op's time and needs all of the op's inputs to be
  available.

The problem: make every required value available at the least recompute time, with the saved bytes
within a limit. Among plans of equal time, the one with the fewest saved bytes is the answer.

It is the case T = 1 of Checkmate's staged program, without its order and liveness variables (Jain
et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020). It
is also the small form of Rockmate's problem for a block (Zhao et al., "Rockmate: an Efficient,
Fast, Automatic and Generic Tool for Re-materialization in PyTorch", ICML 2023). The combinatorial
problem is the *precedence-constrained knapsack*. It is NP-hard, since without edges it is the
knapsack problem.

Not done here: the order of the recomputation, and the peak while it runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from numbers import Integral, Real


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One forward op.

    Attributes:
        time_ms: Time of one run, in milliseconds, at least 0.
        inputs: Indices of the values it reads; given values may be listed or left out.
        outputs: Indices of the values it makes.
        recomputable: False if a second run is impossible: a mutation, a collective, a lost random
            state.
    """

    time_ms: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """A save-or-recompute problem; see the module's docstring.

    Attributes:
        ops: The forward ops in topological order.
        value_bytes: Size of each value in bytes; a value that no op makes is given, and its size is
            never counted.
        required: The values that the backward reads.
        forced: Values that every plan saves; their bytes are not counted.

    Raises:
        ValueError: An index, size or time is out of range, a value has two makers, or the order is
            not topological.
    """

    ops: tuple[Op, ...]
    value_bytes: tuple[int, ...]
    required: frozenset[int]
    forced: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check every index, size, time and the order."""
        check_ops(self.ops, self.value_bytes)
        check_values(self.required, len(self.value_bytes), "required")
        check_values(self.forced, len(self.value_bytes), "forced")


def check_ops(ops: Sequence[Op], value_bytes: Sequence[int]) -> None:
    """Check sizes, times, indices and the order of ops.

    Raises:
        ValueError: One is out of range, a value has two makers, or the order is not topological.
    """
    for value, size in enumerate(value_bytes):
        if not isinstance(size, int) or size < 0:
            raise ValueError(
                f"value {value} has {size!r} bytes; a whole number (int) of at least 0 is needed"
            )
    maker: dict[int, int] = {}
    for index, op in enumerate(ops):
        # `float` for speed: a virtual subclass takes a look-up.
        is_number = isinstance(op.time_ms, float | Real)
        if not (is_number and isfinite(op.time_ms) and op.time_ms >= 0):
            raise ValueError(
                f"op {index} takes {op.time_ms!r} ms; a finite time (float) of at least 0 is needed"
            )
        check_values(op.inputs, len(value_bytes), f"op {index} inputs")
        check_values(op.outputs, len(value_bytes), f"op {index} outputs")
        for value in op.outputs:
            if value in maker:
                raise ValueError(
                    f"value {value} is made by op {maker[value]} and by op {index}; one may make it"
                )
            maker[value] = index
    for index, op in enumerate(ops):
        for value in op.inputs:
            if maker.get(value, -1) >= index:
                raise ValueError(
                    f"op {index} reads value {value}, which op {maker[value]} makes; ops must be "
                    f"in topological order (maker below {index})"
                )


def check_values(values: Iterable[int], num_values: int, role: str) -> None:
    """Check that values exist.

    Raises:
        ValueError: One does not. The text begins with its role.
    """
    for value in values:
        if not 0 <= value < num_values:
            raise ValueError(f"{role}: value {value} is outside 0..{num_values - 1}")


def check_limit(name: str, num_bytes: int) -> None:
    """Check that a limit on bytes is a whole number; a negative limit is valid and infeasible.

    Raises:
        ValueError: It is not a whole number. The text begins with its name.
    """
    if not isinstance(num_bytes, Integral) or isinstance(num_bytes, bool):
        raise ValueError(f"{name} is {num_bytes!r}; a whole number (int) of bytes is needed")


def check_time_limit(time_limit_s: float) -> None:
    """Check that a time limit is a positive number.

    Raises:
        ValueError: It is not.
    """
    if not (isinstance(time_limit_s, Real) and time_limit_s > 0):
        raise ValueError(f"time_limit_s is {time_limit_s!r}; it must be above 0")


class Status(Enum):
    """How much a solver has proven of its answer."""

    OPTIMAL = "optimal"
    """Proven: no answer within the limit is faster."""
    FEASIBLE = "feasible"
    """An answer within the limit; the solver stopped at its time limit before a proof."""
    INFEASIBLE = "infeasible"
    """Proven: none is within the limit."""
    NOT_FOUND = "not found"
    """The solver stopped at its time limit without an answer; there may be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan: the values to save, the ops to recompute, and the cost.

    Attributes:
        saved: The values saved from forward to backward, the forced ones included.
        recomputed: The recomputed ops, in topological order.
        time_ms: Total time of the recomputed ops, in milliseconds.
        saved_bytes: Total size of the saved values that are not forced. The limit bounds it.
    """

    saved: frozenset[int]
    recomputed: tuple[int, ...]
    time_ms: float
    saved_bytes: int
