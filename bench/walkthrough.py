"""One small model through every stage, with what each stage printed.

The source of the blocks in docs/internals/walkthrough.md.

    python -m bench.walkthrough            print every section
    python -m bench.walkthrough --write    write them between the markers of the document

The stages are called one by one, as a planner calls them, on a residual MLP. It is small enough to
read, and it has dropout, a loss and an output that the user holds. Sizes and the graph are the same
at every run. Times are the machine's, and the plan may depend on them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import command
from bench import walkthrough_text as text
from rockmate.capture.joint import capture_joint
from rockmate.capture.structure import flatten
from rockmate.costs.measure import measure_costs
from rockmate.graph.blocks import partition
from rockmate.graph.build import build_graph
from rockmate.graph.parameters import owner_names
from rockmate.graph.pass_options import PassOptions
from rockmate.graph.passes import GRAPH_PASSES, REWRITES, run_passes
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.strategies import Searches
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "internals" / "walkthrough.md"
BUDGET_FRACTION = 0.52
_SEED = 0
_BATCH, _WIDTH, _HIDDEN, _CLASSES, _NUM_LAYERS = 1024, 128, 512, 64, 3


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
    yield _section("model", _model_text(), language="python", is_exact=True)
    tensors, structure = flatten(((), sample), what="the sample")
    capture = capture_joint(model, tensors, structure)
    yield _section("capture", text.of_capture(capture), is_exact=True)
    before = text.call_counts(capture.joint)
    capture = run_passes(REWRITES, capture)
    after = text.call_counts(capture.joint)
    yield _section("rewrite", text.of_rewrites(before, after), is_exact=True)
    graph = run_passes(GRAPH_PASSES, build_graph(capture), PassOptions(owner_of=owner_names(model)))
    yield _section("graph", str(graph), is_exact=True)
    costs = measure_costs(graph)
    yield _section("costs", text.of_costs(graph, costs))
    chain = partition(graph)
    yield _section("chain", str(chain), is_exact=True)

    baseline = simulate(graph, baseline_schedule(graph), costs)
    budget_bytes = int(BUDGET_FRACTION * baseline.peak_bytes)
    yield _section("refinement", text.of_refinement(graph, chain, costs, budget_bytes))
    searches = Searches(graph, costs, rule=StoppingRule(time_limit_s=text.TIME_LIMIT_S))
    bound, search = searches.lower_bound, searches.local_search
    chosen = search.best_within(max(budget_bytes, search.minimum().simulation.peak_bytes))
    assert chosen is not None
    frontier = text.of_frontier(search, baseline, BUDGET_FRACTION, budget_bytes)
    yield _section("frontier", frontier)
    yield _section("lower_bound", text.of_lower_bound(bound, search, baseline))
    yield _section("schedule", text.of_schedule(graph, chosen.schedule))
    yield _section("simulation", text.of_simulation(graph, costs, chosen, budget_bytes))

    program = emit(graph, chosen.schedule, owner_names(model))
    yield _section("forward", text.of_code(program.forward_code), language="python")
    recomputed = text.first_recomputed(graph, chosen.schedule)
    backward = text.of_code(program.backward_code, recomputed)
    yield _section("backward", backward, language="python")
    result = text.of_run(model, tensors, capture, program, chosen, budget_bytes)
    yield _section("run", result)


def _section(name: str, content: str, *, language: str = "text", is_exact: bool = False) -> Section:
    return Section(name=name, language=language, text=content, is_exact=is_exact)


def _model_text() -> str:
    source = "\n\n\n".join(inspect.getsource(kind).rstrip() for kind in (Layer, Classifier))
    source = re.sub(r' *""".*"""\n\n|  # noqa: D102', "", source)
    sizes = f"width={_WIDTH}, hidden={_HIDDEN}, classes={_CLASSES}, num_layers={_NUM_LAYERS}"
    inputs = f"torch.randn({_BATCH}, {_WIDTH})"
    labels = f"torch.randint({_CLASSES}, ({_BATCH},))"
    return (
        f"{source}\n\nmodel = Classifier({sizes}).train()\n"
        f'sample = {{"x": {inputs}, "labels": {labels}}}'
    )


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
