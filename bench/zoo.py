"""Every architecture of transformers' registries, tiny: three steps in a budget against eager.

    python -m bench.zoo                                   # all; goes on where it was interrupted
    python -m bench.zoo --registry causal-lm --name llama  # one model
    python -m bench.zoo --page                            # only the page of the finished models

Each model is built from its configuration in a process of its own, with a time limit; nothing is
downloaded. One model of each timm family joins them if timm is installed. Each finished model is
a line of STEM.jsonl; `--again VERDICT` runs those of a verdict once more. STEM.md has the counts,
and each model that is not right with its reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from bench.machine import machine_record
from bench.registries import timm_families
from bench.registries.batches import make_batch
from bench.registries.page import page
from bench.registries.tiny import REGISTRIES, builders, names_of
from bench.registries.trial import trial

Record = dict[str, Any]
_TIMM = "timm"


class Job(NamedTuple):
    """A model whose process runs."""

    registry: str
    name: str
    process: BaseProcess
    answers: Connection
    begin: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the page; 0 whether models are right or wrong."""
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    if not options.page:
        _run(options, lines)
    Path(f"{options.output}.md").write_text("\n".join(page(read(lines))) + "\n", encoding="utf-8")
    return 0


def read(path: Path) -> list[Record]:
    """The newest line of each model."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({(each["registry"], each["name"]): each for each in records}.values())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.zoo", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    stem = Path(__file__).parent / "results" / f"zoo_cpu_{time.strftime('%Y%m')}"
    every = [*REGISTRIES, _TIMM]
    add("--registry", action="append", choices=every, help="repeatable; default: all")
    add("--name", action="append", help="a type of configuration; repeatable; default: all")
    add("--again", action="append", default=[], metavar="VERDICT", help="run these once more")
    add("--limit", type=float, default=60, metavar="S", help="seconds for one model")
    add("--parallel", type=int, default=2, metavar="N", help="processes at a time")
    add("--output", type=Path, default=stem, metavar="STEM", help="write STEM.jsonl and STEM.md")
    add("--page", action="store_true", help="only write the page of the finished models")
    options = parser.parse_args(arguments)
    options.registry = options.registry or every
    return options


def _run(options: argparse.Namespace, lines: Path) -> None:
    torch.set_num_threads(1)
    finished = {
        (each["registry"], each["name"])
        for each in read(lines)
        if each["verdict"] not in options.again
    }
    models = [
        (registry, name)
        for registry in options.registry
        for name in _names_of(registry)
        if (registry, name) not in finished and name in (options.name or [name])
    ]
    head = machine_record("bench.zoo")
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a", encoding="utf-8") as file:
        for record in tqdm(_records(models, options), total=len(models), unit="model"):
            file.write(json.dumps(head | record) + "\n")
            file.flush()


def _names_of(registry: str) -> list[str]:
    if registry != _TIMM:
        return names_of(registry)
    if importlib.util.find_spec(_TIMM) is None:
        sys.stderr.write("timm is not installed; its families are left out\n")
        return []
    return timm_families.names()


def _records(models: list[tuple[str, str]], options: argparse.Namespace) -> Iterable[Record]:
    """One record for each model, in the order in which they finish."""
    waiting, running = list(models), list[Job]()
    while waiting or running:
        while waiting and len(running) < options.parallel:
            running.append(_start(*waiting.pop(0)))
        wait([job.answers for job in running], timeout=1)
        for job in list(running):
            record = _answer(job, options.limit)
            if record is not None:
                running.remove(job)
                yield record


def _start(registry: str, name: str) -> Job:
    # A fork has the imports already. This process has run no op, so it has no threads.
    context = multiprocessing.get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(registry, name, sender), daemon=True)
    process.start()
    sender.close()
    return Job(registry, name, process, answers, time.monotonic())


def _answer(job: Job, limit_s: float) -> Record | None:
    """What the process found; None while it runs within its time."""
    seconds = time.monotonic() - job.begin
    found: Record | None = None
    if job.answers.poll():
        try:
            found = job.answers.recv()
        except EOFError:
            job.process.join()
            found = {"verdict": "error", "detail": f"exit code {job.process.exitcode}"}
    elif seconds > limit_s:
        found = {"verdict": "timeout", "detail": f"not finished in {limit_s:.0f} s"}
        job.process.kill()
    if found is None:
        return None
    job.process.join()
    job.answers.close()
    return {"registry": job.registry, "name": job.name, "seconds": round(seconds, 1)} | found


def _measure(registry: str, name: str, sender: Connection) -> None:
    """In the model's own process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        if registry == _TIMM:
            record = trial(timm_families.builders(name), timm_families.make_batch)
        else:
            record = trial(list(builders(registry, name)), partial(make_batch, registry))
    sender.send(record)


if __name__ == "__main__":
    sys.exit(main())
