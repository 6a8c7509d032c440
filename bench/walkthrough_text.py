"""The texts of `bench.walkthrough`: one function for each stage."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate._torch.allocator import timeline
from rockmate._torch.ops import is_op
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.capture.roles import Capture, Role
from rockmate.costs.cost import Costs
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


def of_costs(graph: Graph, costs: Costs) -> str:
    """The distinct costs."""
    lines = [
        f"{len(graph.ops)} ops, {costs.num_distinct} distinct calls",
        f"{'op':<28} {'phase':<9} {'makes, bytes':>12} {'time, ms':>9} {'workspace, bytes':>17}",
    ]
    seen = set()
    for op, cost in zip(graph.ops, costs.first, strict=True):
        if cost not in seen:
            seen.add(cost)
            lines.append(
                f"{op.name:<28} {op.phase.value:<9} {op.written_bytes:>12,} {cost.time_ms:>9.3f} "
                f"{cost.overhead_bytes:>17,}"
            )
    return "\n".join(lines)


def of_options(rotor: RotorFamily) -> str:
    """The options of one block."""
    block = rotor.chain.blocks[_SHOWN_BLOCK]
    storages = storages_of(block)
    lines = [
        f"block {_SHOWN_BLOCK} ({block.name}): input {_name(block.input)}, output "
        f"{_name(block.output)}",
        f"{'':>6} {'saved':>8} {'forward peak':>13} {'backward peak':>14} {'forward':>9} "
        f"{'backward':>9}",
        f"{'option':>6} {'KiB':>8} {'KiB':>13} {'KiB':>14} {'ms':>9} {'ms':>9}  saved beside the "
        "output",
    ]
    for index, option in enumerate(rotor.options_of(_SHOWN_BLOCK, _SHOWN_BLOCK)):
        saved = " ".join(
            storages[position].name
            for position in option.saved
            if storages[position] is not block.output
        )
        times = f"{option.forward.time_ms:>9.3f} {option.backward.time_ms:>9.3f}"
        lines.append(
            f"{index:>6} {_kib(option.saved_bytes):>8} {_kib(option.forward.peak_bytes):>13} "
            f"{_kib(option.backward.peak_bytes):>14} {times}  {saved or '-'}"
        )
    lines.append(
        f"{len(rotor.solver.solved.by_key)} distinct blocks and spans solved for "
        f"{len(rotor.rotor_chain.spans)}"
    )
    return "\n".join(lines)


def of_rotor(rotor: RotorFamily) -> str:
    """Rotor's chain and three of its sequences."""
    lines = [
        f"{'stage':>5} {'input x, KiB':>13} {'gradient d, KiB':>16} {'forward, ms':>12} "
        f"{'forward peak, KiB':>18}"
    ]
    for index, stage in enumerate(rotor.rotor_chain.stages):
        lines.append(
            f"{index:>5} {_kib(stage.input_bytes):>13} {_kib(stage.output_gradient_bytes):>16} "
            f"{stage.forward_ms:>12.3f} "
            f"{_kib(stage.forward_peak_bytes):>18}"
        )
    points = rotor.table.breakpoints()
    lines += ["", f"{len(points)} breakpoints; table unit {rotor.table.unit_bytes:,} bytes"]
    for budget_bytes, time_ms in (points[0], points[len(points) // 2], points[-1]):
        lines.append(
            f"budget {_kib(budget_bytes)} KiB, {time_ms:.3f} ms: "
            f"{rotor.table.sequence(budget_bytes)}"
        )
    return "\n".join(lines)


def of_refinement(rotor: RotorFamily, budget_bytes: int) -> str:
    """Each start near the budget, after repair and after refinement, as the local search does."""
    graph, costs = rotor.graph, rotor.solver.costs
    one_level = KnapsackFamily(Solving(graph, rotor.chain, costs, SolverTime(TIME_LIMIT_S)))
    limits = linspace_int(0, int(_MAX_EXCESS * budget_bytes), _NUM_LIMITS)
    schedules = {
        "knapsack": [
            schedule
            for limit in limits
            if (schedule := one_level.fastest_saving(limit)) is not None
        ],
        "rotor": [maker() for maker in rotor.makers()],
    }
    lines = [
        f"budget {_kib(budget_bytes)} KiB",
        f"{'':<14} {'start':>19}  {'repaired':>19}  {'refined':>19}",
        f"{'family':<14} {'KiB':>9} {'ms':>9}  {'KiB':>9} {'ms':>9}  {'KiB':>9} {'ms':>9}",
    ]
    for family, proposals in schedules.items():
        for candidate in _fastest_of_each_peak(rotor, proposals, int(_MAX_EXCESS * budget_bytes)):
            schedule, proposed = candidate.schedule, candidate.simulation
            row = f"{family:<14} {_size_and_time(proposed)}"
            fitting = spill_until_feasible(graph, costs, schedule, proposed, budget_bytes)
            if fitting is None:
                lines.append(f"{row}  nothing left to evict")
                continue
            fitted = simulate(graph, fitting, costs)
            spent = simulate(
                graph, remove_recomputations(graph, costs, fitting, fitted, budget_bytes), costs
            )
            lines.append(f"{row}  {_size_and_time(fitted)}  {_size_and_time(spent)}")
    return "\n".join(lines)


def _fastest_of_each_peak(
    rotor: RotorFamily, schedules: Iterable[Schedule], max_bytes: int
) -> list[Candidate]:
    """One schedule for each peak in whole KiB, by growing peak."""
    fastest: dict[int, Candidate] = {}
    for schedule in schedules:
        simulation = simulate(rotor.graph, schedule, rotor.solver.costs)
        peak_kib = simulation.peak_bytes // _KIB
        if simulation.peak_bytes > max_bytes or (
            peak_kib in fastest and fastest[peak_kib].simulation.time_ms <= simulation.time_ms
        ):
            continue
        fastest[peak_kib] = Candidate(schedule=schedule, simulation=simulation)
    return [fastest[peak_kib] for peak_kib in sorted(fastest)]


def _size_and_time(simulation: Simulation) -> str:
    return f"{_kib(simulation.peak_bytes):>9} {simulation.time_ms:>9.3f}"


def of_frontier(search: Searcher, baseline: Simulation, fraction: float, budget_bytes: int) -> str:
    """The frontier of a search."""
    low, high = search.minimum().peak_bytes, baseline.peak_bytes
    frontier = frontier_at(linspace_int(low, high, FRONTIER_POINTS), search.best_within)
    lines = [
        f"baseline: {_kib(baseline.peak_bytes)} KiB, {baseline.time_ms:.3f} ms; "
        f"budget {fraction}: {_kib(budget_bytes)} KiB; smallest peak: "
        f"{_kib(search.minimum().simulation.peak_bytes)} KiB",
        "budget, KiB  peak, KiB  of baseline  time, ms  of baseline  recomputed ops",
    ]
    for budget, candidate in frontier:
        found = candidate.simulation
        lines.append(
            f"{_kib(budget):>11} {_kib(found.peak_bytes):>10} "
            f"{found.peak_bytes / baseline.peak_bytes:>12.3f} {found.time_ms:>9.3f} "
            f"{found.time_ms / baseline.time_ms:>12.3f} "
            f"{candidate.schedule.num_recomputations():>15}"
        )
    return "\n".join(lines)


def of_lower_bound(bound: LowerBound, search: Searcher, baseline: Simulation) -> str:
    """Program points, and the bound against the plan at some budgets."""
    lines = [
        f"{len(bound.points)} program points",
        f"{'while it runs':<24} {'live in any schedule, KiB':>26} {'backward ops after it':>22}",
    ]
    for point in bound.points:
        lines.append(f"{point.op.name:<24} {_kib(point.min_bytes):>26} {len(point.after):>22}")
    lines += [
        "",
        f"{'budget':>6} {'KiB':>9} {'lower bound, ms':>22} {'plan, ms':>10} "
        f"{'gap of the baseline':>20}",
    ]
    for fraction in _BOUND_FRACTIONS:
        budget_bytes = int(fraction * baseline.peak_bytes)
        bound_ms = bound.bound_ms(budget_bytes)
        best = search.best_within(budget_bytes)
        row = f"{fraction:>6} {_kib(budget_bytes):>9} {bound_ms:>22.3f}"
        if best is not None:
            time_ms = best.simulation.time_ms
            row += f" {time_ms:>10.3f} {(time_ms - bound_ms) / baseline.time_ms:>20.2%}"
        lines.append(row)
    return "\n".join(lines)


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

    measured = {}
    for name, step, owner in (("eager", eager_step, eager), ("planned", planned_step, model)):
        step()  # makes `.grad` and what libraries make on first use
        owner.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        loss = []
        measured[name] = (
            timeline(lambda step=step, loss=loss: loss.append(step().detach())),
            loss[0],
            torch.get_rng_state(),
        )
    (eager_memory, eager_loss, eager_state), (memory, loss, state) = (
        measured["eager"],
        measured["planned"],
    )
    pairs = list(zip(model.parameters(), eager.parameters(), strict=True))
    equal = sum(torch.equal(_gradient(own), _gradient(theirs)) for own, theirs in pairs)
    predicted = chosen.simulation.peak_bytes
    return "\n".join(
        [
            f"eager, measured peak     {eager_memory.peak_bytes:>10,} bytes",
            f"budget                   {budget_bytes:>10,} bytes",
            f"predicted peak           {predicted:>10,} bytes",
            f"measured peak            {memory.peak_bytes:>10,} bytes",
            f"loss equal to eager's: {torch.equal(loss, eager_loss)}; gradients bitwise equal: "
            f"{equal} of {len(pairs)}; "
            f"generator state equal: {torch.equal(state, eager_state)}",
        ]
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / _KIB:,.1f}"


def _name(storage: Storage | None) -> str:
    return storage.name if storage else "none"
