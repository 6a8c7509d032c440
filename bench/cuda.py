"""The campaign on a GPU: correctness, memory, time, op costs and largest batches, in parts.

    python -m bench.cuda --output DIR [--part correctness ...] [--model gpt2-medium ...]
    python -m bench.cuda --output DIR --page > bench/results/h200_<yyyymm>.md
    python -m bench.cuda --output DIR --tiny --device cpu            # a rehearsal without a GPU

A part is a list of cases, one for each model and setting. Each finished case is a line of
DIR/PART.jsonl and is not run again, so the same command resumes. A run starts no case after
--seconds. A case that fails is a line with its error and does not stop the others.

| part | case |
|---|---|
| correctness | gradients of a planned step against eager, and of eager against eager |
| step | measured peaks and time of a planned step at a budget, in turn with eager |
| fused | the same with fused kernels, and the error of their gradients |
| peers | the same as for a step for activation checkpoints and for torch.compile |
| offload | a planned step with moves to the host: overlap, bytes, rates; and `save_on_cpu` |
| costs | measured times of ops against the estimate for the machine |
| batch | largest batch under a cap on the memory of the device, planned and eager |

Only this checkout, PyTorch, transformers and HiGHS are needed. The last can be carried as a wheel:
`pip download highspy -d wheels`, then `pip install --no-index -f wheels highspy`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import campaign, command
from bench.campaign import Build, offloaded_step, save_on_cpu_step
from bench.machine import hardware_text, machine_record, versions_text
from bench.pages import filled

FRACTIONS = (1.0, 0.5, 0.25)
OFFLOAD_FRACTIONS = (0.5, 0.25)
CAPS_GB = (24, 48, 80)
PEERS = ("checkpoint", "compile")
SAVE_ON_CPU = "save_on_cpu"
"""Setting of the peer in the part with moves."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Attributes:
        part: the part that it belongs to.
        model: name of the model.
        setting: what the part varies, as text; empty if nothing.
        run: gives the figures.
    """

    part: str
    model: str
    setting: str
    run: Callable[[], Mapping[str, Any]]


def cases(models: Mapping[str, Build], *, tiny: bool) -> Iterator[Case]:
    """All cases, model by model."""
    caps = {f"{cap} GB": (cap << 20) // 100 if tiny else cap * 10**9 for cap in CAPS_GB}
    fused = partial(campaign.planned_step, is_fused=True)
    parts: dict[str, dict[str, Callable[..., Mapping[str, Any]]]] = {
        "correctness": {"": campaign.correctness},
        "step": {f"{share}": partial(campaign.planned_step, share=share) for share in FRACTIONS},
        "fused": {f"{share}": partial(fused, share=share) for share in FRACTIONS},
        "peers": {peer: partial(campaign.peer_step, peer=peer) for peer in PEERS},
        "offload": {f"{share}": partial(offloaded_step, share=share) for share in OFFLOAD_FRACTIONS}
        | {SAVE_ON_CPU: save_on_cpu_step},
        "costs": {"": campaign.op_costs},
        "batch": {
            name: partial(campaign.largest_batches, cap_bytes=size) for name, size in caps.items()
        },
    }
    for name, build in models.items():  # whose planner is kept from one part to the next
        for part, settings in parts.items():
            for setting, measured in settings.items():
                yield Case(part, name, setting, partial(measured, build))


def run_case(case: Case) -> dict[str, Any]:
    """The record of a case: its figures, or its error."""
    begin = time.perf_counter()
    try:
        figures = dict(case.run())
    except Exception as error:  # noqa: BLE001 - one case must not stop the campaign
        figures = {"error": f"{type(error).__name__}: {error}"[:2000]}
        campaign.release_memory()  # of what the frames of the error hold
    seconds = round(time.perf_counter() - begin, 1)
    return {"model": case.model, "setting": case.setting, **figures, "seconds": seconds}


def run(folder: Path, todo: Sequence[Case], limit_s: float) -> int:
    """Runs cases until the limit; returns the number of those that are left."""
    begin = time.perf_counter()
    for index, case in enumerate(todo):
        if time.perf_counter() - begin > limit_s:
            return len(todo) - index
        if index and case.model != todo[index - 1].model:
            campaign.release_memory()
        record = run_case(case)
        command.add_line(folder / f"{case.part}.jsonl", record)
        command.say(f"{case.part} {json.dumps(record)}")
    return 0


def page(parts: Mapping[str, Sequence[Mapping[str, Any]]], machine: Mapping[str, Any]) -> list[str]:
    """The page of finished cases by part: the targets, then a table for each part."""
    offload = parts["offload"]
    peers = {r["model"]: r for r in offload if r["setting"] == SAVE_ON_CPU}
    beside = [{**r, "peer": peers.get(r["model"], {})} for r in offload]
    return filled(
        "cuda",
        parts={**parts, "offload": beside},
        machine=machine,
        hardware=hardware_text(machine, device="cuda" if machine["gpu"] else "cpu"),
        versions=versions_text(machine),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = command.parser("cuda", __doc__, tiny=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of finished cases")
    parser.add_argument("--part", nargs="+", help="parts to run (default: all)")
    parser.add_argument("--model", nargs="+", help="models to run (default: all)")
    parser.add_argument("--seconds", type=float, default=450, help="start no case after this")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--page", action="store_true", help="print the page of finished cases")
    options = parser.parse_args(arguments)
    models = campaign.builds(torch.device(options.device), tiny=options.tiny)
    every = list(cases(models, tiny=options.tiny))
    parts = dict.fromkeys(case.part for case in every)
    done = {part: command.read(options.output / f"{part}.jsonl") for part in parts}
    machine = options.output / "machine.json"
    if options.page:
        text = page(done, json.loads(machine.read_text(encoding="utf-8")))
        sys.stdout.write("\n".join(text) + "\n")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    machine.write_text(json.dumps(machine_record("bench.cuda")) + "\n", encoding="utf-8")
    known = {(part, r["model"], r["setting"]) for part, own in done.items() for r in own}
    todo = [
        case
        for case in every
        if (case.part, case.model, case.setting) not in known
        and case.part in (options.part or done)
        and case.model in (options.model or models)
    ]
    num_left = run(options.output, todo, options.seconds)
    command.say(f"{num_left} cases left; the same command runs them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
