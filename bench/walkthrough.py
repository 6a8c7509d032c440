"""One small model through every stage, with what each stage printed.

The source of the blocks in docs/internals/walkthrough.md.

    python -m bench.walkthrough            print every section
    python -m bench.walkthrough --write    put them into docs/internals/walkthrough.md, between its
    markers

The stages are called one by one, as `rockmate.planner` calls them, on a residual MLP that is small
enough to read and has what makes planning interesting: dropout, a loss inside, an output that the
user holds. Sizes and the graph are the same at every run; times are the machine's, and so may be
the plan that follows from them.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rockmate._torch.allocator import timeline
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.solver_time import SolverTime
from rockmate.capture.joint import capture_joint
from rockmate.capture.roles import Capture, Role
from rockmate.capture.structure import flatten
from rockmate.costs.cost import Costs
from rockmate.costs.measure import measure_costs
from rockmate.graph.blocks import partition, storages_of
from rockmate.graph.build import build_graph
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import GRAPH_PASSES, REWRITES, PassOptions, run_passes
from rockmate.planning.baseline_search import Searcher
from rockmate.planning.candidate import Candidate, linspace_int
from rockmate.planning.knapsack_family import KnapsackFamily
from rockmate.planning.moves import remove_recomputations, spill_until_feasible
from rockmate.planning.rotor_family import RotorFamily
from rockmate.planning.strategies import make_search
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.runtime.program import Program
from rockmate.schedule.schedule import Schedule, baseline_schedule, last_reads
from rockmate.schedule.simulate import Simulation, simulate

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "internals" / "walkthrough.md"
BUDGET_FRACTION = 0.52
_BOUND_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_MAX_EXCESS = 1.25  # peak over budget, of the schedules that are shown while they are made to fit
_NUM_LIMITS = 32  # on saved bytes, for schedules of one level
_TIME_LIMIT_S = 30.0
_SEED = 0
_BATCH, _WIDTH, _HIDDEN, _CLASSES, _NUM_LAYERS = 1024, 128, 512, 64, 3
_SHOWN_BLOCK = 1
_EXCERPT_LINES = 16
_KIB = 1024


class Layer(nn.Module):
    """A residual layer: two matrices, GELU between, dropout at the end."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


class Classifier(nn.Module):
    """A few such layers and a head; returns loss and scores, as a Hugging Face model does."""

    def __init__(self, width: int, hidden: int, classes: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(num_layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # noqa: D102
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one stage printed.

    Attributes:
        name: the marker in the document.
        language: of the code block.
        text: its content.
        is_exact: whether every run prints the same; where not, times stand in it or follow into it.
    """

    name: str
    language: str
    text: str
    is_exact: bool

    @property
    def block(self) -> str:
        """The marked code block that stands in the document."""
        return (
            f"<!-- generated:{self.name} -->\n```{self.language}\n{self.text}\n```\n<!-- "
            "/generated -->"
        )


def sections() -> Iterator[Section]:
    """Runs the pipeline and gives each stage's section as it is done."""
    torch.manual_seed(_SEED)
    model = Classifier(_WIDTH, _HIDDEN, _CLASSES, _NUM_LAYERS).train()
    sample = {"x": torch.randn(_BATCH, _WIDTH), "labels": torch.randint(_CLASSES, (_BATCH,))}
    yield Section(name="model", language="python", text=_model_text(), is_exact=True)

    tensors, structure = flatten(((), sample), what="the sample")
    capture = capture_joint(model, tensors, structure)
    yield Section(name="capture", language="text", text=_capture_text(capture), is_exact=True)

    before = _call_counts(capture.joint)
    capture = run_passes(REWRITES, capture)
    yield Section(
        name="rewrite",
        language="text",
        text=_rewrite_text(before, _call_counts(capture.joint)),
        is_exact=True,
    )

    graph = run_passes(GRAPH_PASSES, build_graph(capture), PassOptions(owner_of=owner_names(model)))
    yield Section(name="graph", language="text", text=str(graph), is_exact=True)

    costs = measure_costs(graph)
    yield Section(name="costs", language="text", text=_costs_text(graph, costs), is_exact=False)

    chain = partition(graph)
    yield Section(name="chain", language="text", text=str(chain), is_exact=True)

    baseline = simulate(graph, baseline_schedule(graph), costs)
    levels = RotorFamily(
        graph, chain, costs, max_bytes=baseline.peak_bytes, solver_time=SolverTime(_TIME_LIMIT_S)
    )
    yield Section(name="options", language="text", text=_options_text(levels), is_exact=False)
    yield Section(name="rotor", language="text", text=_rotor_text(levels), is_exact=False)

    budget_bytes = int(BUDGET_FRACTION * baseline.peak_bytes)
    yield Section(
        name="improvement",
        language="text",
        text=_improvement_text(levels, budget_bytes),
        is_exact=False,
    )

    certificate = LowerBound(graph, costs, baseline.time_ms, solver_time=SolverTime(_TIME_LIMIT_S))
    search = make_search(
        "rockmate",
        graph,
        chain,
        costs,
        lower_bound=certificate,
        solver_time=SolverTime(_TIME_LIMIT_S),
    )
    chosen = search.best_within(max(budget_bytes, search.minimum().simulation.peak_bytes))
    assert chosen is not None
    yield Section(
        name="frontier",
        language="text",
        text=_frontier_text(search, baseline, budget_bytes),
        is_exact=False,
    )

    yield Section(
        name="certificate",
        language="text",
        text=_certificate_text(certificate, search, baseline),
        is_exact=False,
    )
    yield Section(
        name="schedule",
        language="text",
        text=_schedule_text(graph, chosen.schedule),
        is_exact=False,
    )
    yield Section(
        name="simulation",
        language="text",
        text=_simulation_text(graph, costs, chosen, budget_bytes),
        is_exact=False,
    )

    program = emit(graph, chosen.schedule, owner_names(model))
    yield Section(
        name="forward", language="python", text=_code_text(program.forward_code), is_exact=False
    )
    backward = _code_text(program.backward_code, _again_in(graph, chosen.schedule))
    yield Section(name="backward", language="python", text=backward, is_exact=False)
    yield Section(
        name="run",
        language="text",
        text=_run_text(model, tensors, capture, program, chosen, budget_bytes),
        is_exact=False,
    )


# --- one function a stage -------------------------------------------------------------------------


def _model_text() -> str:
    source = "\n\n\n".join(inspect.getsource(kind).rstrip() for kind in (Layer, Classifier))
    source = re.sub(r' *""".*"""\n\n|  # noqa: D102', "", source)
    sizes = f"width={_WIDTH}, hidden={_HIDDEN}, classes={_CLASSES}, num_layers={_NUM_LAYERS}"
    return (
        f"{source}\n\nmodel = Classifier({sizes}).train()\n"
        "sample = "
        f'{{"x": torch.randn({_BATCH}, {_WIDTH}), "labels": torch.randint({_CLASSES}, ({_BATCH},))}}'  # noqa: E501
    )


def _capture_text(capture: Capture) -> str:
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


def _call_counts(joint: fx.GraphModule) -> Counter[str]:
    return Counter(
        _call_name(node.target) for node in joint.graph.nodes if node.op == "call_function"
    )


def _call_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


def _rewrite_text(before: Counter[str], after: Counter[str]) -> str:
    lines = [f"{'call':<40} before  after"]
    for name in sorted(before.keys() | after.keys()):
        if before[name] != after[name]:
            lines.append(f"{name:<40} {before[name]:>6} {after[name]:>6}")
    return "\n".join(lines)


def _costs_text(graph: Graph, costs: Costs) -> str:
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


def _options_text(levels: RotorFamily) -> str:
    block = levels.chain.blocks[_SHOWN_BLOCK]
    storages = storages_of(block)
    lines = [
        f"block {_SHOWN_BLOCK} ({block.name}): input {_name(block.input)}, output "
        f"{_name(block.output)}",
        f"{'':>6} {'saved':>8} {'forward peak':>13} {'backward peak':>14} {'forward':>9} "
        f"{'backward':>9}",
        f"{'option':>6} {'KiB':>8} {'KiB':>13} {'KiB':>14} {'ms':>9} {'ms':>9}  saved beside the "
        "output",
    ]
    for index, option in enumerate(levels.options_of(_SHOWN_BLOCK, _SHOWN_BLOCK)):
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
        f"{levels.solver.num_distinct} distinct blocks and spans solved for "
        f"{len(levels.rotor_chain.spans)}"
    )
    return "\n".join(lines)


def _rotor_text(levels: RotorFamily) -> str:
    lines = [
        f"{'stage':>5} {'input x, KiB':>13} {'gradient d, KiB':>16} {'forward, ms':>12} "
        f"{'forward peak, KiB':>18}"
    ]
    for index, stage in enumerate(levels.rotor_chain.stages):
        lines.append(
            f"{index:>5} {_kib(stage.input_bytes):>13} {_kib(stage.output_gradient_bytes):>16} "
            f"{stage.forward_ms:>12.3f} "
            f"{_kib(stage.forward_peak_bytes):>18}"
        )
    points = levels.table.breakpoints()
    lines += ["", f"{len(points)} breakpoints; table unit {levels.table.unit_bytes:,} bytes"]
    for budget_bytes, time_ms in (points[0], points[len(points) // 2], points[-1]):
        lines.append(
            f"budget {_kib(budget_bytes)} KiB, {time_ms:.3f} ms: "
            f"{levels.table.sequence(budget_bytes)}"
        )
    return "\n".join(lines)


def _improvement_text(levels: RotorFamily, budget_bytes: int) -> str:
    """What each proposal near the budget becomes when room is made and spent.

    What `rockmate.local_search` does with some of them.
    """
    graph, costs = levels.graph, levels.solver.costs
    one_level = KnapsackFamily(graph, levels.chain, costs, solver_time=SolverTime(_TIME_LIMIT_S))
    limits = linspace_int(0, int(_MAX_EXCESS * budget_bytes), _NUM_LIMITS)
    schedules = {
        "knapsack": [
            schedule
            for limit in limits
            if (schedule := one_level.fastest_saving(limit)) is not None
        ],
        "rotor": [maker() for maker in levels.makers()],
    }
    lines = [
        f"budget {_kib(budget_bytes)} KiB",
        f"{'':<14} {'start':>19}  {'repaired':>19}  {'refined':>19}",
        f"{'family':<14} {'KiB':>9} {'ms':>9}  {'KiB':>9} {'ms':>9}  {'KiB':>9} {'ms':>9}",
    ]
    for family, proposals in schedules.items():
        for candidate in _fastest_of_each_peak(levels, proposals, int(_MAX_EXCESS * budget_bytes)):
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
    levels: RotorFamily, schedules: Iterable[Schedule], max_bytes: int
) -> list[Candidate]:
    """One schedule for each peak in whole KiB, by growing peak."""
    fastest: dict[int, Candidate] = {}
    for schedule in schedules:
        simulation = simulate(levels.graph, schedule, levels.solver.costs)
        peak_kib = simulation.peak_bytes // _KIB
        if simulation.peak_bytes > max_bytes or (
            peak_kib in fastest and fastest[peak_kib].simulation.time_ms <= simulation.time_ms
        ):
            continue
        fastest[peak_kib] = Candidate(schedule=schedule, simulation=simulation)
    return [fastest[peak_kib] for peak_kib in sorted(fastest)]


def _size_and_time(simulation: Simulation) -> str:
    return f"{_kib(simulation.peak_bytes):>9} {simulation.time_ms:>9.3f}"


def _frontier_text(search: Searcher, baseline: Simulation, budget_bytes: int) -> str:
    lines = [
        f"baseline: {_kib(baseline.peak_bytes)} KiB, {baseline.time_ms:.3f} ms; "
        f"budget {BUDGET_FRACTION}: {_kib(budget_bytes)} KiB; smallest peak: "
        f"{_kib(search.minimum().simulation.peak_bytes)} KiB",
        "budget, KiB  peak, KiB  of baseline  time, ms  of baseline  recomputed ops",
    ]
    for budget, candidate in search.frontier():
        found = candidate.simulation
        lines.append(
            f"{_kib(budget):>11} {_kib(found.peak_bytes):>10} "
            f"{found.peak_bytes / baseline.peak_bytes:>12.3f} {found.time_ms:>9.3f} "
            f"{found.time_ms / baseline.time_ms:>12.3f} "
            f"{candidate.schedule.num_recomputations():>15}"
        )
    return "\n".join(lines)


def _certificate_text(certificate: LowerBound, search: Searcher, baseline: Simulation) -> str:
    lines = [
        f"{len(certificate.points)} program points",
        f"{'while it runs':<24} {'live in any schedule, KiB':>26} {'backward ops after it':>22}",
    ]
    for point in certificate.points:
        lines.append(f"{point.op.name:<24} {_kib(point.min_bytes):>26} {len(point.after):>22}")
    lines += [
        "",
        f"{'budget':>6} {'KiB':>9} {'lower bound, ms':>22} {'plan, ms':>10} "
        f"{'gap of the baseline':>20}",
    ]
    for fraction in _BOUND_FRACTIONS:
        budget_bytes = int(fraction * baseline.peak_bytes)
        bound_ms = certificate.bound_ms(budget_bytes)
        best = search.best_within(budget_bytes)
        row = f"{fraction:>6} {_kib(budget_bytes):>9} {bound_ms:>22.3f}"
        if best is not None:
            time_ms = best.simulation.time_ms
            row += f" {time_ms:>10.3f} {(time_ms - bound_ms) / baseline.time_ms:>20.2%}"
        lines.append(row)
    return "\n".join(lines)


def _schedule_text(graph: Graph, schedule: Schedule) -> str:
    lines = schedule.to_text(graph).splitlines()
    recompute = [position for position, line in enumerate(lines) if " again" in line]
    start = max(0, min(recompute, default=0) - 2)
    shown = lines[start : start + _EXCERPT_LINES]
    head = (
        f"{len(schedule.forward)} runs in the forward, {len(schedule.backward)} in the backward, "
        f"{len(recompute)} of them again"
    )
    return "\n".join([head, f"... runs {start} to {start + len(shown) - 1}:", *shown])


def _simulation_text(graph: Graph, costs: Costs, chosen: Candidate, budget_bytes: int) -> str:
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


def _code_text(code: str, first_shown: str = "") -> str:
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


def _again_in(graph: Graph, schedule: Schedule) -> str:
    """The target of the first recomputed op in the emitted code; empty if there is none."""
    seen = set(schedule.forward)
    recompute = next((graph.ops[index] for index in schedule.backward if index in seen), None)
    return _call_name(recompute.node.target) + "(" if recompute else ""


def _run_text(
    model: nn.Module,
    tensors: Sequence[Tensor],
    capture: Capture,
    program: Program,
    chosen: Candidate,
    budget_bytes: int,
) -> str:
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


# --- into the document ----------------------------------------------------------------------------


def marked_blocks(text: str) -> dict[str, str]:
    """The generated blocks of a document, markers included, by name."""
    pattern = r"<!-- generated:(\w+) -->\n.*?<!-- /generated -->"
    return {match[1]: match[0] for match in re.finditer(pattern, text, flags=re.DOTALL)}


def write(found: Sequence[Section], path: Path = DOCUMENT) -> None:
    """Replaces the marked blocks of the document.

    Raises:
        ValueError: a section has no marker in the document, or a marker no section.
    """
    text = path.read_text()
    old = marked_blocks(text)
    names = {section.name for section in found}
    if names != old.keys():
        msg = f"sections and markers of {path.name} differ in {sorted(names ^ old.keys())}"
        raise ValueError(msg)
    for section in found:
        text = text.replace(old[section.name], section.block)
    path.write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="bench.walkthrough", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--write", action="store_true", help=f"replace the marked blocks of {DOCUMENT.name}"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for section in sections():
        found.append(section)
        if not options.write:
            sys.stdout.write(f"--- {section.name}\n{section.text}\n\n")
    if options.write:
        write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
