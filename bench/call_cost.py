"""What a planned call costs beside eager, on tiny models whose ops take little time.

    python -m bench.call_cost               # writes bench/results/call_cost_cpu_<yyyymm>.*
    python -m bench.call_cost --whole --model gpt2 --budget 0.5 --rounds 5 --output STEM    # trials

A step is forward and backward with `.grad` in place. Eager, eager once more and each budget take
turns on one thread, one step each in a round; with a trial, each step is held against eager. First
steps, before there are gradients, are those of three modules with a trial and three without, in
turn. In 1,000 steps there are ten trials. Times are processor times, since a step of a millisecond
otherwise mostly measures the other processes on the core. The page gives medians over rounds: of a
step's time, of its ratio to eager's step of the same round, and of its difference from that. "Eager
once more" shows the resolution of the meter. Nothing is recomputed at budget 1.0. Below it, the
predicted ratio gives the time of the recomputations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from bench import command, measure, models
from bench.command import Record
from bench.pages import about, filled
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.trial.steps import TrialOption

MODELS = ("mlp", "gpt2-2layer", "llama-2layer", "bert-2layer", "encoder")
BUDGETS = (1.0, 0.5)
NUM_WARM_UPS, NUM_FIRST = 20, 3


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """A record for each step of one model; infeasible budgets are left out."""
    workload, rounds = models.build(name, tiny=not options.whole), options.rounds
    planner = Planner(workload.model, workload.sample)
    trainer, predicted, first_ms = measure.Trainer(workload), dict[str, float](), dict[str, float]()
    callees = {"eager": workload.model, "eager once more": workload.model}
    for budget in options.budget or BUDGETS:
        try:
            plan = planner.plan(budget)
        except InfeasibleBudgetError:
            continue
        predicted[f"budget {budget}"] = plan.predicted_ratio
        callees[f"budget {budget}"] = planner.module_of(plan, trial="never")
        callees[f"budget {budget}, with a trial"] = planner.module_of(plan, trial="always")
        first = partial(_first_ms, trainer, planner, plan)
        first("never")  # code is slow at first
        more_ms = [first("log") - first("never") for _ in range(NUM_FIRST)]
        first_ms[f"budget {budget}, with a trial"] = statistics.median(more_ms)
    steps = {key: trainer.step(callee) for key, callee in callees.items()}
    command.say(f"{name}, {rounds} rounds")
    times = measure.time_in_turn(
        steps, rounds, warm_ups=min(NUM_WARM_UPS, rounds), collects=False, before=trainer.zero
    )
    trained = sum(parameter.requires_grad for parameter in workload.model.parameters())
    for key, own in times.items():
        step_ms = times[key.removesuffix(", with a trial")].median_ms
        yield {
            "first_ms": first_ms.get(key, 0.0),
            "share": (first_ms.get(key, 0.0) + 9 * (own.median_ms - step_ms)) / (1000 * step_ms),
            "model": f"{name}, {trained} parameters",
            "step": key,
            "ms": own.median_ms,
            "ratio": own.ratio,
            "difference_ms": own.difference_ms,
            "predicted_ratio": predicted.get(key),
        }


def _first_ms(trainer: measure.Trainer, planner: Planner, plan: Plan, trial: TrialOption) -> float:
    """Of the first step of a new module, before there are gradients."""
    trainer.workload.model.zero_grad()
    return measure.time_once(trainer.step(planner.module_of(plan, trial=trial)))


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the number of steps that reach a target as its headline."""
    newest = command.newest(records, "model", "step")
    return filled("call_cost", lines=newest, about=about(newest, __doc__))


_FURTHER = {
    "--budget": {"action": "append", "type": float, "help": "fraction of the peak"},
    "--whole": {"action": "store_true", "help": "not their variants of milliseconds"},
}
main = command.main_of(
    "call_cost", __doc__, measured, page, models=models.REGISTRY, default=MODELS,
    further=_FURTHER, rounds=500, stem="call_cost_cpu",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
