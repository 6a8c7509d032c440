"""The texts of `bench.walkthrough`: one function for each stage."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from bench.pages import filled
from rockmate._torch.allocator import timeline
from rockmate._torch.dispatch import is_op
from rockmate.bound.lower_bound import LowerBound
from rockmate.capture.roles import Capture
from rockmate.costs.cost import Cost, Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.planning.candidate import Candidate, frontier_at, linspace_int
from rockmate.planning.forms import FRONTIER_POINTS
from rockmate.planning.moves import remove_recomputations, spill_until_feasible
from rockmate.planning.starts import KnapsackFamily
from rockmate.planning.strategies import Searcher
from rockmate.runtime.autograd import Runner
from rockmate.runtime.program import Program
from rockmate.schedule.schedule import Schedule, last_reads
from rockmate.schedule.simulate import Simulation, simulate

TIME_LIMIT_S = 30.0
_BOUND_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
# Peak over budget up to which starts are repaired and shown.
_MAX_EXCESS = 1.25
# Number of limits on saved bytes, each of which gives a knapsack schedule.
_NUM_LIMITS = 32
_EXCERPT_LINES = 16
_KIB = 1024


def _text(section: str, **parts: Any) -> str:
    return "\n".join(filled("walkthrough", section=section, **parts))


def of_capture(capture: Capture) -> str:
    """Inputs and outputs of the joint graph."""
    calls = call_counts(capture.joint)
    return _text("capture", capture=capture, num_calls=calls.total())


def call_counts(joint: fx.GraphModule) -> Counter[str]:
    """Number of calls of each target in a joint graph."""
    return Counter(
        _call_name(node.target) for node in joint.graph.nodes if node.op == "call_function"
    )


def _call_name(target: Any) -> str:
    return str(target) if is_op(target) else target.__name__


def of_rewrites(before: Counter[str], after: Counter[str]) -> str:
    """Targets whose number of calls the rewrites change."""
    counts = {name: (before[name], after[name]) for name in sorted(before.keys() | after.keys())}
    return _text("rewrites", changed=[each for each in counts.items() if each[1][0] != each[1][1]])


def of_costs(graph: Graph, costs: Costs) -> str:
    """The distinct costs."""
    firsts: dict[Cost, Op] = {}
    for op, cost in zip(graph.ops, costs.first, strict=True):
        firsts.setdefault(cost, op)
    num_ops, num_distinct = len(graph.ops), costs.num_distinct
    return _text("costs", num_ops=num_ops, num_distinct=num_distinct, firsts=firsts.items())


def of_refinement(graph: Graph, chain: BlockChain, costs: Costs, budget_bytes: int) -> str:
    """Each start near the budget, after repair and after refinement, as the local search does."""
    most_bytes = int(_MAX_EXCESS * budget_bytes)
    family = KnapsackFamily(graph, chain, costs)
    solved = map(family.fastest_saving, linspace_int(0, most_bytes, _NUM_LIMITS))
    proposals = [schedule for schedule in solved if schedule is not None]
    rows: list[list[Simulation]] = []
    for candidate in _fastest_of_each_peak(graph, costs, proposals, most_bytes):
        schedule, stages = candidate.schedule, [candidate.simulation]
        fitting = spill_until_feasible(graph, costs, schedule, stages[0], budget_bytes)
        if fitting is not None:
            stages.append(simulate(graph, fitting, costs))
            spent = remove_recomputations(graph, costs, fitting, stages[1], budget_bytes)
            stages.append(simulate(graph, spent, costs))
        rows.append(stages)
    return _text("refinement", budget=budget_bytes, rows=tuple(rows))


def _fastest_of_each_peak(
    graph: Graph, costs: Costs, schedules: Iterable[Schedule], max_bytes: int
) -> list[Candidate]:
    """One schedule for each peak in whole KiB, by growing peak."""
    fastest: dict[int, Candidate] = {}
    for schedule in schedules:
        simulation = simulate(graph, schedule, costs)
        peak_kib = simulation.peak_bytes // _KIB
        known = fastest.get(peak_kib)
        if simulation.peak_bytes <= max_bytes and (
            known is None or simulation.time_ms < known.simulation.time_ms
        ):
            fastest[peak_kib] = Candidate(schedule=schedule, simulation=simulation)
    return [fastest[peak_kib] for peak_kib in sorted(fastest)]


def of_frontier(search: Searcher, baseline: Simulation, fraction: float, budget_bytes: int) -> str:
    """The frontier of a search."""
    least = search.minimum().peak_bytes
    budgets = linspace_int(least, baseline.peak_bytes, FRONTIER_POINTS)
    points = tuple(frontier_at(budgets, search.best_within))
    sizes = {"fraction": fraction, "budget": budget_bytes, "least": least}
    return _text("frontier", baseline=baseline, points=points, **sizes)


def of_lower_bound(bound: LowerBound, search: Searcher, baseline: Simulation) -> str:
    """Program points, and the bound against the plan at some budgets."""
    rows = []
    for fraction in _BOUND_FRACTIONS:
        size = int(fraction * baseline.peak_bytes)
        best = search.best_within(size)
        time_ms = None if best is None else best.simulation.time_ms
        rows.append((fraction, size, bound.bound_ms(size), time_ms))
    points, baseline_ms = tuple(bound.points), baseline.time_ms
    return _text("lower_bound", points=points, rows=tuple(rows), baseline_ms=baseline_ms)


def of_schedule(graph: Graph, schedule: Schedule) -> str:
    """An excerpt of a schedule around its first recomputation."""
    lines = schedule.rows([op.name for op in graph.ops])
    again = [position for position, line in enumerate(lines) if " again" in line]
    start = max(0, min(again, default=0) - 2)
    shown = lines[start : start + _EXCERPT_LINES]
    return _text("schedule", schedule=schedule, num_again=len(again), start=start, shown=shown)


def of_simulation(graph: Graph, costs: Costs, chosen: Candidate, budget_bytes: int) -> str:
    """The simulated peak and time of a schedule."""
    found, schedule = chosen.simulation, chosen.schedule
    return _text(
        "simulation",
        budget=budget_bytes,
        found=found,
        op=graph.ops[schedule.steps[found.peak_position]],
        half="forward" if found.peak_position < len(schedule.forward) else "backward",
        live=tuple(live_at(graph, costs, schedule, found.peak_position)),
    )


def live_at(graph: Graph, costs: Costs, schedule: Schedule, position: int) -> list[tuple[str, int]]:
    """Names and bytes of all that is in memory while the run at `position` runs, largest first."""
    ends = last_reads(graph, schedule.forward, schedule.backward)
    live: dict[Storage, None] = {}
    for step, index in enumerate(schedule.steps[: position + 1]):
        if step == len(schedule.forward):
            live.update({storage: None for storage in graph.storages if storage.is_tangent})
        live.update(dict.fromkeys(graph.ops[index].writes))
        if step < position:
            for storage in ends[step]:
                live.pop(storage, None)
    rows = [(storage.name, storage.num_bytes) for storage in live]
    if position in schedule.in_place:
        op = graph.ops[schedule.steps[position]]
        rows.append(
            (
                f"less {op.writes[0].name}, which takes over an operand's memory",
                -op.writes[0].num_bytes,
            )
        )
    index = schedule.steps[position]
    cost = (costs.recompute if index in schedule.steps[:position] else costs.first)[index]
    if cost.overhead_bytes:
        rows.append((f"workspace of {graph.ops[index].name}", cost.overhead_bytes))
    rows += [
        (f"random state of {op.name}", op.recompute_state_bytes)
        for op in _states_held(graph, schedule, position)
    ]
    return sorted(rows, key=lambda row: -row[1])


def _states_held(graph: Graph, schedule: Schedule, position: int) -> list[Op]:
    so_far, later = schedule.steps[: position + 1], schedule.steps[position:]
    held = [
        index
        for index in dict.fromkeys(so_far)
        if index in later and schedule.steps.count(index) > 1
    ]
    return [graph.ops[index] for index in held if graph.ops[index].recompute_state_bytes]


def of_code(code: str, first_shown: str = "") -> str:
    """An excerpt of an emitted function, its arguments left out.

    From just before `first_shown`, or the end of it.
    """
    lines = [line for line in code.strip().splitlines() if line.strip()]
    body = [line for line in lines[2:] if "next(args_iter)" not in line]
    num_arguments = len(lines) - 2 - len(body)
    found = [index - 2 for index, line in enumerate(body) if first_shown and first_shown in line]
    start = max(0, found[0] if found else len(body) - _EXCERPT_LINES)
    shown = body[start : start + _EXCERPT_LINES]
    return "\n".join(
        [lines[0], f"    # {num_arguments} arguments and {start} lines before these", *shown]
    )


def first_recomputed(graph: Graph, schedule: Schedule) -> str:
    """The target of the first recomputed op in the emitted code; empty if there is none."""
    seen = set(schedule.forward)
    recompute = next((graph.ops[index] for index in schedule.backward if index in seen), None)
    return _call_name(recompute.node.target) + "(" if recompute else ""


def of_run(
    model: nn.Module,
    tensors: Sequence[Tensor],
    capture: Capture,
    program: Program,
    chosen: Candidate,
    budget_bytes: int,
) -> str:
    """A planned step against eager, measured."""
    eager = copy.deepcopy(model)
    runner = Runner(program, model)

    def planned_step() -> Tensor:
        outputs = capture.output_structure.rebuild(list(runner.run(list(tensors))))
        outputs["loss"].backward()
        return outputs["loss"]

    def eager_step() -> Tensor:
        outputs = eager(*tensors)
        outputs["loss"].backward()
        return outputs["loss"]

    measured: list[tuple[int, Tensor, Tensor]] = []
    for step, owner in ((eager_step, eager), (planned_step, model)):
        step()  # makes `.grad` and what libraries make on first use
        owner.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        loss: list[Tensor] = []
        memory = timeline(lambda step=step, loss=loss: loss.append(step().detach()))
        measured.append((memory.peak_bytes, loss[0], torch.get_rng_state()))
    (eager_bytes, eager_loss, eager_state), (peak_bytes, own_loss, own_state) = measured
    pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
    return _text(
        "run",
        eager_bytes=eager_bytes,
        budget=budget_bytes,
        predicted=chosen.simulation.peak_bytes,
        peak_bytes=peak_bytes,
        is_loss_equal=torch.equal(own_loss, eager_loss),
        num_equal=sum(torch.equal(_gradient(own), _gradient(theirs)) for own, theirs in pairs),
        num_gradients=len(pairs),
        is_state_equal=torch.equal(own_state, eager_state),
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
