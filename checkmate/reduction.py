"""Presolve: splits a `Knapsack` into small independent *parts*, and assembles a `Solution`.

The set of recomputed ops determines a plan: the values to save follow from it (`assemble`).
**Links** decide which choices affect each other. A value is *always available* if it is

* given;
* required, so that every plan has it, saved or recomputed;
* of zero bytes, so that saving it costs nothing; or
* made by an op of zero time whose inputs are always available, so that recomputing it costs
  nothing.

To read such a value constrains nothing. Every other value that some useful recomputation may read
is a link. Ops that share no link are independent, so the problem falls into parts: the connected
components of ops and links. In a transformer, nearly every large value is required. A part then
holds one to six ops, whatever the depth of the model, and equal layers give equal parts.

All of it is exact. Times become integer *ticks*: the finest power of ten of a millisecond for which
all ops together take at most 1e12 ticks. Equal times then compare equal, as 0.1 + 0.2 and 0.3, and
times are exact to 1e-12 of their total.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import floor, fsum, log10

from checkmate.problem import Knapsack, Solution

# Largest number of ticks of all ops together.
_MAX_TICKS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOp:
    """An op within its part; two parts are equal if their ops are.

    Attributes:
        ticks: Time of one run, in ticks.
        recomputable: Whether it may be recomputed.
        links_in: The part's links that it reads.
        links_out: The part's links that it makes.
        link_bytes: Their sizes, in bytes.
        kept_bytes: Bytes of its required outputs, which are saved unless the op is recomputed.
    """

    ticks: int
    recomputable: bool
    links_in: tuple[int, ...]
    links_out: tuple[int, ...]
    link_bytes: tuple[int, ...]
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Ops whose choices affect each other, in topological order.

    Attributes:
        ops: The ops, with links counted from 0 within the part.
        indices: Index of each op in the problem.
    """

    ops: tuple[PartOp, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A problem in independent parts.

    Attributes:
        free: Ops of zero time, which every plan recomputes.
        parts: The independent parts; their costs add up to the problem's.
    """

    free: tuple[int, ...]
    parts: tuple[Part, ...]


def ms_of_ticks(problem: Knapsack, ticks: float) -> float:
    """A sum of ticks in milliseconds, rounded down by the largest rounding error of all ops."""
    return max(0.0, ticks - len(problem.ops) / 2) / 10.0 ** _exponent(problem)


def _exponent(problem: Knapsack) -> int:
    """The power of ten of ticks in a millisecond."""
    total_ms = fsum(op.time_ms for op in problem.ops)
    return max(-280, min(280, floor(log10(_MAX_TICKS) - log10(total_ms)))) if total_ms else 0


def reduce(problem: Knapsack) -> Reduced:
    """Split a problem into independent parts.

    Returns:
        Its parts, ordered by their first op. The Pareto set of the problem is the sum of those of
        the parts.
    """
    ops, sizes = problem.ops, problem.value_bytes
    ticks_in_ms = 10.0 ** _exponent(problem)
    ticks = tuple(round(op.time_ms * ticks_in_ms) for op in ops)
    maker = {value: index for index, op in enumerate(ops) for value in op.outputs}
    available = {
        value
        for value, size in enumerate(sizes)
        if value not in maker or value in problem.required or size == 0
    }
    free: set[int] = set()
    for index, op in enumerate(ops):
        if op.recomputable and ticks[index] == 0 and available.issuperset(op.inputs):
            free.add(index)
            available.update(op.outputs)

    needed = set(problem.required)
    useful: list[int] = []
    for index in reversed(range(len(ops))):
        op = ops[index]
        if any(v in needed and sizes[v] > 0 for v in op.outputs):
            if index not in free:
                useful.append(index)
            if op.recomputable:
                needed.update(op.inputs)
    useful.reverse()

    members = _components(problem, useful, available, maker)
    parts = tuple(_part(problem, indices, available, needed, ticks) for indices in members)
    return Reduced(free=tuple(sorted(free)), parts=parts)


def _components(
    problem: Knapsack, useful: list[int], available: set[int], maker: dict[int, int]
) -> list[tuple[int, ...]]:
    """The connected components of the useful ops, joined by links (union-find)."""
    root = {index: index for index in useful}

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    for index in useful:
        if problem.ops[index].recomputable:
            for value in problem.ops[index].inputs:
                if value not in available:
                    one, other = find(index), find(maker[value])
                    root[max(one, other)] = min(one, other)
    groups: dict[int, list[int]] = {}
    for index in useful:
        groups.setdefault(find(index), []).append(index)
    return [tuple(group) for group in groups.values()]


def _part(
    problem: Knapsack,
    indices: tuple[int, ...],
    available: set[int],
    needed: set[int],
    ticks: tuple[int, ...],
) -> Part:
    local: dict[int, int] = {}
    part_ops: list[PartOp] = []
    sizes = problem.value_bytes
    for index in indices:
        op = problem.ops[index]
        links = tuple(v for v in op.outputs if v in needed and v not in available)
        for value in links:
            local[value] = len(local)
        inputs = op.inputs if op.recomputable else ()
        reads = sorted({local[v] for v in inputs if v not in available})
        kept = problem.required.intersection(op.outputs)
        part_ops.append(
            PartOp(
                ticks=ticks[index],
                recomputable=op.recomputable,
                links_in=tuple(reads),
                links_out=tuple(local[v] for v in links),
                link_bytes=tuple(sizes[v] for v in links),
                kept_bytes=sum(sizes[v] for v in kept),
            )
        )
    return Part(ops=tuple(part_ops), indices=indices)


def assemble(problem: Knapsack, recomputed: Collection[int]) -> Solution:
    """The plan that recomputes some ops and saves the values that it then has to.

    Recomputations that spare no bytes are left out, so plans of equal cost have one form.
    """
    wanted = frozenset(recomputed)
    needed = set(problem.required)
    kept: list[int] = []
    rebuilt: set[int] = set()
    made: set[int] = set()
    for index in reversed(range(len(problem.ops))):
        op = problem.ops[index]
        made.update(op.outputs)
        if index in wanted and any(v in needed and problem.value_bytes[v] for v in op.outputs):
            kept.append(index)
            rebuilt.update(op.outputs)
            needed.update(op.inputs)
    kept.reverse()
    saved = frozenset((needed & made) - rebuilt)
    return Solution(
        saved=saved,
        recomputed=tuple(kept),
        time_ms=fsum(problem.ops[index].time_ms for index in kept),
        saved_bytes=sum(problem.value_bytes[v] for v in saved),
    )
