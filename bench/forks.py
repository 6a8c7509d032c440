"""Measurements in processes of their own, each with a time limit, several at a time."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

import rockmate
from bench import command
from bench.command import Record

Task = TypeVar("Task", bound=Mapping[str, Any])


class _Job(NamedTuple):
    """A task whose process runs."""

    task: Any
    process: BaseProcess
    answers: Connection
    begin: float


def parser(name: str, text: str | None, limit_s: float) -> argparse.ArgumentParser:
    """That of a command with a page, which goes on where it was interrupted."""
    made = command.parser(name, text, stem=f"{name}_cpu")  # of a GPU: --output
    add = made.add_argument
    add("--again", action="append", default=[], metavar="VERDICT", help="run these once more")
    add("--limit", type=float, default=limit_s, metavar="S", help="seconds for each")
    add("--parallel", type=int, default=2, metavar="N", help="processes at a time")
    return made


def run_missing(
    options: argparse.Namespace,
    keys: tuple[str, ...],
    tasks: Iterable[Task],
    measure: Callable[[Task], Record],
) -> Iterator[Record]:
    """The records of the tasks that have no line yet, of which these keys tell them apart."""
    torch.set_num_threads(1)
    known = command.newest(command.read(command.lines_of(options)), *keys)
    done = {tuple(r[key] for key in keys) for r in known if r["verdict"] not in options.again}
    todo = [each for each in tasks if tuple(each[key] for key in keys) not in done]
    found = run_each(todo, measure, parallel=options.parallel, limit_s=options.limit)
    for task, record in tqdm(found, total=len(todo)):
        yield {**task, **record}


def run_each(
    tasks: Sequence[Task], measure: Callable[[Task], Record], *, parallel: int, limit_s: float
) -> Iterator[tuple[Task, Record]]:
    """What `measure` finds for each task, with its `seconds`, in the order in which they finish.

    Nothing is printed in the processes, and warnings are ignored. The caller has run no op of
    PyTorch before, so that it has no threads when it forks. A process that dies gives
    `verdict` "error", one that takes longer than `limit_s` seconds gives "timeout".
    """
    waiting, running = list(tasks), list[_Job]()
    _share_imports()
    while waiting or running:
        while waiting and len(running) < parallel:
            running.append(_start(waiting.pop(0), measure))
        wait([job.answers for job in running], timeout=1)
        for job in list(running):
            record = _answer(job, limit_s)
            if record is not None:
                running.remove(job)
                yield job.task, record


def _share_imports() -> None:
    """Imports what planning needs, so that no process does, nor collects these objects."""
    for found in pkgutil.walk_packages(rockmate.__path__, "rockmate."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an optional package
                importlib.import_module(found.name)
    importlib.import_module("torch._functorch.aot_autograd")
    gc.freeze()


def _start(task: Any, measure: Callable[[Any], Record]) -> _Job:
    context = multiprocessing.get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(task, measure, sender), daemon=True)
    process.start()
    sender.close()
    return _Job(task, process, answers, time.monotonic())


def _answer(job: _Job, limit_s: float) -> Record | None:
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
    return {"seconds": round(seconds, 1)} | found


def _run(task: Any, measure: Callable[[Any], Record], sender: Connection) -> None:
    """In the task's own process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        record = measure(task)
    sender.send(record)
