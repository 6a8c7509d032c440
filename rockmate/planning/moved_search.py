"""Plans with moves: schedules for larger budgets, brought within a budget by moves.

Recomputation and moves are chosen together in this way: a schedule for a budget B' >= B recomputes
what does not fit B', and what exceeds B of it moves. Of a grid of B', which is refined around its
best, the fastest is taken, by the replay in lanes. The schedule without moves for B itself is one
of them, so a plan with moves never takes longer than that without. Schedules for larger budgets
serve every smaller one, so many budgets take little longer than one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache, cached_property
from math import inf, sqrt

from rockmate.bound.moved import MovedBound
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.planning.candidate import Candidate, around_best, by_peak, by_time, evaluate
from rockmate.planning.form import Form, Found, time_of
from rockmate.planning.moving import MoveFinder
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import baseline_schedule, finish

# Budgets whose schedules moves begin with: shares of the baseline's peak, each the last one divided
# by this ratio, and how often the grid is refined around the best of them.
_RATIO = 1.25
_NUM_REFINEMENTS = 2
# A plan further above the bound than this share of the baseline's time is searched for from the
# bound's relaxation, with these shares of the budget left to values on their way.
_FAR, _ROOMS = 0.02, (0.0, 0.03, 0.06, 0.1, 0.2, 0.35)


class MovedSearch:
    """The search for schedules whose values may move.

    Args:
        captured: the step as captured.
        request: where values move to.
        unmoved_within: gives the fastest schedule without moves within a budget.
        forms_within: gives the forms whose schedules may fit a budget.
    """

    def __init__(
        self,
        captured: Form,
        request: OffloadRequest,
        unmoved_within: Callable[[int], Found | None],
        forms_within: Callable[[int], Iterable[Form]],
    ) -> None:
        self._captured, self._request = captured, request
        self._unmoved_within, self._forms_within = unmoved_within, forms_within
        self._finder = cache(lambda form: MoveFinder(form.graph, form.costs, request))
        self.bound_of = cache(lambda form: MovedBound(form.lower_bound, request))

    @cached_property
    def minimum(self) -> Candidate:
        """The schedule of the smallest peak that is found without chunks."""
        form, finder = self._captured, self._finder(self._captured)
        baseline = evaluate(form.graph, baseline_schedule(form.graph), form.costs)
        found = [form.local_search.minimum(), baseline]
        for start in tuple(found):
            least_bytes = finder.least_peak(start.schedule, start.simulation)
            moved = self._moved(form, start, least_bytes)
            found += [moved.candidate] if moved else []
        return min(found, key=by_peak)

    def best_within(self, budget_bytes: int, unmoved: Found | None) -> Found | None:
        """The fastest schedule found within a budget; None if moves do not bring any there.

        Args:
            budget_bytes: the budget.
            unmoved: the fastest without moves; None if none fits.
        """
        top_bytes = self._captured.baseline.peak_bytes
        smallest = self._captured.local_search.minimum()
        best = unmoved
        if smallest.peak_bytes > budget_bytes:
            best = min_of(best, self._moved(self._captured, smallest, budget_bytes))
        times: dict[float, float] = {}
        grid = _grid(max(budget_bytes, smallest.peak_bytes), top_bytes)
        for _ in range(_NUM_REFINEMENTS + 1):
            for start_bytes in grid:
                moved = self._from_start(start_bytes, budget_bytes, time_of(best))
                times[start_bytes] = time_of(moved)
                best = min_of(best, moved)
            if min(times.values(), default=inf) == inf:
                break
            middles = (int(sqrt(one * other)) for one, other in around_best(times))
            grid = [middle for middle in middles if middle not in times]
        return min_of(best, *self._from_relaxations(budget_bytes, best))

    def _from_relaxations(self, budget_bytes: int, best: Found | None) -> list[Found]:
        """Schedules that move what the relaxation of the bound moves, if the best is far from it.

        What they recompute is searched for with these values free of charge, and some room for
        those that are on their way: quickly in all forms, and then in the form of the fastest.
        """
        found: list[Found] = []
        rule = self._captured.local_search.problem.rule
        for form in self._forms_within(budget_bytes):
            known = min_of(best, *found)
            found += self._from_relaxation(form, budget_bytes, known, is_quick=True)
        best = min_of(best, *found)
        if best is not None and rule.is_late:
            return found
        form = best.form if found and best else self._captured
        return found + self._from_relaxation(form, budget_bytes, best, is_quick=False)

    def _from_relaxation(
        self, form: Form, budget_bytes: int, best: Found | None, *, is_quick: bool
    ) -> list[Found]:
        """Of one form; quickly, or by its search with each share of the budget as room."""
        if form.baseline.time_ms >= time_of(best):
            return []
        bound = self.bound_of(form)
        limit_ms = bound.bound_ms(budget_bytes) + _FAR * form.baseline.time_ms
        if limit_ms >= time_of(best):
            return []
        for moved in filter(None, (bound.moved_values(budget_bytes), self._inputs(form))):
            found = self._with_free_values(form, moved, budget_bytes, is_quick=is_quick)
            if found:
                return found
        return []

    def _inputs(self, form: Form) -> Collection[int]:
        """The inputs of blocks, all or as many as there is room for where values move to."""
        inputs = [each.input for each in form.blocks.blocks if each.input is not None]
        needed = sum(each.num_bytes for each in inputs)
        step = -(-needed // (self._request.host_bytes or needed or 1))
        return {each.index for each in inputs[:: max(1, step)]}

    def _with_free_values(
        self, form: Form, moved: Collection[int], budget_bytes: int, *, is_quick: bool
    ) -> list[Found]:
        free, found = form.with_graph(*with_free_values(form.graph, form.costs, moved)), []
        search = free.quick_start if is_quick else free.local_search.best_within
        for room in _ROOMS:
            start = search(int((1 - room) * budget_bytes))
            if start is None:
                continue
            schedule = finish(form.graph, start.schedule.forward, start.schedule.backward)
            whole = evaluate(form.graph, schedule, form.costs)
            found += filter(None, [self._moved(form, whole, budget_bytes, moved)])
            if found and is_quick:
                break
        return found

    def _from_start(self, start_bytes: int, budget_bytes: int, limit_ms: float) -> Found | None:
        """The schedule for a larger budget, moved within a budget; None if it is no faster."""
        start = self._unmoved_within(start_bytes)
        if start is None or start.time_ms >= limit_ms:
            return None
        return self._moved(*start, budget_bytes)

    def _moved(
        self, form: Form, start: Candidate, budget_bytes: int, preferred: Collection[int] = ()
    ) -> Found | None:
        found = self._finder(form).within(start.schedule, start.simulation, budget_bytes, preferred)
        if found is None:
            return None
        return Found(form, replace(start, schedule=found[0], simulation=found[1]))


def min_of(*found: Found | None) -> Found | None:
    """The fastest of some schedules; None if there is none."""
    return min(filter(None, found), key=lambda each: by_time(each.candidate), default=None)


def _grid(least_bytes: int, top_bytes: int) -> list[int]:
    """Budgets from the largest down, whatever budget is planned, so that they are planned once."""
    found, share = [], 1.0
    while share * top_bytes > least_bytes:
        found.append(int(share * top_bytes))
        share /= _RATIO
    return found


def with_free_values(graph: Graph, costs: Costs, free: Collection[int]) -> tuple[Graph, Costs]:
    """A copy of a graph in which some storages take bytes only while an op reads or makes them.

    Its nodes are those of `graph`, and ops and storages have the same indices, so that a schedule
    of one is a schedule of the other.

    Args:
        graph: the step.
        costs: of its ops.
        free: indices of the storages.

    Returns:
        The graph, and its costs, where ops have these bytes among their workspace.
    """
    copies = {
        storage: replace(
            storage, num_bytes=0 if storage.index in free else storage.num_bytes, producer=None
        )
        for storage in graph.storages
    }
    own_bytes = [
        sum(each.num_bytes for each in {*op.reads, *op.writes} if each.index in free)
        for op in graph.ops
    ]
    first, recompute = (
        tuple(
            replace(cost, overhead_bytes=cost.overhead_bytes + num_bytes)
            for cost, num_bytes in zip(table, own_bytes, strict=True)
        )
        for table in (costs.first, costs.recompute)
    )
    copy = replace(
        graph,
        ops=tuple(_copied(op, copies) for op in graph.ops),
        storages=tuple(copies[storage] for storage in graph.storages),
        storage_of={node: copies[storage] for node, storage in graph.storage_of.items()},
    )
    return copy, replace(costs, first=first, recompute=recompute)


def _copied(op: Op, copies: dict[Storage, Storage]) -> Op:
    copy = replace(
        op,
        reads=tuple(copies[storage] for storage in op.reads),
        writes=tuple(copies[storage] for storage in op.writes),
        final_gradients=list(op.final_gradients),
        in_place_operands=None,
    )
    for storage in copy.writes:
        storage.producer = copy
    return copy
