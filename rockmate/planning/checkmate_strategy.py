"""The strategy "checkmate": the whole graph as one staged program, without blocks.

For small models, and to compare with. The program (`checkmate.staged`) is stricter than the
simulator, so its schedules fit when simulated: no op reuses its operand's memory in place.
Recomputation starts with the backward. The state that an op saves for it is one more value, and so
are the tangents together: an op that takes no time makes it once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from checkmate import StagedOp, StagedProblem, StagedSolution, Status, solve_staged
from rockmate.costs.cost import Costs
from rockmate.errors import InvalidArgumentError, SolverLimitError
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.planning.candidate import Candidate, evaluate
from rockmate.schedule.schedule import baseline_schedule, finish

logger = logging.getLogger(__name__)

# The smallest peak is found to this share of the baseline peak.
_MIN_PEAK_TOLERANCE = 0.01


class CheckmateSearch:
    """One solve for each budget, when it is asked for.

    Args:
        time_limit_s: limit on the solve of one budget.
        order: all ops of the step in the order of their first runs; by default the graph's.

    Attributes:
        problem: the step as numbers; recomputable ops with the times of their recomputation.

    Raises:
        InvalidArgumentError: the graph has several forwards in flight, or values that marks have
            recomputed, which the program does not know.
    """

    def __init__(
        self, graph: Graph, costs: Costs, *, time_limit_s: float, order: Sequence[Op] = ()
    ) -> None:
        if graph.num_in_flight > 1 or graph.must_recompute:
            msg = (
                "the strategy 'checkmate' plans one forward before its backward, and recomputes "
                f"what it chooses. Here in_flight is {graph.num_in_flight}, and marks or "
                f"checkpoints recompute {len(graph.must_recompute)} values. Take another strategy"
            )
            raise InvalidArgumentError(msg)
        self._graph = graph
        self._costs = costs
        self._time_limit_s = time_limit_s
        # The op behind each op of the program; None where that makes a state or the tangents.
        self._ops = list[Op | None]()
        self._baseline = evaluate(graph, baseline_schedule(graph), costs)
        steps = self._baseline.schedule.steps
        self.problem = self._staged_problem(order or [graph.ops[index] for index in steps])
        self._solved, self.minimum = cache(self._solve_candidate), cache(self._find_minimum)

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The optimum of the staged program; where that is infeasible, the minimum if it fits.

        Reuse of memory in place takes a schedule's peak below the budget that its program needs.

        Raises:
            SolverLimitError: the time limit passed without a schedule or a proof that there is
                none.
        """
        best = self._optimum(budget_bytes)
        if best is None and self.minimum().peak_bytes <= budget_bytes:
            best = self.minimum()
        return best

    def _optimum(self, budget_bytes: int) -> Candidate | None:
        if budget_bytes >= self._baseline.peak_bytes:
            return self._baseline
        return self._solved(budget_bytes)

    def _solve_candidate(self, budget_bytes: int) -> Candidate | None:
        solution = self.solve(budget_bytes)
        if solution.status is Status.NOT_FOUND:
            msg = (
                f"the whole graph of {len(self._graph.ops)} ops was not solved for {budget_bytes:,}"
                f" bytes in {self._time_limit_s:.0f} s. Raise time_limit_s, or use the default."
            )
            raise SolverLimitError(msg)
        if solution.status is Status.FEASIBLE:
            logger.warning(
                "the optimum of the whole graph for %d bytes was not proved in %.0f s",
                budget_bytes,
                self._time_limit_s,
            )
        return self.candidate(solution) if solution.found else None

    def solve(self, budget_bytes: int) -> StagedSolution:
        """The staged program's own answer, with its proved bound."""
        return solve_staged(
            self.problem,
            budget_bytes,
            time_limit_s=self._time_limit_s,
            first_recompute_op=self._border + 1,
        )

    def _find_minimum(self) -> Candidate:
        """A schedule near the smallest peak, by bisection.

        Raises:
            SolverLimitError: as for `best_within`.
        """
        smallest, low = self._baseline, 0
        while smallest.peak_bytes - low > _MIN_PEAK_TOLERANCE * self._baseline.peak_bytes:
            middle = (low + smallest.peak_bytes) // 2
            found = self._optimum(middle)
            smallest, low = (smallest, middle) if found is None else (found, low)
        return smallest

    def candidate(self, solution: StagedSolution) -> Candidate:
        """The schedule of a solution that has one."""
        cut = solution.steps.index(self._border)
        forward, backward = (
            [op.index for op in map(self._ops.__getitem__, part) if op is not None]
            for part in (solution.steps[:cut], solution.steps[cut:])
        )
        found = evaluate(self._graph, finish(self._graph, forward, backward), self._costs)
        return replace(found, is_proved=solution.status is Status.OPTIMAL)

    def _staged_problem(self, order: Sequence[Op]) -> StagedProblem:
        values = [storage for op in order for storage in op.writes]
        number = {storage: index for index, storage in enumerate(values)}
        value_bytes = [storage.num_bytes for storage in values]
        tangent_bytes = sum(s.num_bytes for s in self._graph.storages if s.is_tangent)
        ops, tables = list[StagedOp](), (self._costs.first, self._costs.recompute)

        def made_once(num_bytes: int, inputs: tuple[int, ...] = ()) -> tuple[int, ...]:
            """A value of one more op, which takes no time."""
            made = (len(value_bytes),)
            ops.append(StagedOp(time_ms=0, inputs=inputs, outputs=made, recomputable=False))
            value_bytes.append(num_bytes)
            self._ops.append(None)
            return made

        def numbers(storages: Iterable[Storage]) -> tuple[int, ...]:
            return tuple(number[storage] for storage in storages if storage in number)

        held = set(numbers(s for s in values if s.is_result))
        for place, op in enumerate(order):
            if place == len(self._baseline.schedule.forward):
                self._border = len(ops)
                # New values of buffers are live until the forward returns.
                held.update(made_once(tangent_bytes, numbers(self._graph.updates)))
            inputs = numbers(op.reads)
            if op.is_recomputable and op.recompute_state_bytes:
                inputs += made_once(op.recompute_state_bytes)
            ops.append(
                StagedOp(
                    time_ms=tables[op.is_recomputable][op.index].time_ms,
                    inputs=inputs,
                    outputs=numbers(op.writes),
                    recomputable=op.is_recomputable,
                    overhead_bytes=max(costs[op.index].overhead_bytes for costs in tables),
                )
            )
            self._ops.append(op)
        return StagedProblem(ops=tuple(ops), value_bytes=tuple(value_bytes), held=frozenset(held))
