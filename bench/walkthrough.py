"""One small model through every stage, with what each stage printed.

The source of the blocks in docs/internals/walkthrough.md.

    python -m bench.walkthrough            print every section
    python -m bench.walkthrough --write    write them between the markers of the document

The stages up to costs are called one by one, as a planner calls them, on the document's model; a
planner has the rest. The model is small enough to read, and it has dropout, a loss and an output
that the user holds. Sizes and the graph are the same at every run. Times are the machine's, and the
plan may depend on them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import command
from bench.measure import allocator_peak, gradients_of
from bench.pages import filled
from rockmate import Plan, Planner
from rockmate._torch.dispatch import is_op
from rockmate.capture.joint import capture_joint
from rockmate.capture.roles import Capture
from rockmate.capture.structure import flatten
from rockmate.costs.measure import measure_costs
from rockmate.graph.blocks import partition
from rockmate.graph.build import build_graph
from rockmate.graph.parameters import owner_names
from rockmate.graph.pass_options import PassOptions
from rockmate.graph.passes import GRAPH_PASSES, REWRITES, run_passes

DOCUMENT = command.ROOT / "docs" / "internals" / "walkthrough.md"
BUDGET_FRACTION = 0.52
_BOUND_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_EXCERPT_LINES = 16
_SEED = 0


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
    model, sample = _of_document()
    capture = capture_joint(model, *flatten(((), sample), what="the sample"))
    before = _call_counts(capture)
    yield _filled("capture", capture=capture, num_calls=before.total(), is_exact=True)
    capture = run_passes(REWRITES, capture)
    after = _call_counts(capture)
    names = [name for name in sorted({*before, *after}) if before[name] != after[name]]
    changed = [(name, (before[name], after[name])) for name in names]
    yield _filled("rewrite", changed=changed, is_exact=True)
    graph = run_passes(GRAPH_PASSES, build_graph(capture), PassOptions(owner_of=owner_names(model)))
    yield _section("graph", str(graph), is_exact=True)
    costs = measure_costs(graph)
    firsts = {cost: op for op, cost in reversed([*zip(graph.ops, costs.first, strict=True)])}
    yield _filled("costs", graph=graph, costs=costs, firsts=[*reversed(firsts.items())])
    yield _section("chain", str(partition(graph)), is_exact=True)
    yield from _planned(Planner(model, sample, numerics="bitwise"), model, sample)


def _planned(planner: Planner, model: nn.Module, sample: dict[str, Tensor]) -> Iterator[Section]:
    """The sections of the planner's results: a frontier, and one of its plans."""
    plan = planner.plan(BUDGET_FRACTION)
    yield _filled("frontier", plan=plan, planner=planner, points=planner.frontier())
    budgets = [int(fraction * planner.baseline_peak_bytes) for fraction in _BOUND_FRACTIONS]
    rows = [*zip(_BOUND_FRACTIONS, map(planner.plans(budgets).get, budgets), strict=True)]
    yield _filled("lower_bound", rows=rows)
    schedule, ops = plan.schedule, plan.snapshot.ops
    lines = schedule.rows([op.name for op in ops])
    again = [position for position, line in enumerate(lines) if " again" in line]
    start = max(0, min(again, default=0) - 2)
    shown = lines[start : start + _EXCERPT_LINES]
    yield _filled("schedule", schedule=schedule, num_again=len(again), start=start, shown=shown)
    found = plan.simulation
    op = ops[schedule.steps[found.peak_position]]
    yield _filled("simulation", plan=plan, found=found, op=op, live=plan.live_at_peak())
    program = planner.planned_call_of(plan).program
    yield _section("forward", _excerpt(program.forward.code), language="python")
    target = plan.graph.ops[schedule.steps[again[0]]].node.target
    code = _excerpt(program.backward.code, f"{_call_name(target)}(")
    yield _section("backward", code, language="python")
    yield _run(planner, plan, model, sample)


def _section(name: str, content: str, *, language: str = "text", is_exact: bool = False) -> Section:
    return Section(name=name, language=language, text=content, is_exact=is_exact)


def _filled(name: str, *, is_exact: bool = False, **parts: Any) -> Section:
    content = "\n".join(filled("walkthrough", section=name, **parts))
    return _section(name, content, is_exact=is_exact)


def _of_document() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the sample of the document's first code block."""
    (code,) = re.findall(r"## The model\n.*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    return names["model"], names["sample"]


def _call_counts(capture: Capture) -> Counter[str]:
    """Number of calls of each target in a joint graph."""
    calls = (node for node in capture.joint.graph.nodes if node.op == "call_function")
    return Counter(_call_name(node.target) for node in calls)


def _call_name(target: Any) -> str:
    return str(target) if is_op(target) else target.__name__


def _excerpt(code: str, first_shown: str = "") -> str:
    """Lines of an emitted function, its arguments left out.

    From just before `first_shown`, or the end of it.
    """
    lines = [line for line in code.strip().splitlines() if line.strip()]
    body = [line for line in lines[2:] if "next(args_iter)" not in line]
    num_arguments = len(lines) - 2 - len(body)
    found = [index - 2 for index, line in enumerate(body) if first_shown and first_shown in line]
    start = max(0, found[0] if found else len(body) - _EXCERPT_LINES)
    note = f"    # {num_arguments} arguments and {start} lines before these"
    return "\n".join([lines[0], note, *body[start : start + _EXCERPT_LINES]])


def _run(planner: Planner, plan: Plan, model: nn.Module, sample: dict[str, Tensor]) -> Section:
    """A planned step against eager, measured."""
    eager, found = copy.deepcopy(model), []
    for owner, module in ((eager, eager), (model, planner.module_of(plan, trial="never"))):
        losses: list[Tensor] = []

        def step(module: nn.Module = module, losses: list[Tensor] = losses) -> None:
            outputs = module(**sample)
            outputs["loss"].backward()
            losses[:] = [outputs["loss"].detach()]

        step()  # makes `.grad` and what libraries make on first use
        owner.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        peak_bytes = allocator_peak(step)
        found.append((peak_bytes, losses[0], torch.get_rng_state(), gradients_of(owner)))
    (eager_bytes, *theirs), (peak_bytes, *ours) = found
    equal = [torch.equal(*pair) for pair in zip(ours[:2], theirs[:2], strict=True)]
    num_equal = sum(torch.equal(ours[2][name], each) for name, each in theirs[2].items())
    parts: dict[str, Any] = {"eager_bytes": eager_bytes, "peak_bytes": peak_bytes, "plan": plan}
    parts |= {"num_equal": num_equal, "num_gradients": len(theirs[2])}
    return _filled("run", is_loss_equal=equal[0], is_state_equal=equal[1], **parts)


# --- into the document ----------------------------------------------------------------------------


def marked_blocks(document: str) -> dict[str, str]:
    """The generated blocks of a document, markers included, by name."""
    pattern = r"<!-- generated:(\w+) -->\n.*?<!-- /generated -->"
    return {match[1]: match[0] for match in re.finditer(pattern, document, flags=re.DOTALL)}


def write(found: Sequence[Section], path: Path = DOCUMENT) -> None:
    """Replaces the marked blocks of the document.

    Raises:
        ValueError: a section has no marker in the document, or a marker no section.
    """
    document = path.read_text()
    old = marked_blocks(document)
    names = {section.name for section in found}
    if names != old.keys():
        msg = f"sections and markers of {path.name} differ in {sorted(names ^ old.keys())}"
        raise ValueError(msg)
    for section in found:
        document = document.replace(old[section.name], section.block)
    path.write_text(document)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = command.parser("walkthrough", __doc__)
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
