"""Inductor with memory budgets beside our fused plans of no greater peak.

    python -m bench.fused_peers --model llama --rounds 3
    python -m bench.fused_peers --model llama --peer "inductor: default 0.5"

The peers are those of `bench.peers` with Inductor's kernels: the model compiled whole or by layer,
at several `activation_memory_budget`s, with and without checkpoints. Each peer's peak is measured,
and a plan with fused kernels is made for that peak. Then all take turns, eager among them, as in
`bench.fused`, to whose files this adds lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.comparison.lines import read
from bench.comparison.plans import peaks_to_meet
from bench.fused import MODELS, RESULTS, Case, Record, error_of
from bench.fused_page import page
from bench.machine import machine_record
from bench.measure import time_in_turn
from bench.models import Workload, build
from bench.peers import peers_for
from rockmate import RockmateModule

PEERS = tuple(name for name in peers_for() if name.startswith("inductor"))


def measured(workload: Workload, names: Sequence[str], rounds: int) -> Iterator[Record]:
    """A record for each peer, with our plan at its peak."""
    case, peers = Case(workload), peers_for()
    expected = case.gradients(workload.model)
    errors: dict[str, float] = {}
    peaks: dict[str, int] = {}
    steps: dict[str, Callable[[], Any]] = {"eager": case.step_of(workload.model)}
    for name in names:
        lend = peers[name]
        assert lend is not None
        with lend(workload) as model:
            errors[name] = error_of(case.gradients(model), expected)
            peaks[name] = case.peak_bytes(model)
        steps[name] = partial(_lent_step, case, lend)
        sys.stderr.write(f"{workload.name}: {name} has a peak of {peaks[name] / 1e6:.1f} MB\n")
    modules = _modules_at(case, peaks_to_meet(list(peaks.values())))
    ours = {budget: case.peak_bytes(module) for budget, module in modules.items()}
    steps |= {f"fused at {budget}": case.step_of(module) for budget, module in modules.items()}
    zero = partial(workload.model.zero_grad, set_to_none=False)
    times = time_in_turn(steps, rounds, before=zero)
    for name in names:
        fitting = [budget for budget in modules if ours[budget] <= peaks[name]]
        best = min(fitting, key=lambda each: modules[each].plan.predicted_ms, default=None)
        own = times.get(f"fused at {best}")
        yield {
            "kind": "peer",
            "model": workload.name,
            "method": name,
            "eager_peak_bytes": case.eager_peak_bytes,
            "peak_bytes": peaks[name],
            "ratio": times[name].ratio,
            "ratio_spread": times[name].ratio_spread,
            "error": errors[name],
            "our_peak_bytes": None if best is None else ours[best],
            "our_ratio": own.ratio if own else None,
            "our_spread": own.ratio_spread if own else None,
            **machine_record("bench.fused_peers"),
        }


def _lent_step(case: Case, lend: Callable[..., Any]) -> None:
    with lend(case.workload) as model:
        case.step_of(model)()


def _modules_at(case: Case, budgets: Sequence[int]) -> dict[int, RockmateModule]:
    """Our plans of fused kernels within each of these peaks; those that fit."""
    found = {budget: case.module("fused", budget) for budget in budgets}
    return {budget: module for budget, module in found.items() if module is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS, required=True)
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small forms of the models")
    stem = RESULTS / f"fused_cpu_{time.strftime('%Y%m')}"
    parser.add_argument("--output", type=Path, default=stem, metavar="STEM")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = given.output.with_suffix(".jsonl")
    for name in given.model:
        workload = build(name, tiny=given.tiny).with_loss_inside()
        with lines.open("a", encoding="utf-8") as file:
            for record in measured(workload, given.peer or PEERS, given.rounds):
                file.write(json.dumps(record) + "\n")
    text = "\n".join(page(read(lines))) + "\n"
    given.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
