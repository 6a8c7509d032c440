"""LoRA on models whose weights do not fit the device, by simulation.

    python -m bench.weights                  # writes bench/results/weights_<yyyymm>.*
    python -m bench.weights --case 8b-12 --rows 1,4
    python -m bench.weights --measured FOLDER

Nothing runs, but for the last. The model is on the meta device in bfloat16, with rows of 2,048
tokens, adapters of rank 16 beside all products, and AdamW in bfloat16. Times follow from the
description of a machine. A budget is the card's memory less adapters, their gradients and states,
and a reserve for the context. Beside each plan stands a *block swap by hand* on the same machine:
checkpoints around each layer, the loss in the planner's chunks, every k-th layer fetched while the
layer before it runs, and dropped behind its last read, with the best k of those that fit. "alst" is
one sequence of so many tokens, of a model that is trained with all of it at home.

Measured is a small Llama type, in float32 on one thread, whose frozen weights are a multiple of the
budget, with a disk as their home: the gradients beside eager's, the peak by the allocator's events,
and the time as `bench.offload` says, beside the same model with all weights in memory.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.measure import Trainer, same_bits
from bench.models import Batch, built, makers
from bench.offload import planned, timed
from bench.pages import filled
from rockmate import InfeasibleBudgetError, Planner
from rockmate.costs.machine import load_machine
from rockmate.hf.adapt import with_lora
from rockmate.offload.link import machine_link
from rockmate.plan.faults import fault_of
from rockmate.plan.plan import Plan
from rockmate.planning.moving import MoveFinder
from rockmate.schedule.move import Fetch
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.simulate import simulate

LENGTH, RANK, RESERVE_BYTES, HOST_BYTES = 2048, 16, 512 << 20, 512 << 30
SHARES, LONG_SHARES = (0.2, 0.3, 0.45, 0.7, 1.0, 1.3, 1.8), (0.5, 0.55)
"""Budgets of activations by hand, in smallest peaks without chunks."""
MULTIPLES, NUM_LAYERS = (3, 2, 1.5), 16
"""Frozen weights over the budget, where steps are measured, and the layers of that model."""


class Case(NamedTuple):
    """A model on a card, of weights.toml."""

    model: str
    machine: str
    gib: int
    rows: list[int]
    weights: str = "auto"
    length: int = LENGTH
    targets: list[str] | tuple[str, ...] = ()


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CASES = {name: Case(**fields) for name, fields in _TABLE.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command.parser("weights", __doc__, stem="weights")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="default: all")
    parser.add_argument("--rows", help="of a batch, in place of the case's; commas between them")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--gib", type=float, help="in place of the card's")
    parser.add_argument("--measured", metavar="FOLDER", help="train with weights at home there")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of a search")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    records = measured(options.measured) if options.measured else _records(options)
    return command.run("weights", options, records, page)


def page(records: Sequence[Record]) -> list[str]:
    """The page of all records."""
    key = ("model", "machine_name", "gib", "rows", "layers", "multiple")
    rows = command.newest(records, *key)
    return filled(
        "weights",
        rows=[row for row in rows if "multiple" not in row and row.get("weights") != "all"],
        longest=[row for row in rows if row.get("weights") == "all"],
        measured=[row for row in rows if "multiple" in row],
        machines="\n\n".join(map(machine_text, {row["command"]: row for row in rows}.values())),
    )


def _records(options: argparse.Namespace) -> Iterator[Record]:
    for name in options.case or CASES:
        case = CASES[name]
        for rows in map(int, options.rows.split(",")) if options.rows else case.rows:
            yield from records_of(case._replace(gib=options.gib or case.gib), rows, options)


def records_of(case: Case, rows: int, options: argparse.Namespace) -> Iterator[Record]:
    """A plan for a batch, and then the same with the block swap by hand."""
    model, sample = _adapted(case, rows, options.layers)
    on_card = model.parameters() if case.weights == "auto" else ()
    trained_bytes = sum(each.nbytes for each in on_card if each.requires_grad)
    budget = int(case.gib * 2**30) - 4 * trained_bytes - RESERVE_BYTES
    begin = time.perf_counter()
    planner = _planner(case, model, sample, options, weights=case.weights, host_budget=HOST_BYTES)
    prepared = time.perf_counter()
    found: Record = {
        "model": case.model,
        "machine_name": case.machine,
        "gib": case.gib,
        "rows": rows,
        "weights": case.weights,
        "layers": options.layers or 0,
        "budget_bytes": budget,
        "weight_bytes": planner.weight_bytes,
        "baseline_ms": planner.baseline_ms,
        "baseline_peak_bytes": planner.baseline_peak_bytes,
        "prepare_s": prepared - begin,
    }
    try:
        plan = planner.plan(budget)
    except InfeasibleBudgetError as error:
        yield found | {"least_bytes": error.minimum_bytes}
        return
    assert not fault_of(plan.snapshot, plan.schedule)
    found |= {"plan_s": time.perf_counter() - prepared, **_figures(plan, budget)}
    found["bound_ms"] = plan.lower_bound_ms
    yield found
    yield found | _by_hand(case, rows, budget, options)


def measured(folder: str) -> Iterator[Record]:
    """Steps with weights on a disk, beside the same model with its weights in memory."""
    make = partial(makers("small")["llama-lora"], layers=NUM_LAYERS, rows=1)
    whole, own = (built("llama-lora", make).with_loss_inside() for _ in range(2))
    options: dict[str, Any] = {"offload": f"disk:{folder}", "numerics": "bitwise"}
    base = Planner(whole.model, whole.sample, **options).module(1.0, trial="never")
    planner = Planner(own.model, own.sample, weights="auto", **options)
    whole_trainer, trainer = Trainer(whole), Trainer(own)
    expected = whole_trainer.gradients(whole.model)
    for multiple in MULTIPLES:
        budget = int(planner.weight_bytes / multiple)
        module = planner.module(budget, trial="never")
        ours = trainer.gradients(module)
        yield {
            "model": own.name,
            "rows": own.rows,
            "layers": NUM_LAYERS,
            "multiple": multiple,
            "weight_bytes": planner.weight_bytes,
            "is_bitwise": same_bits(ours, expected),
            "measured_peak_bytes": trainer.peak_bytes(module),
            **planned(module.plan),
            **_figures(module.plan, budget),
            **timed(whole_trainer.step(base), base, trainer.step(module), module, folder),
        }


def _figures(plan: Plan, budget: int) -> Record:
    lanes, sizes = plan.simulation.lanes, plan.snapshot.storages
    moved = sum(sizes[each.storage].num_bytes for each in plan.schedule.moves)
    copied = sum(sizes[each.storage].num_bytes for each in plan.schedule.fetches)
    return {
        "ms": plan.predicted_ms,
        "resident_bytes": budget - plan.budget_bytes,
        "copied_bytes": copied,
        "moved_bytes": moved,
        "host_bytes": plan.simulation.host_bytes,
        "chunks": str(plan.options.loss_chunks or ""),
        "num_recomputations": plan.schedule.num_recomputations(),
        "waited_ms": lanes.waited_ms if lanes else 0.0,
    }


def _adapted(case: Case, rows: int, layers: int | None) -> tuple[nn.Module, Batch]:
    sizes = {"layers": layers} if layers else {}
    length, rows = (case.length, rows) if case.weights == "auto" else (rows, 1)
    make = partial(makers("large")[case.model], length=length, **sizes)
    workload = built(case.model, make, device="meta", dtype=torch.bfloat16)
    model = workload.model
    if case.weights == "auto":
        model = with_lora(model, rank=RANK, targets=tuple(case.targets))
    return model, workload.make_batch(0, rows)


def _planner(
    case: Case, model: nn.Module, sample: Batch, options: argparse.Namespace, **further: Any
) -> Planner:
    common: dict[str, Any] = {"machine": case.machine, "offload": "host", "outputs": "loss"}
    return Planner(model, dict(sample), time_limit_s=options.limit, **common | further)


def _by_hand(case: Case, rows: int, budget: int, options: argparse.Namespace) -> Record:
    """The fastest block swap that fits, that of each layer, and this with layers' inputs moved."""
    model, sample = _adapted(case, rows, options.layers)
    checkpointed: Any = model
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    planner = _planner(case, model, sample, options, existing_checkpoints="honour", offload=None)
    shares = SHARES if case.weights == "auto" else LONG_SHARES
    link = machine_link(load_machine(case.machine))
    weights = [
        each for each in model.parameters() if case.weights == "all" or not each.requires_grad
    ]
    found: dict[str, list[tuple[float, int]]] = {"by_hand": [], "zero": [], "moved": []}
    plans = planner.plans([int(each * planner.minimum_peak_bytes) for each in shares]).values()
    # Layers that run once more, and no more than that, may take more memory than all of these.
    for plan in (planner.plan(planner.baseline_peak_bytes, strategy="none"), *plans):
        costs = replace(plan.costs, link=link)
        finder = MoveFinder(plan.graph, costs, OffloadRequest("host", host_bytes=HOST_BYTES))
        for step in range(1, 1 + len(_layers_of(plan))):
            fetched, home_bytes = _swapped(plan, step)
            room = budget - sum(each.nbytes for each in weights) + home_bytes
            simulation = simulate(plan.graph, fetched.schedule, costs)
            if simulation.peak_bytes <= room:
                found["by_hand"].append((simulation.time_ms, step))
                found["zero"] += [(simulation.time_ms, 1)] if step == 1 else []
            excess = simulation.peak_bytes - plan.simulation.peak_bytes
            if step == 1 and (
                moved := finder.within(plan.schedule, plan.simulation, room - excess)
            ):
                swapped, _ = _swapped(replace(plan, schedule=moved[0]), 1)
                simulation = simulate(plan.graph, swapped.schedule, costs)
                if simulation.peak_bytes <= room:
                    found["moved"].append((simulation.time_ms, 1))
    best = {name: min(each, default=(None, 0)) for name, each in found.items()}
    times = {f"{name}_ms": each for name, (each, _) in best.items()}
    return times | {"by_hand_step": best["by_hand"][1]}


def _layers_of(plan: Plan) -> dict[int, list[int]]:
    """Number of a layer -> storages of its frozen weights."""
    found: dict[int, list[int]] = {}
    for node, role in plan.graph.inputs:
        _, layer, rest = role.name.partition(".layers.")
        if layer and "lora_" not in rest:
            number = int(rest.partition(".")[0])
            found.setdefault(number, []).append(plan.graph.storage_of[node].index)
    return found


def _swapped(plan: Plan, step: int) -> tuple[Plan, int]:
    """The schedule with every `step`-th layer swapped, and the bytes of those layers."""
    layers, steps = _layers_of(plan), plan.schedule.steps
    owner = {storage: layer for layer, storages in layers.items() for storage in storages}
    border = len(plan.schedule.forward)
    reads: dict[int, tuple[list[int], list[int]]] = {storage: ([], []) for storage in owner}
    begins: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for position, index in enumerate(steps):
        half = int(position >= border)
        for storage in plan.graph.ops[index].reads:
            if storage.index in owner:
                reads[storage.index][half].append(position)
                begins[half].setdefault(owner[storage.index], position)
    fetches, chosen = list[Fetch](), [each for each in layers if each % step == 0]
    for half, neighbour in ((0, -1), (1, 1)):
        for layer in chosen:
            for storage in layers[layer]:
                if own := reads[storage][half]:
                    start = border * half if half or layer else 0
                    ahead = min(own[0], begins[half].get(layer + neighbour, start))
                    fetches.append(
                        Fetch(storage=storage, fetch=ahead, fetched=own[0], last=own[-1])
                    )
    schedule = replace(plan.schedule, fetches=tuple(fetches))
    assert not fault_of(plan.snapshot, schedule)
    sizes = plan.graph.storages
    home = {each.storage for each in fetches}
    return replace(plan, schedule=schedule), sum(sizes[each].num_bytes for each in home)


if __name__ == "__main__":
    sys.exit(main())
