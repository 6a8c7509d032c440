"""The largest batch that `rockmate fit` predicts, and the largest that trains in a capped process.

    python -m bench.fit                              # writes bench/results/fit_cpu_<yyyymm>.*
    python -m bench.fit --model gpt2 --model bert    # a part; lines are added

For each model a memory is given, and the largest batch predicted from costs that are estimated for
a model on the meta device. The search then trains: each batch in a process of its own, which makes
the model, plans the smallest peak, and limits its data segment (`RLIMIT_DATA`) to what it holds and
the given memory, less its parameters. It takes two optimizer steps. The system ends an allocation
beyond the limit, and the batch does not fit. The search goes up from the prediction, or down, until
a batch and the next one differ.

What the process holds when the limit is set has room of its own: memory that planning has freed
would serve the step's small tensors beside the limit. So every tensor from 32 KiB on is mapped by
itself. What libraries take in a first step they have taken by then, in a step of another model. The
prediction sets 2 MiB aside, for the pages that mapped tensors begin and end in, 4 KiB a tensor, and
for Python's objects.

The process counts nothing that the prediction counts. It shares the planner's schedules with it.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.measure import status_bytes
from bench.models import Workload, built, makers
from bench.pages import filled
from rockmate.capture.options import Numerics

_MIB = 1 << 20
_RESERVE_BYTES = 2 * _MIB  # see above
_NUM_STEPS = 2
_MOST_RUNS = 12
_MODELS = makers("fitted")


class Case(NamedTuple):
    """What a model is given.

    Attributes:
        memory_mib: the memory, libraries and interpreter aside.
        optimizer: "adamw" or "sgd".
        numerics: as for `Planner`.
    """

    memory_mib: int
    optimizer: str = "adamw"
    numerics: Numerics = "bitwise"


CASES: Mapping[str, Case] = {
    "gpt2, in chunks": Case(300, numerics="any_order"),
    "gpt2": Case(300),
    "llama": Case(260),
    "llama, LoRA": Case(200),
    "llama, SGD": Case(200, optimizer="sgd"),
    "bert": Case(300),
    "distilbert, classified": Case(130),
    "qwen2": Case(320),
    "vit": Case(160),
    "mlp": Case(200),
}


def _workload(name: str, device: str = "cpu") -> Workload:
    return built(name, _MODELS[name], device=device).with_loss_inside()


# --- the prediction -------------------------------------------------------------------------------


def predicted(name: str) -> int:
    """The largest batch by `rockmate.fit`."""
    import rockmate

    case, workload = CASES[name], _workload(name, "meta")
    found = rockmate.fit(
        workload.model,
        workload.sample,
        case.memory_mib * _MIB,
        optimizer=case.optimizer,
        reserve=_RESERVE_BYTES,
        machine="cpu-avx2",
        numerics=case.numerics,
        sizes=[1],
    )
    return found.largest.batch_size


# --- the search -----------------------------------------------------------------------------------


def searched(name: str, first: int) -> tuple[int, int]:
    """The largest batch that trains in a capped process, and how many batches were tried."""
    fits: dict[int, bool] = {}
    size = first
    while len(fits) < _MOST_RUNS:
        fits[size] = size > 0 and _trains(name, size)
        if fits[size] and fits.get(size + 1) is False:
            return size, len(fits)
        if not fits[size] and (fits.get(size - 1) or size == 1):
            return size - 1, len(fits)
        size += 1 if fits[size] else -1
    raise RuntimeError(f"{name}: no end after {_MOST_RUNS} batches from {first}: {fits}")


def _trains(name: str, num_rows: int) -> bool:
    environment = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "32768",  # what is free is given back at once
        "MALLOC_ARENA_MAX": "1",
    }
    status, found = command.apart(
        train_capped, name, num_rows, environment=os.environ | environment
    )
    if status or not found:
        raise RuntimeError(f"{name} with {num_rows} rows failed; see above")
    return found[0]


def train_capped(name: str, num_rows: int) -> Iterator[bool]:
    """Trains in this process, limited: whether it fits."""
    from rockmate import Planner

    case, workload = CASES[name], _workload(name)
    model, sample = workload.model, dict(workload.make_batch(0, num_rows))
    planner = Planner(model, sample, machine="cpu-avx2", numerics=case.numerics)
    module = planner.module(1, on_infeasible="least", trial="never")
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained) if case.optimizer == "adamw" else torch.optim.SGD(trained)
    )
    _warm_up()
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    inputs = sum(each.nbytes for each in sample.values())
    limit = status_bytes("VmData") - held - inputs + case.memory_mib * _MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    fits = True
    try:
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad(set_to_none=False)
            # Outputs that live into the next step would take memory beside it.
            workload.loss(module, sample)[1].backward()
            optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        fits = False
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    yield fits


def _warm_up() -> None:
    """Threads and libraries that every step uses."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()


# --- the command ----------------------------------------------------------------------------------

MOST_BELOW = 1
"""How many rows a prediction may be below the largest batch that trains; it is never above."""


def measured(name: str, _: argparse.Namespace) -> Iterator[Record]:
    """The prediction and the largest batch that trains."""
    begin = time.perf_counter()
    guess = predicted(name)
    predicted_s = time.perf_counter() - begin
    real, num_runs = searched(name, max(1, guess))
    command.say(f"{name}: {guess} predicted, {real} train")
    yield {
        "command": f'python -m bench.fit --model "{name}"', "model": name,
        "memory_mib": CASES[name].memory_mib, "predicted": guess, "predicted_s": predicted_s,
        "trains": real, "num_runs": num_runs,
    }  # fmt: skip


def is_held(line: Record) -> bool:
    """Whether a prediction is within its target."""
    return 0 <= line["trains"] - line["predicted"] <= MOST_BELOW


def page(lines: Sequence[Record]) -> list[str]:
    """The target, and a row for the newest line of each model."""
    newest = command.newest(lines, "model")
    missing = "; ".join(name for name in CASES if name not in {line["model"] for line in newest})
    machine = machine_text({**newest[-1], "command": "python -m bench.fit"})
    note = f"Not measured yet: {missing}." if missing else ""
    return filled("fit", machine=machine, lines=newest, missing=note)


def _status(_: argparse.Namespace, records: list[Record]) -> int:
    """1 if a prediction is above, or over one below."""
    return 0 if all(map(is_held, command.newest(records, "model"))) else 1


main = command.main_of("fit", __doc__, measured, page, models=CASES, stem="fit_cpu", after=_status)


if __name__ == "__main__":
    sys.exit(main())
