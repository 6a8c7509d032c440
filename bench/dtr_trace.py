"""DTR, simulated on traces of models: what each heuristic takes within shares of the peak.

    python -m bench.dtr_trace                    # bench/results/dtr_traces.md and .png
    python -m bench.dtr_trace --model halting --output /tmp/traces

A step of a small model, forward and backward, is recorded op by op: what each op reads, how long it
takes, the bytes of the storages that it makes, and after which op the program releases them. Views
make no storage and are left out. An op that writes in place makes its storage anew, as DTR has it
(Section 3.2 of the paper). Parameters, buffers, gradients and the batch are in memory whatever
happens and do not count. `bench.dtr` simulates the trace within a budget.

A cell is the time of all ops that ran over that of the program; "-" where the budget is too small
for an op with its inputs, "thrashes" where more than twenty times as many ops ran.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.dtr import HEURISTICS, RESULTS, Op, OutOfBudgetError, Simulation
from bench.models import dynamic
from bench.pages import table

NAMES = ("halting", "gpt2-deep", "tree-lstm", "unet-skips")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
_MOST_OPS = 20


class Recorder(TorchDispatchMode):
    """Records the ops that run within."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: list[tuple[int, ...]] = []
        self._times: list[float] = []
        self._sizes: list[int] = []
        self._releases: list[list[int]] = []
        self._maker: dict[int, int] = {}  # storage -> op
        self._alive: dict[int, list[StorageWeakRef]] = {}  # op -> its storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self._release()
        read = {_key(each): each for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        begin = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - begin
        made = {_key(each): each for each in tree_leaves(output) if _is_tensor(each)}
        new = {key: each for key, each in made.items() if key not in read}
        written = {
            _key(value): value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.is_write and _is_tensor(value)
        }
        changed = {key: each for key, each in written.items() if key in self._maker}
        if new or written:
            self._add(read, seconds, new | changed)
        return output

    def _add(self, read: dict[int, Any], seconds: float, made: dict[int, Any]) -> None:
        number = len(self._reads)
        self._reads.append(tuple(sorted({self._maker[key] for key in read if key in self._maker})))
        self._times.append(seconds)
        self._sizes.append(sum(each.untyped_storage().nbytes() for each in made.values()))
        self._releases.append([])
        for key in made:
            before = self._maker.get(key)
            if before is not None:  # written in place: the old content is released
                self._alive[before] = [each for each in self._alive[before] if each.cdata != key]
                if not self._alive[before]:
                    del self._alive[before]
                    self._releases[number].append(before)
            self._maker[key] = number
        if made:
            self._alive[number] = [StorageWeakRef(each.untyped_storage()) for each in made.values()]

    def _release(self) -> None:
        """Notes at the last op what has gone since."""
        for number, references in list(self._alive.items()):
            left = [each for each in references if not each.expired()]
            for each in references:
                if each.expired():
                    self._maker.pop(each.cdata, None)
            self._alive[number] = left
            if not left:
                del self._alive[number]
                self._releases[-1].append(number)

    def program(self) -> list[Op]:
        """The ops; what is alive at the end is released by none."""
        self._release()
        columns = zip(self._reads, self._times, self._sizes, self._releases, strict=True)
        return [
            Op(read, seconds, float(size), tuple(released))
            for read, seconds, size, released in columns
        ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def recorded(step: Callable[[], Any]) -> list[Op]:
    """The program of a function that runs one step."""
    with Recorder() as recorder:
        result = step()
    program = recorder.program()
    del result
    return program


def trace_of(name: str, *, tiny: bool = True) -> list[Op]:
    """The program of a step of a model of `bench.models.dynamic`, gradients in place."""
    made = dynamic.build(name, tiny=tiny)
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = made.make_batch(0)

    def step() -> torch.Tensor:
        torch.manual_seed(0)
        loss = made.model(**batch)
        loss.backward()
        return loss

    step()
    return recorded(step)


def peak_of(program: Sequence[Op]) -> float:
    """The most bytes that are live if nothing is evicted."""
    live = peak = 0.0
    for op in program:
        live += op.size
        peak = max(peak, live)
        live -= sum(program[each].size for each in op.releases)
    return peak


def ratio_of(program: Sequence[Op], budget: float, heuristic: str) -> float | None:
    """Time of all ops that ran over the program's; None if nothing fits; inf if it thrashes."""
    simulation = Simulation(program, budget, heuristic, most_ops=_MOST_OPS * len(program))
    try:
        return simulation.run() / sum(op.time for op in program)
    except OutOfBudgetError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Records, simulates, and writes page and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dtr_trace", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", action="append", choices=dynamic.NAMES, help="repeatable")
    parser.add_argument("--output", type=Path, metavar="STEM", default=RESULTS / "dtr_traces")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float | None]]] = {}
    lines = [
        "# DTR on traces of models", "",
        "`python -m bench.dtr_trace`: time of all ops that ran, over that of the step's own, "
        "within shares of the peak of a step that evicts nothing. \"-\": the budget is too small "
        "for an op with its inputs.",
    ]  # fmt: skip
    for name in options.model or NAMES:
        program = trace_of(name)
        peak = peak_of(program)
        found[name] = {
            heuristic: [ratio_of(program, share * peak, heuristic) for share in SHARES]
            for heuristic in HEURISTICS
        }
        rows = [
            [str(share), *(_text(found[name][each][place]) for each in HEURISTICS)]
            for place, share in enumerate(SHARES)
        ]
        lines += ["", f"## {name}", "", f"{len(program)} ops, peak {peak / 1e6:.2f} MB.", ""]
        lines += table(("budget", *HEURISTICS), rows)
    lines += ["", f"![time](./{options.output.name}.png)"]
    text = "\n".join(lines) + "\n"
    Path(f"{options.output}.md").write_text(text, encoding="utf-8")
    _save_picture(found, Path(f"{options.output}.png"))
    sys.stdout.write(text)
    return 0


def _text(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return "thrashes" if ratio == float("inf") else f"{ratio:.2f}"


def _save_picture(found: dict[str, dict[str, list[float | None]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, ratios) in zip(panels, found.items(), strict=True):
        for heuristic, values in ratios.items():
            points = [
                (share, value)
                for share, value in zip(SHARES, values, strict=True)
                if value is not None and value != float("inf")
            ]
            shares, times = [each[0] for each in points], [each[1] for each in points]
            axes.plot(shares, times, marker="o", label=heuristic)
        axes.set_title(name)
        axes.set_xlabel("budget, of the peak")
        axes.set_ylabel("time of all ops")
        axes.invert_xaxis()
    panels[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
