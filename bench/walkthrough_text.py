"""The texts of `bench.walkthrough`: one function for each stage."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate._torch.allocator import timeline
from rockmate._torch.ops import is_op
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.capture.roles import Capture, Role
from rockmate.costs.cost import Cost, Costs
from rockmate.curves.table import Column, table_text
from rockmate.graph.blocks import storages_of
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.planning.baseline_search import Searcher
from rockmate.planning.block_options import Solving
from rockmate.planning.candidate import Candidate, frontier_at, linspace_int
from rockmate.planning.forms import FRONTIER_POINTS
from rockmate.planning.knapsack_family import KnapsackFamily
from rockmate.planning.moves import remove_recomputations, spill_until_feasible
from rockmate.planning.rotor_family import RotorFamily
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
_SHOWN_BLOCK = 1
_EXCERPT_LINES = 16
_KIB = 1024


def of_capture(capture: Capture) -> str:
    """Inputs and outputs of the joint graph."""
    ends = (("inputs", capture.inputs), ("outputs", capture.outputs))
    lines = [
        f"{sum(node.op == 'call_function' for node in capture.joint.graph.nodes)} calls in the "
        "joint graph"
    ]
    for title, roles in ends:
        lines.append(f"{title}:")
        lines += [
            f"  {node.name:<22} {_shape(node):<14} {_role_text(role)}" for node, role in roles
        ]
    return "\n".join(lines)


def _role_text(role: Role) -> str:
    return f"{role.kind.value} {role.name or role.index}"


def _shape(node: fx.Node) -> str:
    return str(list(node.meta["val"].shape))


def call_counts(joint: fx.GraphModule) -> Counter[str]:
    """Number of calls of each target in a joint graph."""
    return Counter(
        _call_name(node.target) for node in joint.graph.nodes if node.op == "call_function"
    )


def _call_name(target: Any) -> str:
    return str(target) if is_op(target) else target.__name__


def of_rewrites(before: Counter[str], after: Counter[str]) -> str:
    """Targets whose number of calls the rewrites change."""
    lines = [f"{'call':<40} before  after"]
    for name in sorted(before.keys() | after.keys()):
        if before[name] != after[name]:
            lines.append(f"{name:<40} {before[name]:>6} {after[name]:>6}")
    return "\n".join(lines)


def _table(rows: Sequence[Any], **columns: Callable[[Any], str]) -> str:
    """A table with these columns, whose names stand for their titles."""
    shown = [Column(title.replace("_", " "), cell) for title, cell in columns.items()]
    return table_text(shown, rows, lambda _: "")


def of_costs(graph: Graph, costs: Costs) -> str:
    """The distinct costs."""
    firsts: dict[Cost, Op] = {}
    for op, cost in zip(graph.ops, costs.first, strict=True):
        firsts.setdefault(cost, op)
    table = _table(
        [(op, cost) for cost, op in firsts.items()],
        op=lambda row: row[0].name,
        phase=lambda row: row[0].phase.value,
        bytes_made=lambda row: f"{row[0].written_bytes:,}",
        ms=lambda row: f"{row[1].time_ms:.3f}",
        workspace_bytes=lambda row: f"{row[1].overhead_bytes:,}",
    )
    return f"{len(graph.ops)} ops, {costs.num_distinct} distinct calls\n{table}"


def of_options(rotor: RotorFamily) -> str:
    """The options of one block."""
    block = rotor.chain.blocks[_SHOWN_BLOCK]
    storages = storages_of(block)

    def saved(option: Any) -> str:
        found = (storages[position] for position in option.saved)
        return " ".join(each.name for each in found if each is not block.output) or "-"

    table = _table(
        list(enumerate(rotor.options_of(_SHOWN_BLOCK, _SHOWN_BLOCK))),
        option=lambda row: str(row[0]),
        saved_KiB=lambda row: _kib(row[1].saved_bytes),
        forward_peak=lambda row: _kib(row[1].forward.peak_bytes),
        backward_peak=lambda row: _kib(row[1].backward.peak_bytes),
        forward_ms=lambda row: f"{row[1].forward.time_ms:.3f}",
        backward_ms=lambda row: f"{row[1].backward.time_ms:.3f}",
        saved_beside_the_output=lambda row: saved(row[1]),
    )
    return (
        f"block {_SHOWN_BLOCK} ({block.name}): input {_name(block.input)}, output "
        f"{_name(block.output)}\n{table}\n"
        f"{len(rotor.solver.solved.by_key)} distinct blocks and spans solved for "
        f"{len(rotor.rotor_chain.spans)}"
    )


def of_rotor(rotor: RotorFamily) -> str:
    """Rotor's chain and three of its sequences."""
    table = _table(
        list(enumerate(rotor.rotor_chain.stages)),
        stage=lambda row: str(row[0]),
        input_KiB=lambda row: _kib(row[1].input_bytes),
        gradient_KiB=lambda row: _kib(row[1].output_gradient_bytes),
        forward_ms=lambda row: f"{row[1].forward_ms:.3f}",
        forward_peak_KiB=lambda row: _kib(row[1].forward_peak_bytes),
    )
    points = rotor.table.breakpoints()
    lines = [table, "", f"{len(points)} breakpoints; table unit {rotor.table.unit_bytes:,} bytes"]
    lines += [
        f"budget {_kib(budget_bytes)} KiB, {time_ms:.3f} ms: {rotor.table.sequence(budget_bytes)}"
        for budget_bytes, time_ms in (points[0], points[len(points) // 2], points[-1])
    ]
    return "\n".join(lines)


def of_refinement(rotor: RotorFamily, budget_bytes: int) -> str:
    """Each start near the budget, after repair and after refinement, as the local search does."""
    graph, costs = rotor.graph, rotor.solver.costs
    most_bytes = int(_MAX_EXCESS * budget_bytes)
    one_level = KnapsackFamily(Solving(graph, rotor.chain, costs, SolverTime(TIME_LIMIT_S)))
    solved = map(one_level.fastest_saving, linspace_int(0, most_bytes, _NUM_LIMITS))
    schedules: dict[str, list[Schedule]] = {
        "knapsack": [schedule for schedule in solved if schedule is not None],
        "rotor": [maker() for maker in rotor.makers()],
    }
    rows: list[tuple[str, list[Simulation]]] = []
    for family, proposals in schedules.items():
        for candidate in _fastest_of_each_peak(rotor, proposals, most_bytes):
            schedule, stages = candidate.schedule, [candidate.simulation]
            fitting = spill_until_feasible(graph, costs, schedule, stages[0], budget_bytes)
            if fitting is not None:
                stages.append(simulate(graph, fitting, costs))
                spent = remove_recomputations(graph, costs, fitting, stages[1], budget_bytes)
                stages.append(simulate(graph, spent, costs))
            rows.append((family, stages))

    def stage(number: int) -> Callable[[tuple[str, list[Simulation]]], str]:
        return lambda row: _size_and_time(row[1][number]) if number < len(row[1]) else "none fits"

    table = _table(
        rows, family=lambda row: row[0], start=stage(0), repaired=stage(1), refined=stage(2)
    )
    return f"budget {_kib(budget_bytes)} KiB; peaks in KiB, times in ms\n{table}"


def _fastest_of_each_peak(
    rotor: RotorFamily, schedules: Iterable[Schedule], max_bytes: int
) -> list[Candidate]:
    """One schedule for each peak in whole KiB, by growing peak."""
    fastest: dict[int, Candidate] = {}
    for schedule in schedules:
        simulation = simulate(rotor.graph, schedule, rotor.solver.costs)
        peak_kib = simulation.peak_bytes // _KIB
        known = fastest.get(peak_kib)
        if simulation.peak_bytes <= max_bytes and (
            known is None or simulation.time_ms < known.simulation.time_ms
        ):
            fastest[peak_kib] = Candidate(schedule=schedule, simulation=simulation)
    return [fastest[peak_kib] for peak_kib in sorted(fastest)]


def _size_and_time(simulation: Simulation) -> str:
    return f"{_kib(simulation.peak_bytes)}, {simulation.time_ms:.3f}"


def of_frontier(search: Searcher, baseline: Simulation, fraction: float, budget_bytes: int) -> str:
    """The frontier of a search."""
    low, high = search.minimum().peak_bytes, baseline.peak_bytes
    table = _table(
        frontier_at(linspace_int(low, high, FRONTIER_POINTS), search.best_within),
        budget_KiB=lambda row: _kib(row[0]),
        peak_KiB=lambda row: _kib(row[1].peak_bytes),
        of_baseline=lambda row: f"{row[1].peak_bytes / high:.3f}",
        ms=lambda row: f"{row[1].simulation.time_ms:.3f}",
        of_its_time=lambda row: f"{row[1].simulation.time_ms / baseline.time_ms:.3f}",
        recomputed_ops=lambda row: str(row[1].schedule.num_recomputations()),
    )
    return (
        f"baseline: {_kib(high)} KiB, {baseline.time_ms:.3f} ms; budget {fraction}: "
        f"{_kib(budget_bytes)} KiB; smallest peak: {_kib(low)} KiB\n{table}"
    )


def of_lower_bound(bound: LowerBound, search: Searcher, baseline: Simulation) -> str:
    """Program points, and the bound against the plan at some budgets."""
    points = _table(
        bound.points,
        while_it_runs=lambda point: point.op.name,
        live_in_any_schedule_KiB=lambda point: _kib(point.min_bytes),
        backward_ops_after_it=lambda point: str(len(point.after)),
    )
    rows = []
    for fraction in _BOUND_FRACTIONS:
        budget_bytes = int(fraction * baseline.peak_bytes)
        best, bound_ms = search.best_within(budget_bytes), bound.bound_ms(budget_bytes)
        time_ms = math.nan if best is None else best.simulation.time_ms
        rows.append((fraction, budget_bytes, bound_ms, time_ms))
    table = _table(
        rows,
        budget=lambda row: str(row[0]),
        KiB=lambda row: _kib(row[1]),
        lower_bound_ms=lambda row: f"{row[2]:.3f}",
        plan_ms=lambda row: f"{row[3]:.3f}",
        gap_of_the_baseline=lambda row: f"{(row[3] - row[2]) / baseline.time_ms:.2%}",
    )
    return f"{len(bound.points)} program points\n{points}\n\n{table}"


def of_schedule(graph: Graph, schedule: Schedule) -> str:
    """An excerpt of a schedule around its first recomputation."""
    lines = schedule.to_text(graph).splitlines()
    recompute = [position for position, line in enumerate(lines) if " again" in line]
    start = max(0, min(recompute, default=0) - 2)
    shown = lines[start : start + _EXCERPT_LINES]
    head = (
        f"{len(schedule.forward)} runs in the forward, {len(schedule.backward)} in the backward, "
        f"{len(recompute)} of them recomputations"
    )
    return "\n".join([head, f"... runs {start} to {start + len(shown) - 1}:", *shown])


def of_simulation(graph: Graph, costs: Costs, chosen: Candidate, budget_bytes: int) -> str:
    """The simulated peak and time of a schedule."""
    found, schedule = chosen.simulation, chosen.schedule
    op = graph.ops[schedule.steps[found.peak_position]]
    half = "forward" if found.peak_position < len(schedule.forward) else "backward"
    lines = [
        f"budget           {budget_bytes:>10,} bytes",
        f"predicted peak   {found.peak_bytes:>10,} bytes, in run {found.peak_position}: {op.name} "
        f"of the {half}",
        f"saved values     {found.saved_bytes:>10,} bytes",
        f"predicted time   {found.time_ms:>10.3f} ms",
        "live at the peak:",
    ]
    lines += [
        f"  {size:>10,} bytes  {name}"
        for name, size in live_at(graph, costs, schedule, found.peak_position)
    ]
    return "\n".join(lines)


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
    """Random ops that have run and will run again."""
    held = set(schedule.steps[: position + 1]) & set(schedule.steps[position:])
    again = [graph.ops[index] for index in sorted(held) if schedule.steps.count(index) > 1]
    return [op for op in again if op.recompute_state_bytes]


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
    equal = sum(torch.equal(_gradient(own), _gradient(theirs)) for own, theirs in pairs)
    sizes = {
        "eager, measured peak": eager_bytes,
        "budget": budget_bytes,
        "predicted peak": chosen.simulation.peak_bytes,
        "measured peak": peak_bytes,
    }
    lines = [f"{name:<24} {size:>10,} bytes" for name, size in sizes.items()]
    lines.append(
        f"loss equal to eager's: {torch.equal(own_loss, eager_loss)}; gradients bitwise equal: "
        f"{equal} of {len(pairs)}; "
        f"generator state equal: {torch.equal(own_state, eager_state)}"
    )
    return "\n".join(lines)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / _KIB:,.1f}"


def _name(storage: Storage | None) -> str:
    return storage.name if storage else "none"
