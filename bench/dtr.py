"""DTR, simulated: eviction at run time op by op, to compare with and to learn from.

    python -m bench.dtr                          # bench/results/dtr_linear.md and .png
    python -m bench.dtr --layers 256 --output /tmp/dtr

Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021) keeps a budget without a plan. Before
an op runs, missing inputs are made again, recursively, and tensors are evicted until its output
fits: each time the one of the least heuristic value. With c the time of the op that made a tensor,
m its size and s the time since its last use (staleness):

| name | value |
|---|---|
| h_DTR | (c + times of its evicted neighborhood) / (m s) |
| h_DTR_eq | the same, with neighborhoods kept as equivalence classes |
| h_DTR_local | c / (m s) |
| LRU | 1 / s |
| largest | 1 / m |

The evicted neighborhood of a tensor is what is evicted among its ancestors and descendants and
connected to it through evicted tensors: what has to run again with it. A tensor is given up for
good when the program releases it and nothing evicted needs it.

The page shows the paper's first theorem: a linear network of N layers, forward and backward, within
about 2 sqrt(N) tensors takes O(N) ops with h_DTR; the other heuristics are beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.pages import table

RESULTS = Path(__file__).parent / "results"


class Op(NamedTuple):
    """An op of one output; output i is that of op i.

    Attributes:
        inputs: outputs that it reads.
        time: that it takes.
        size: of its output.
        releases: outputs that the program reads no more after it.
    """

    inputs: tuple[int, ...]
    time: float = 1.0
    size: float = 1.0
    releases: tuple[int, ...] = ()


class OutOfBudgetError(Exception):
    """Nothing can be evicted, and the next output does not fit."""


class Simulation:
    """A run of a program within a budget.

    Attributes:
        executed: ops in the order in which they ran.
        evicted_at: for each eviction, the number of ops that had run, and the output.
    """

    def __init__(
        self,
        program: Sequence[Op],
        budget: float,
        heuristic: str,
        *,
        most_ops: float = math.inf,
    ) -> None:
        """Prepares; `run` runs.

        Args:
            program: ops in order.
            budget: bound on the sizes that are live at once.
            heuristic: of `HEURISTICS`.
            most_ops: a run of more ends, with a time of infinity.
        """
        self._most_ops = most_ops
        self._program, self._budget = program, budget
        self._value = HEURISTICS[heuristic]
        self._readers: list[list[int]] = [[] for _ in program]
        for number, op in enumerate(program):
            for each in op.inputs:
                self._readers[each].append(number)
        self._live: set[int] = set()
        self._made: set[int] = set()
        self._released: set[int] = set()
        self._used_at: dict[int, float] = {}
        self._locks: dict[int, int] = {}
        self._class_of: dict[int, list[float]] = {}
        self.now = 0.0
        self.executed: list[int] = []
        self.evicted_at: list[tuple[int, int]] = []

    def run(self) -> float:
        """Runs the program; the time of all ops that ran.

        Raises:
            OutOfBudgetError: the budget is too small for an op with its inputs.
        """
        for number, op in enumerate(self._program):
            self._execute(number)
            if len(self.executed) > self._most_ops:
                return math.inf
            self._released.update(op.releases)
            for each in op.releases:
                self._live.discard(each)
        return self.now

    def _execute(self, number: int) -> None:
        """Makes missing inputs, room, and the output. Depth first, without recursion."""
        pending = [(number, iter(self._program[number].inputs))]
        while pending:
            current, inputs = pending[-1]
            for each in inputs:
                self._locks[each] = self._locks.get(each, 0) + 1
                if each not in self._live:
                    pending.append((each, iter(self._program[each].inputs)))
                    break
            else:
                self._run_op(current)
                pending.pop()
                if len(self.executed) > self._most_ops:
                    return

    def _run_op(self, number: int) -> None:
        op = self._program[number]
        while sum(self._program[each].size for each in self._live) + op.size > self._budget:
            self._evict()
        self.now += op.time
        self.executed.append(number)
        self._live.add(number)
        self._made.add(number)
        known = self._class_of.pop(number, None)
        if known is not None:  # the class loses it and is not split (Section 4.1 of the paper)
            known[0] -= op.time
        for each in (*op.inputs, number):
            self._used_at[each] = self.now
        for each in op.inputs:
            self._locks[each] -= 1
            if each in self._released and not self._locks[each]:
                self._live.discard(each)

    def _evict(self) -> None:
        able = [each for each in self._live if self.size(each) and not self._locks.get(each)]
        if not able:
            raise OutOfBudgetError
        chosen = min(able, key=lambda each: (self._value(self, each), each))
        self._live.discard(chosen)
        self.evicted_at.append((len(self.executed), chosen))
        merged = [self._program[chosen].time]
        for near in self._near(chosen):
            known = self._class_of.get(near)
            if known is not None and known is not merged:
                merged[0] += known[0]
                for each, old in self._class_of.items():
                    if old is known:
                        self._class_of[each] = merged
        self._class_of[chosen] = merged

    # --- heuristics -------------------------------------------------------------------------------

    def _is_evicted(self, number: int) -> bool:
        return number in self._made and number not in self._live and number not in self._released

    def _near(self, number: int) -> Iterable[int]:
        near = (*self._program[number].inputs, *self._readers[number])
        return [each for each in near if self._is_evicted(each)]

    def local_time(self, number: int) -> float:
        """Of the op alone."""
        return self._program[number].time

    def neighborhood_time(self, number: int) -> float:
        """Of the op and of its evicted ancestors and descendants."""
        total = self.local_time(number)
        for towards in (lambda each: self._program[each].inputs, lambda each: self._readers[each]):
            seen: set[int] = set()
            pending = [number]
            while pending:
                for each in towards(pending.pop()):
                    if each not in seen and self._is_evicted(each):
                        seen.add(each)
                        pending.append(each)
            total += sum(map(self.local_time, seen))
        return total

    def class_time(self, number: int) -> float:
        """Of the op and of the classes of evicted tensors that touch it."""
        classes = {
            id(known): known[0]
            for each in self._near(number)
            if (known := self._class_of.get(each)) is not None
        }
        return self.local_time(number) + sum(classes.values())

    def staleness(self, number: int) -> float:
        """Time since the last use."""
        return max(self.now - self._used_at[number], 1e-9)

    def size(self, number: int) -> float:
        """Of the output."""
        return self._program[number].size


HEURISTICS: dict[str, Callable[[Simulation, int], float]] = {
    "h_DTR": lambda s, i: s.neighborhood_time(i) / (s.size(i) * s.staleness(i)),
    "h_DTR_eq": lambda s, i: s.class_time(i) / (s.size(i) * s.staleness(i)),
    "h_DTR_local": lambda s, i: s.local_time(i) / (s.size(i) * s.staleness(i)),
    "LRU": lambda s, i: 1 / s.staleness(i),
    "largest": lambda s, i: 1 / s.size(i),
}


def linear_network(num_layers: int) -> list[Op]:
    """Forward and backward of a chain: each gradient reads the next one and its layer's input."""
    forwards = [Op(inputs=(i - 1,) if i else ()) for i in range(num_layers)]
    backwards = []
    for step in range(num_layers):
        layer = num_layers - 1 - step
        before = () if not step else (num_layers + step - 1,)
        backwards.append(Op(inputs=(*before, layer), releases=(*before, layer)))
    return [*forwards, *backwards]


def ops_for_each(num_layers: int, heuristic: str) -> float:
    """Ops that ran, for each op of the program, within 2 sqrt(N) tensors and some."""
    program = linear_network(num_layers)
    simulation = Simulation(program, 2 * math.ceil(math.sqrt(num_layers)) + 2, heuristic)
    return simulation.run() / len(program)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates linear networks and writes page and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dtr", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=512, help="of the largest network")
    parser.add_argument("--output", type=Path, metavar="STEM", default=RESULTS / "dtr_linear")
    options = parser.parse_args(arguments)
    sizes = [1 << power for power in range(4, options.layers.bit_length())]
    found = {name: [ops_for_each(size, name) for size in sizes] for name in HEURISTICS}
    rows = [
        [str(size), *(f"{found[name][place]:.2f}" for name in HEURISTICS)]
        for place, size in enumerate(sizes)
    ]
    text = "\n".join(
        [
            "# DTR on linear networks", "",
            "`python -m bench.dtr`: ops that ran, for each op of a forward and backward of N "
            "layers, within 2 sqrt(N) + 2 tensors of one size.", "",
            *table(("layers", *HEURISTICS), rows), "", "![ops](dtr_linear.png)",
        ]
    )  # fmt: skip
    Path(f"{options.output}.md").write_text(text + "\n", encoding="utf-8")
    _save_picture(sizes, found, Path(f"{options.output}.png"))
    sys.stdout.write(text + "\n")
    return 0


def _save_picture(sizes: Sequence[int], found: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, ratios in found.items():
        axes.plot(sizes, ratios, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("layers N; budget 2 sqrt(N) + 2 tensors")
    axes.set_ylabel("ops that ran, for each op")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
