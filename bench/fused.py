"""Fused kernels beside eager's, without recomputation and at shares of eager's peak.

    python -m bench.fused                        # all; bench/results/fused_cpu_<yyyymm>.*
    python -m bench.fused --model gpt2-12 --rounds 5 --output /tmp/fused
    python -m bench.fused --chunks --share 0.1 --model llama
    python -m bench.fused --model llama --peer "inductor: default 0.5"
    python -m bench.fused --page                 # only the page

Each model trains in turn eager, and planned with eager's kernels and with fused ones: without
recomputation, and within shares of eager's peak; with `--chunks`, in chunks where that is faster.
Both kinds of plans are made from one measurement of each op. One thread; a round is one step of
each; ratios are medians over rounds of a step's time over eager's in the same round. Peaks are of
one step by the allocator's events, with `.grad` in place. Gradients are compared with eager's, and
these with gradients in float64, in the worse of PyTorch's memory formats; gradients of the fused
plans without chunks with each other, bit by bit. Writes STEM.jsonl, a line for each method, and
STEM.md.

A `--peer` of `bench.peers` with Inductor's kernels takes turns with the plans: the model compiled
whole or by layer, at an `activation_memory_budget`, with or without checkpoints. Unless shares are
named, plans are made for the peaks of the peers.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import command
from bench.command import Record
from bench.comparison.plans import peaks_to_meet
from bench.comparison.result import TIME_TOLERANCE
from bench.measure import Trainer, gradients_of, same_bits, time_in_turn, training_step
from bench.models import Workload, build
from bench.pages import Target, about, filled, worst_row
from bench.peers import peers_for
from rockmate import Planner, RockmateModule
from rockmate.curves.measure import tensor_difference
from rockmate.planning.forms import Forms

MODELS = (
    "gpt2-12", "gpt2-deep", "llama", "bert-base", "t5-small", "vit-small", "resnet50", "unet",
)  # fmt: skip
KERNELS = ("eager", "fused")
PEERS = tuple(name for name in peers_for() if name.startswith("inductor"))
_PRODUCTS = ("mm", "convolution", "attention")
"""In the names of ops that no fusion spares."""

SHARES = (None, 0.5, 0.25, 0.1)
"""Budgets as shares of eager's peak; None recomputes nothing."""

IN_CHUNKS = ", in chunks"
"""In the name of a method whose plans may run in chunks."""

TIME_AT = {0.5: 0.90, 0.25: 1.00, 0.1: 1.12}
"""Targets of the time over eager's of GPT-2 and Llama with fused kernels."""

BOUNDED = ("gpt2-12", "gpt2-deep", "llama")
"""The models of `TIME_AT`. The others' time is in products, attention and convolutions."""

AUTO = 1.01
"""Target of the time with kernels="auto" over that of eager's kernels within the same budget."""

_Lines = Mapping[tuple[str, str], Record]


class Case(Trainer):
    """One model, its planners, and the plans that are compared."""

    def __init__(self, workload: Workload, *, chunks: bool = False) -> None:
        super().__init__(workload)
        self.eager_peak_bytes = self.peak_bytes(workload.model)
        self._suffix = IN_CHUNKS if chunks else ""
        self._strategy = "rockmate" if chunks else "bitwise"
        begin = time.perf_counter()
        self.planner = Planner(workload.model, workload.sample, kernels="auto")
        self.planner_s = time.perf_counter() - begin
        forms = self.planner._forms  # pyright: ignore[reportPrivateUsage]
        self._forms: dict[str, Forms] = {}
        for kernels, chunked in zip(KERNELS, forms.chunked, strict=False):
            self._forms[kernels] = one = copy.copy(forms)
            one.captured, one.chunked = chunked.whole, [chunked]
        assert self.planner.fusion is not None
        self.fusion = self.planner.fusion

    def products_share(self) -> float:
        """Of products, convolutions and attention in the time of a step with single ops."""
        form = self._forms["eager"].captured
        costs = form.costs.first
        total = sum(cost.time_ms for cost in costs)
        products = sum(
            costs[op.index].time_ms
            for op in form.graph.ops
            if any(word in str(op.node.target) for word in _PRODUCTS)
        )
        return products / total

    def modules(self, shares: Sequence[float | None]) -> dict[str, RockmateModule]:
        """The planned modules by method; those that fit."""
        found = {}
        for kernels, forms in self._forms.items():
            for share in shares:
                budget = forms.captured.baseline.peak_bytes
                if share is not None:
                    budget = min(budget, int(share * self.eager_peak_bytes))
                module = self.module(kernels, budget)
                if module is not None:
                    name = f"{share:.3g}" if share else "no recomputation"
                    found[f"{kernels}{self._suffix}: {name}"] = module
        return found

    def module(self, kernels: str, budget_bytes: int) -> RockmateModule | None:
        """The planned module of a kind of kernels; None if no plan fits."""
        best = self._forms[kernels].best_within(budget_bytes, self._strategy)
        if best is None:
            return None
        as_plan: Any = self.planner._as_plan  # pyright: ignore[reportPrivateUsage]
        return self.planner.module_of(as_plan(budget_bytes, self._strategy, *best), trial="never")

    def own_error(self) -> float:
        """Eager's error against float64, in the worse of the two memory formats."""
        as_given = self._eager_gradients(nn.Module.float, Tensor.float)
        channels_last = self._eager_gradients(
            lambda model: model.to(memory_format=torch.channels_last),  # pyright: ignore
            lambda value: value.to(memory_format=torch.channels_last) if value.ndim == 4 else value,
        )
        exact = self._eager_gradients(nn.Module.double, Tensor.double)
        return max(error_of(each, exact) for each in (as_given, channels_last))

    def _eager_gradients(
        self, convert: Callable[[nn.Module], nn.Module], convert_value: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Eager's gradients of one step of a converted copy."""
        model = convert(copy.deepcopy(self.workload.model))
        model.zero_grad(set_to_none=False)
        batch = {
            name: convert_value(value) if value.is_floating_point() else value
            for name, value in self.batch.items()
        }
        training_step(self.workload, model, batch, seed=1)
        return gradients_of(model)


def measured(
    workload: Workload,
    rounds: int,
    shares: Sequence[float | None],
    *,
    chunks: bool = False,
    peers: Sequence[str] = (),
) -> Iterator[Record]:
    """A record for each method of one model; no shares stand for the peaks of the peers."""
    case, lenders = Case(workload, chunks=chunks), peers_for()
    expected = case.gradients(workload.model)
    steps: dict[str, Callable[[], Any]] = {"eager": case.step(workload.model)}
    found, peaks = dict[str, dict[str, Tensor]](), dict[str, int]()
    for name in peers:
        with lenders[name](workload) as model:
            found[name], peaks[name] = case.gradients(model), case.peak_bytes(model)
        steps[name] = partial(case.lent_step, lenders[name])
        command.say(f"{workload.name}: {name} has a peak of {peaks[name] / 1e6:.1f} MB")
    at_peaks = [each / case.eager_peak_bytes for each in peaks_to_meet(peaks.values())]
    modules = case.modules(shares or at_peaks)
    found |= {method: case.gradients(module) for method, module in modules.items()}
    peaks |= {method: case.peak_bytes(module) for method, module in modules.items()}
    steps |= {method: case.step(module) for method, module in modules.items()}
    times = time_in_turn(steps, rounds, before=case.zero)
    rows = {
        method: {
            "model": workload.name,
            "method": method,
            "eager_peak_bytes": case.eager_peak_bytes,
            "peak_bytes": peak,
            "ratio": times[method].ratio,
            "ratio_spread": times[method].ratio_spread,
            "error": error_of(found[method], expected),
        }
        for method, peak in peaks.items()
    }
    for name in peers:
        fitting = [m for m in modules if m.startswith("fused") and peaks[m] <= peaks[name]]
        best = min(fitting, key=lambda each: modules[each].plan.predicted_ms, default="")
        own = rows.get(best, dict.fromkeys(("peak_bytes", "ratio", "ratio_spread")))
        ours = {"our_peak_bytes": own["peak_bytes"], "our_ratio": own["ratio"]}
        yield {"kind": "peer", **rows[name], **ours, "our_spread": own["ratio_spread"]}
    for more in _planned(case, modules, found, expected):
        yield rows[more["method"]] | more


def _planned(
    case: Case,
    modules: Mapping[str, RockmateModule],
    found: Mapping[str, dict[str, Tensor]],
    expected: dict[str, Tensor],
) -> Iterator[Record]:
    """What the records of plans have beside those of peers."""
    # Chunks add the same numbers in another order.
    is_chunked = {method: each.plan.options.loss_chunks for method, each in modules.items()}
    whole = (found[m] for m in modules if "fused" in m and not is_chunked[m])
    first_fused = next(whole, expected)
    common = {
        "num_places": case.fusion.num_places,
        "num_kernels": case.fusion.num_kernels,
        "compile_s": case.fusion.compile_s,
        "planner_s": case.planner_s,
        "products_share": case.products_share(),
        "own_error": case.own_error(),
    }
    for method, module in modules.items():
        plan = module.plan
        is_fused = method.startswith("fused")
        yield {
            **common,
            "method": method,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "predicted_ms": plan.predicted_ms,
            "chunks": str(plan.options.loss_chunks or ""),
            "is_bitwise": same_bits(found[method], first_fused if is_fused else expected),
            "num_recomputed": plan.schedule.num_recomputations(),
        }


def error_of(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a gradient over the largest gradient of its parameter.

    Gradients that are zero in theory, such as those of key biases, are rounding in eager, too: they
    count against the largest gradient of all.
    """
    return tensor_difference(mine, theirs, small=1e-4).largest_relative


def _measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    workload = build(name, tiny=options.tiny).with_loss_inside()
    peers = options.peer or ()
    shares = options.share or (() if peers else SHARES)
    return measured(workload, options.rounds, shares, chunks=options.chunks, peers=peers)


# --- page -------------------------------------------------------------------------------------


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    every = {(line["model"], line["method"]): line for line in lines}
    plans = {place: line for place, line in every.items() if line.get("kind") != "peer"}
    peers = [
        {**line, "is_dominated": _is_dominated(line)}
        for line in every.values()
        if line.get("kind") == "peer"
    ]
    return filled(
        "fused",
        provenance=about(list(every.values())),
        rows=[row.text for row in _rows(plans)],
        plans=list(plans.values()),
        peers=peers,
        names=dict.fromkeys(name for name, _ in every),
        tolerance=100 * TIME_TOLERANCE,
    )


def _rows(plans: _Lines) -> Iterator[Target]:
    """The targets for which a line is held against another one."""
    names = list(dict.fromkeys(name for name, _ in plans))
    peaks = [
        (name, _peak(plans, name, "fused") / _peak(plans, name, "eager"))
        for name in names
        if (name, "fused: no recomputation") in plans
    ]
    yield worst_row("peak without recomputation over that of eager's kernels", 1.0, peaks)
    for share, reach in TIME_AT.items():
        found = (_fused_at(plans, name, share) for name in names if name in BOUNDED)
        figures = [(f"{line['model']}, {line['method']}", line["ratio"]) for line in found if line]
        yield worst_row(f"time at {share} of eager's peak, GPT-2 and Llama", reach, figures)
    auto = [(name, _auto(plans, name, share)) for name in names for share in SHARES]
    found = [(name, ratio) for name, ratio in auto if ratio is not None]
    yield worst_row('time of kernels="auto" over that of eager\'s kernels', AUTO, found)


def _is_dominated(peer: Record) -> bool:
    ours = peer["our_ratio"]
    return ours is not None and ours <= peer["ratio"] * (1 + TIME_TOLERANCE)


def _peak(plans: _Lines, name: str, kernels: str) -> int:
    return plans[name, f"{kernels}: no recomputation"]["predicted_bytes"]


def _fused_at(plans: _Lines, name: str, share: float) -> Record | None:
    """The plan with fused kernels that is predicted to be the fastest."""
    methods = (f"fused: {share}", f"fused{IN_CHUNKS}: {share}")
    found = [plans[name, method] for method in methods if (name, method) in plans]
    return min(found, key=lambda line: line["predicted_ms"], default=None)


def _auto(plans: _Lines, name: str, share: float | None) -> float | None:
    """The time of the plan that is predicted to be faster, over that of eager's kernels."""
    suffix = share or "no recomputation"
    eager, fused = (plans.get((name, f"{kind}: {suffix}")) for kind in ("eager", "fused"))
    if eager is None or fused is None:
        return None
    # Without recomputation both run at their own peaks, of which the fused one is smaller.
    is_fused = fused["predicted_ms"] < eager["predicted_ms"]
    return fused["ratio"] / eager["ratio"] if is_fused else 1.0


main = command.main_of(
    "fused", __doc__, _measured, page, models=MODELS, rounds=7, tiny=True, stem="fused_cpu",
    further={
        "--share": {"action": "append", "type": float, "help": "repeatable; default: all"},
        "--chunks": {"action": "store_true", "help": "chunks wherever they are faster"},
        "--peer": {"action": "append", "choices": PEERS, "help": "repeatable; default: none"},
    },
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
