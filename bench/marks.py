"""Random marks on random small models: do plans keep them, and is the lower bound one?

    python -m bench.marks --num 500                 # writes bench/results/marks_cpu_<yyyymm>.*
    python -m bench.marks --first 250 --num 250     # a part; lines are added

A case draws a model, names for some of its values, and marks by name, op and submodule; the marks
are drawn again while they contradict each other. It is planned for several budgets by several
strategies, with costs estimated for a machine.

The checker reads plans as the files that `Plan.save` writes, with nothing of the library: which
values a schedule has in memory between forward and backward, how often ops run, how long all of it
takes. A value's mark in the file has to be one that was asked for.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import command
from bench.machine import machine_text
from bench.pages import all_row, filled

WIDTHS = (8, 24, 40)
STRATEGIES = ("rockmate", "rotor", "chen")
SHARES = (1.0, 0.7, 0.5)
"""Budgets, as shares of the peak without recomputation; the smallest peak is one more."""

_UNARY = ("tanh", "sigmoid", "gelu", "exp", "norm", "dropout", "softmax")
_BINARY = ("mul", "add", "cat")
_OPS = ("aten.tanh", "aten.sigmoid", "aten.gelu", "aten.exp", "aten.addmm", "aten.mul")
_MAX_DRAWS = 20
_ROUNDING = 1e-9
_NUM_IN_LINE = 20  # models
_COUNTS = ("num_models", "num_plans", "num_marked_values", "num_refused_marks")


# --- a random model -------------------------------------------------------------------------------


class RandomModel(nn.Module):
    """Layers and elementwise ops in a random acyclic graph; some values have names."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        self.steps: list[tuple[str, tuple[int, ...], int, bool]] = []
        self.has_dropout = rng.random() < 0.3
        self.width = rng.choice(WIDTHS)
        widths = [self.width]
        for _ in range(rng.randint(6, 14)):
            widths.append(self._add_step(rng, widths))
        self.last = nn.Linear(widths[-1], 4)

    def _add_step(self, rng: random.Random, widths: Sequence[int]) -> int:
        """Adds a step that reads earlier values; the width of what it makes."""
        # Most read the newest value, so that the graph is deep.
        source = len(widths) - 1 if rng.random() < 0.7 else rng.randrange(len(widths))
        is_named, kind = rng.random() < 0.5, rng.random()
        if kind < 0.35:
            self.layers.append(nn.Linear(widths[source], width := rng.choice(WIDTHS)))
            self.steps.append(("linear", (source,), len(self.layers) - 1, is_named))
            return width
        others = [place for place, width in enumerate(widths) if width == widths[source]]
        if kind < 0.6:
            name = rng.choice(_BINARY)
            self.steps.append((name, (source, rng.choice(others)), 0, is_named))
            return widths[source]
        name = rng.choice(_UNARY)
        if name == "dropout" and not self.has_dropout:
            name = "tanh"
        if name == "norm":
            self.norms.append(nn.LayerNorm(widths[source]))
        self.steps.append((name, (source,), len(self.norms) - 1, is_named))
        return widths[source]

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        import rockmate

        values = [x]
        for place, (name, sources, layer, is_named) in enumerate(self.steps):
            value = self._made(name, [values[source] for source in sources], layer)
            values.append(rockmate.name(value, f"v{place}") if is_named else value)
        loss = self.last(values[-1]).square().mean()
        # Whatever nothing else reads has a gradient too.
        return loss + sum(value.mean() for value in values[1:])

    def _made(self, name: str, inputs: list[Tensor], layer: int) -> Tensor:
        if name in ("linear", "norm"):
            return (self.layers if name == "linear" else self.norms)[layer](inputs[0])
        return _FUNCTIONS[name](*inputs)


def _halves(one: Tensor, other: Tensor) -> Tensor:
    half = one.shape[1] // 2
    return torch.cat([one[:, :half], other[:, half:]], 1)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "add": lambda one, other: one + 0.5 * other,
    "cat": _halves,
    "exp": lambda x: torch.exp(0.1 * x),
    "gelu": functional.gelu,
    "dropout": lambda x: functional.dropout(x, 0.1),
    "softmax": lambda x: torch.softmax(x, 1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def drawn_marks(model: RandomModel, rng: random.Random) -> dict[str, str]:
    """Marks by name, op and submodule."""
    names = [f"v{place}" for place, step in enumerate(model.steps) if step[3]]
    paths = [f"layers.{index}" for index in range(len(model.layers))]
    share = rng.choice((0.15, 0.3, 0.6))
    patterns = [name for name in names if rng.random() < share]
    patterns += [op for op in _OPS if rng.random() < share / 4]
    patterns += [path for path in paths if rng.random() < share / 3]
    words = rng.choice((("save",), ("recompute",), ("save", "recompute")))
    return {pattern: rng.choice(words) for pattern in patterns}


# --- the checker ----------------------------------------------------------------------------------

Content = Mapping[str, Any]


def faults(content: Content, marks: Mapping[str, str]) -> list[str]:
    """What is wrong with a plan's file, given the marks that were asked for."""
    ops = {op["name"]: op for op in content["ops"]}
    runs = [line.split() for line in content["schedule"]]
    place_of = [run[0] for run in runs]
    reads = [set(ops[run[2]]["reads"]) for run in runs]
    writes = [set(ops[run[2]]["writes"]) for run in runs]
    counts = Counter(run[2] for run in runs)
    border = place_of.index("backward") if "backward" in place_of else len(runs)
    found = []
    for index, storage in enumerate(content["storages"]):
        word = storage.get("mark")
        if not word:
            continue
        sources = [each for each in storage["mark_sources"] if marks.get(each) == word]
        if not sources:
            found.append(f"{storage['name']} has a mark that was not asked for")
        made = [place for place, written in enumerate(writes) if index in written]
        makers = {runs[place][2] for place in made}
        if word == "save" and any(counts[maker] > 1 for maker in makers):
            found.append(f"{storage['name']} is to be saved, and its op runs again")
        if word == "recompute":
            # The next event of the value after the border must be a run of its op, not a read.
            later = [place for place in range(border, len(runs)) if index in reads[place]]
            again = [place for place in made if place >= border]
            if later and (not again or min(later) < min(again)):
                found.append(f"{storage['name']} is to be recomputed, and is read as it was saved")
    total_ms = _total_ms(content, runs)
    if abs(total_ms - content["predicted_ms"]) > 1e-6 * total_ms:
        found.append(f"the schedule takes {total_ms} ms, not {content['predicted_ms']}")
    if content["lower_bound_ms"] > content["predicted_ms"] * (1 + _ROUNDING):
        found.append(f"the bound {content['lower_bound_ms']} is above {content['predicted_ms']}")
    if content["predicted_peak_bytes"] > content["budget_bytes"]:
        found.append("the peak is above the budget")
    return found


def _total_ms(content: Content, runs: Sequence[Sequence[str]]) -> float:
    places = {op["name"]: place for place, op in enumerate(content["ops"])}
    seen: set[str] = set()
    total_ms = 0.0
    for run in runs:
        first_ms, _, again_ms, _ = content["costs"][places[run[2]]]
        total_ms += again_ms if run[2] in seen else first_ms
        seen.add(run[2])
    return total_ms


# --- one case -------------------------------------------------------------------------------------


def checked(seed: int) -> tuple[Counter[str], list[str]]:
    """Counts of what was looked at in a case, and its faults."""
    from rockmate import MarkError, Planner

    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomModel(rng).train()
    sample = torch.randn(rng.choice((16, 48)), model.width)
    counts: Counter[str] = Counter()
    for _ in range(_MAX_DRAWS):
        marks = drawn_marks(model, rng)
        try:
            planner = Planner(model, sample, machine="cpu-avx2", marks=marks, numerics="bitwise")
            break
        except MarkError:  # contradictions, and ops that the model lacks
            counts["num_refused_marks"] += 1
    else:
        return counts, [f"seed {seed}: no marks in {_MAX_DRAWS} draws"]
    found, times_ms = [], dict[int, float]()
    budgets = [share * planner.baseline_peak_bytes for share in SHARES]
    for budget in {*map(int, budgets), planner.minimum_peak_bytes}:
        for strategy in STRATEGIES:
            if budget < planner.minimum_peak(strategy):
                continue
            content = json.loads(planner.plan(budget, strategy=strategy).to_text())
            counts["num_plans"] += 1
            found += [f"seed {seed}, {strategy} at {budget}: {x}" for x in faults(content, marks)]
            predicted_ms = content["predicted_ms"]
            times_ms[budget] = min(times_ms.get(budget, predicted_ms), predicted_ms)
            if content["lower_bound_ms"] > times_ms[budget] * (1 + _ROUNDING):
                found.append(f"seed {seed}, {strategy} at {budget}: a bound above another's plan")
            counts["num_marked_values"] += sum("mark" in each for each in content["storages"])
    return counts, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks cases and writes the page; exit code 1 if a case has a fault."""
    parser = command.parser("marks", __doc__, stem="marks_cpu")
    parser.add_argument("--num", type=int, default=500, help="of models (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: 0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.num)
    starts = range(0, len(seeds), _NUM_IN_LINE)
    found = (checked_line(seeds[begin : begin + _NUM_IN_LINE]) for begin in starts)
    command.run("marks", options, found, page)
    lines = command.read(command.lines_of(options))
    return 0 if all(line["num_kept"] == line["num_models"] for line in lines) else 1


def checked_line(seeds: range) -> dict[str, Any]:
    """What was looked at in some cases; faults go to standard error."""
    counts: Counter[str] = Counter()
    num_kept = 0
    for seed in seeds:
        case_counts, case_faults = checked(seed)
        counts += case_counts
        num_kept += not case_faults
        for line in case_faults:
            sys.stderr.write(f"{line}\n")
    return {
        "command": f"python -m bench.marks --first {seeds[0]} --num {len(seeds)}",
        "first": seeds[0], "num_models": len(seeds),
        "num_kept": num_kept, **counts,
    }  # fmt: skip


def page(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The target, and what was looked at."""

    def total(name: str) -> int:
        return sum(line.get(name, 0) for line in lines)

    what = "plans keep the marks, and no bound is above a plan"
    row = all_row(what, total("num_kept"), total("num_models"))
    return filled(
        "marks",
        machine=machine_text({**lines[-1], "command": "python -m bench.marks"}),
        target=row.text,
        counts={name.removeprefix("num_"): total(name) for name in _COUNTS},
    )


if __name__ == "__main__":
    sys.exit(main())
