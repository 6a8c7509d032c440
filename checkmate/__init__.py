"""Checkmate: which values of a forward pass to save, and which to recompute in the backward.

Numbers in, plan out: this package knows ops (a time, what they read, what they make) and values (bytes),
never tensors.

>>> from checkmate import Knapsack, Op, pareto, solve, verify
>>> linear = Op(time_ms=10.0, inputs=(0,), outputs=(1,))  # value 0 is given: no op makes it
>>> gelu = Op(time_ms=1.0, inputs=(1,), outputs=(2,))
>>> dropout = Op(time_ms=1.5, inputs=(2,), outputs=(3, 4))  # the output and its mask
>>> block = Knapsack(ops=(linear, gelu, dropout), value_bytes=(4, 8, 8, 8, 2), required=frozenset({1, 2, 4}))
>>> plan = solve(block, 10)  # at most 10 bytes saved
>>> sorted(plan.saved), plan.recomputed, plan.time_ms, plan.saved_bytes
([1, 4], (1,), 1.0, 10)
>>> verify(block, plan)
>>> [(plan.saved_bytes, plan.time_ms) for plan in pareto(block)]
[(18, 0.0), (10, 1.0), (8, 2.5), (2, 11.0), (0, 12.5)]

* `solve`: the fastest plan within one limit on saved bytes.
* `pareto`: the useful limits, from the fastest plan to the one that saves the fewest bytes.
* `convex_hull`: the levels on the lower convex hull, in polynomial time, for whole models.
* `verify`: an independent check of a plan.

Every answer is exact and proven unless its `Status` says otherwise, verified before it is returned, and the
same for the same input. The problem and its sources are stated in `checkmate.problem`, the methods at the top
of `reduction`, `frontier`, `hull` and `model`.
"""

from checkmate.hull import convex_hull
from checkmate.pareto import pareto
from checkmate.problem import Knapsack, Op, Solution, Status
from checkmate.solve import BACKENDS, solve
from checkmate.verify import verify

__all__ = ["BACKENDS", "Knapsack", "Op", "Solution", "Status", "convex_hull", "pareto", "solve", "verify"]
