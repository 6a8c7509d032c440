"""Optimal recomputation for a chain: numbers in, a sequence of forward and backward steps out.

A chain of stages runs forward, then backward. A stage either keeps all that its backward reads, or
nothing. A boundary between stages can be kept, and the stages after it recomputed from it.

* ``Table`` takes the bytes and times and finds the fastest way to run the whole chain within
  *every* memory budget at once.
* ``Table.breakpoints`` gives the whole curve of time over budget.
* ``Table.sequence`` gives the steps for one budget.

The package needs numpy and knows no tensors.

    >>> from rotor import Stage, Table
    >>> stage = Stage(
    ...     input_bytes=10,
    ...     output_gradient_bytes=10,
    ...     forward_ms=1.0,
    ...     forward_peak_bytes=10,
    ...     saved_bytes=40,
    ...     keep_peak_bytes=40,
    ...     backward_ms=2.0,
    ...     backward_peak_bytes=60,
    ... )
    >>> table = Table((stage,) * 4, max_budget_bytes=200)
    >>> table.breakpoints()
    ((70, 18.0), (80, 16.0), (90, 15.0), (110, 14.0), (150, 13.0), (180, 12.0))
    >>> print(*table.sequence(budget_bytes=100))
    F0 F1 F2 K3 B3 K2 B2 K1 B1 K0 B0

``chain.py`` defines what is counted. ``solve.py`` states what is optimal, what is not, and what
rounding can cost.
"""

from rotor.chain import Chain, Sequence, Stage, Step
from rotor.solve import Table

__all__ = ["Chain", "Sequence", "Stage", "Step", "Table"]
