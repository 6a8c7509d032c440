"""Checkmate: the values to save and the values to recompute, as a knapsack or in stages.

Numbers in, plan out. This package knows ops (a time, inputs, outputs) and values (bytes), never
tensors.

>>> from checkmate import Curve, Knapsack, Op
>>> linear = Op(time_ms=10.0, inputs=(0,), outputs=(1,))  # value 0 is given: no op makes it
>>> gelu = Op(time_ms=1.0, inputs=(1,), outputs=(2,))
>>> dropout = Op(time_ms=1.5, inputs=(2,), outputs=(3, 4))  # the output and its mask
>>> block = Knapsack(
...     ops=(linear, gelu, dropout), value_bytes=(4, 8, 8, 8, 2), required=frozenset({1, 2, 4})
... )
>>> curve = Curve(block)
>>> plan = curve.plan(10)  # at most 10 bytes saved
>>> sorted(plan.saved), plan.recomputed, plan.time_ms, plan.saved_bytes
([1, 4], (1,), 1.0, 10)
>>> [(plan.saved_bytes, plan.time_ms) for plan in curve.plans()]
[(18, 0.0), (10, 1.0), (8, 2.5), (0, 12.5)]

The knapsack bounds the saved bytes. The staged form takes a whole step, forward and backward. It
decides the order of the recomputation too, and bounds the peak:

>>> from checkmate import StagedOp, StagedProblem, solve_staged
>>> first = StagedOp(time_ms=3.0, inputs=(0,), outputs=(1,))
>>> second = StagedOp(time_ms=1.0, inputs=(1,), outputs=(2,))
>>> third = StagedOp(time_ms=2.0, inputs=(2,), outputs=(3,))
>>> third_gradient = StagedOp(time_ms=4.0, inputs=(3, 2), outputs=(4,), recomputable=False)
>>> gradient = StagedOp(time_ms=5.0, inputs=(4, 1), outputs=(5,), recomputable=False)
>>> step = StagedProblem(
...     ops=(first, second, third, third_gradient, gradient),
...     value_bytes=(0, 8, 8, 4, 4, 2),
...     held=frozenset({5}),
... )
>>> schedule = solve_staged(step, 20)
>>> schedule.steps, schedule.time_ms, schedule.peak_bytes, schedule.bound_ms
((0, 1, 2, 3, 0, 4), 18.0, 16, 18.0)

* `Curve`: plans and lower bounds for many limits on saved bytes, prepared once, in polynomial time.
* `solve_staged`: the fastest staged schedule whose peak is within a budget, for blocks and small
  whole graphs.

Every answer is equal for equal input. A plan is the fastest for
its own saved bytes. A staged schedule is the fastest within its budget unless its `Status` says
otherwise. `checkmate.problem` and `checkmate.staged` state the problems and their sources. The
methods stand at the heads of `reduction`, `hull`, `curve` and `staged_model`.
"""

from checkmate.curve import Curve
from checkmate.problem import Knapsack, Op, Solution, Status
from checkmate.staged import StagedOp, StagedProblem, StagedSolution
from checkmate.staged_solve import solve_staged

__all__ = [
    "Curve",
    "Knapsack",
    "Op",
    "Solution",
    "StagedOp",
    "StagedProblem",
    "StagedSolution",
    "Status",
    "solve_staged",
]
