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

from dataclasses import dataclass
from enum import Enum


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
    """

    ops: tuple[Op, ...]
    value_bytes: tuple[int, ...]
    required: frozenset[int]


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
        saved: The values saved from forward to backward.
        recomputed: The recomputed ops, in topological order.
        time_ms: Total time of the recomputed ops, in milliseconds.
        saved_bytes: Total size of the saved values. The limit bounds it.
    """

    saved: frozenset[int]
    recomputed: tuple[int, ...]
    time_ms: float
    saved_bytes: int
