"""The strategy "checkmate": the whole graph as one staged program, without blocks.

For small models, and to compare with. The program (`checkmate.staged`) is stricter than the
simulator, so its schedules fit when simulated: no op reuses its operand's memory in place. Random
ops run once, since a second run needs the generator's state. Recomputation starts with the
backward.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from checkmate import StagedOp, StagedProblem, StagedSolution, Status, solve_staged
from rockmate.costs.cost import Costs
from rockmate.errors import InvalidArgumentError, SolverLimitError
from rockmate.graph.ir import Graph, Phase
from rockmate.planning.candidate import Candidate, evaluate
from rockmate.schedule.schedule import baseline_schedule, finish
from rockmate.schedule.simulate import simulate

logger = logging.getLogger(__name__)

# The smallest peak is found to this share of the baseline peak.
_MIN_PEAK_TOLERANCE = 0.01


class CheckmateSearch:
    """One solve for each budget, when it is asked for.

    Args:
        graph: ops and storages.
        costs: of its ops.
        time_limit_s: limit on the solve of one budget.

    Raises:
        InvalidArgumentError: the graph has several forwards in flight, which the program does not
            count.
    """

    def __init__(self, graph: Graph, costs: Costs, *, time_limit_s: float) -> None:
        if graph.num_in_flight > 1:
            msg = (
                f"in_flight is {graph.num_in_flight}, and the strategy 'checkmate' plans one "
                "forward before its backward; take another strategy"
            )
            raise InvalidArgumentError(msg)
        self._graph = graph
        self._costs = costs
        self._time_limit_s = time_limit_s
        self._ops = (*graph.forward_ops, *graph.backward_ops)
        self._problem = self._staged_problem()
        self._tangent_bytes = sum(
            storage.num_bytes for storage in graph.storages if storage.is_tangent
        )
        self._baseline = evaluate(graph, baseline_schedule(graph), costs)
        self._solved: dict[int, Candidate | None] = {}
        self._minimum: Candidate | None = None

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
        if budget_bytes not in self._solved:
            self._solved[budget_bytes] = self._solve_within(budget_bytes)
        return self._solved[budget_bytes]

    def _solve_within(self, budget_bytes: int) -> Candidate | None:
        """The optimum; solved again with room for the states that ops save, if those exceed.

        The program does not count states, and the second answer is not proved optimal.
        """
        best = self._solve_candidate(budget_bytes)
        if best is None or best.peak_bytes <= budget_bytes:
            return best
        best = self._solve_candidate(budget_bytes - sum(op.saved_state_bytes for op in self._ops))
        return None if best is None else replace(best, is_proved=False)

    def _solve_candidate(self, budget_bytes: int) -> Candidate | None:
        solution = self.solve(budget_bytes)
        if solution.status is Status.NOT_FOUND:
            msg = (
                f"the whole graph of {len(self._ops)} ops was not solved for {budget_bytes:,} "
                f"bytes in {self._time_limit_s:.0f} s. Raise time_limit_s, or use the default "
                "strategy, which plans block by block."
            )
            raise SolverLimitError(msg)
        if solution.status is Status.FEASIBLE:
            logger.warning(
                "the optimum of the whole graph for %d bytes was not proved in %.0f s",
                budget_bytes,
                self._time_limit_s,
            )
        return self._candidate(solution) if solution.found else None

    def solve(self, budget_bytes: int) -> StagedSolution:
        """The staged program's own answer, with its proved bound."""
        return solve_staged(
            self._problem,
            budget_bytes - self._tangent_bytes,
            time_limit_s=self._time_limit_s,
            first_recompute_op=len(self._graph.forward_ops),
        )

    def minimum(self) -> Candidate:
        """A schedule near the smallest peak, by bisection.

        Raises:
            SolverLimitError: as for `best_within`.
        """
        if self._minimum is None:
            smallest, low = self._baseline, 0
            while smallest.peak_bytes - low > _MIN_PEAK_TOLERANCE * self._baseline.peak_bytes:
                middle = (low + smallest.peak_bytes) // 2
                found = self._optimum(middle)
                if found is None:
                    low = middle
                else:
                    smallest = found
            self._minimum = smallest
        return self._minimum

    def _candidate(self, solution: StagedSolution) -> Candidate:
        steps = [self._ops[index].index for index in solution.steps]
        first_run = {index: position for position, index in reversed(list(enumerate(steps)))}
        num_forward = 1 + max(
            first_run[op.index] for op in self._graph.forward_ops if op.index in first_run
        )
        schedule = finish(self._graph, steps[:num_forward], steps[num_forward:])
        simulation = simulate(self._graph, schedule, self._costs)
        is_proved = solution.status is Status.OPTIMAL
        return Candidate(schedule=schedule, simulation=simulation, is_proved=is_proved)

    def _staged_problem(self) -> StagedProblem:
        values = [storage for op in self._ops for storage in op.writes]
        number = {storage: index for index, storage in enumerate(values)}
        ends = {storage for storage in values if storage.is_result} | set(self._graph.updates)
        return StagedProblem(
            ops=tuple(
                StagedOp(
                    time_ms=self._costs.first[op.index].time_ms,
                    inputs=tuple(number[storage] for storage in op.reads if storage in number),
                    outputs=tuple(number[storage] for storage in op.writes),
                    recomputable=op.phase is not Phase.BACKWARD
                    and op.recompute_target is not None
                    and not op.is_random,
                    # A negative overhead counts as 0: to ignore a release is safe.
                    overhead_bytes=max(0, self._costs.first[op.index].overhead_bytes),
                    needed=bool(op.final_gradients)
                    or op.is_random
                    or not ends.isdisjoint(op.writes),
                )
                for op in self._ops
            ),
            value_bytes=tuple(storage.num_bytes for storage in values),
            held=frozenset(number[storage] for storage in values if storage in ends),
            border=len(self._graph.forward_ops),
            barred=frozenset(number[storage] for storage in values if storage.must_recompute),
        )
