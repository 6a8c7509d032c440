"""How long rotor's table takes, and how much memory, on chains as long as those of real models.

    taskset -c 1 python -m bench.rotor_time

Each stage has options that trade bytes for time; the budget is half of what keeping everything
takes. Seconds are of processor time on one thread, the median of a few runs: others on the machine
slow what misses the cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.machine import machine_record, machine_text
from rotor import Chain, Option, Stage, solve_table

MIB = 2**20
GIB = 2**30
MAX_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A chain and its table.

    Attributes:
        num_stages: of the chain.
        lengths: of the spans that have options, in stages.
        num_options: of each span.
        num_slots: of the table.
        target_s: processor time that the table may take; none if None.
    """

    num_stages: int
    lengths: tuple[int, ...]
    num_options: int
    num_slots: int
    target_s: float | None


SIZES = (
    Size(num_stages=50, lengths=(1,), num_options=8, num_slots=500, target_s=0.3),
    Size(num_stages=200, lengths=(1,), num_options=8, num_slots=500, target_s=5.0),
    Size(num_stages=96, lengths=(1, 2, 4), num_options=12, num_slots=1000, target_s=None),
)

HEADER = """\
# Time of rotor's table

Command: `taskset -c 1 python -m bench.rotor_time`. Seconds of processor time on one thread, each run and the median; the most memory
that arrays take while the table is filled, at most 1 GiB.
"""  # noqa: E501
COLUMNS = """\
| stages | spans of | options each | slots | median, s | target, s | | runs, s | memory, GiB | |
|---|---|---|---|---|---|---|---|---|---|"""


def model_like(num_stages: int, lengths: tuple[int, ...], num_options: int) -> tuple[Chain, int]:
    """A chain that trades bytes for time in each span, and the bytes of saving everything."""
    rng = random.Random(0)
    x = [rng.randint(1, 20 * MIB) for _ in range(num_stages + 1)]
    forward = [rng.uniform(0.5, 2.0) for _ in range(num_stages)]
    inner = [rng.randint(40 * MIB, 160 * MIB) for _ in range(num_stages)]
    stages = tuple(
        Stage(
            input_bytes=x[s],
            output_gradient_bytes=x[s + 1],
            forward_ms=forward[s],
            forward_peak_bytes=2 * x[s + 1],
        )
        for s in range(num_stages)
    )
    spans = {}
    for first, length in ((s, k) for k in lengths for s in range(num_stages - k + 1)):
        end = first + length
        span_ms, span_bytes = sum(forward[first:end]), sum(inner[first:end])
        kept = [
            (i / (num_options - 1), x[end] + span_bytes * i // (num_options - 1))
            for i in range(num_options)
        ]
        spans[first, end - 1] = tuple(
            Option(
                saved_bytes=saved,
                forward_peak_bytes=saved + 10 * MIB,
                backward_peak_bytes=span_bytes + 2 * x[end] + x[first],
                forward_ms=span_ms,
                backward_ms=2 * span_ms + span_ms * (1 - part) ** 1.5,
            )
            for part, saved in kept
        )
    return Chain(stages=stages, spans=spans), sum(inner)


def seconds_of_runs(size: Size, num_runs: int) -> list[float]:
    """Processor time of each of some solves."""
    chain, all_bytes = model_like(size.num_stages, size.lengths, size.num_options)
    seconds = []
    for _ in range(num_runs):
        begin = time.process_time()
        solve_table(chain, all_bytes // 2, size.num_slots)
        seconds.append(time.process_time() - begin)
    return seconds


def peak_gib(size: Size) -> float:
    """The most memory that a solve takes, the table included."""
    chain, all_bytes = model_like(size.num_stages, size.lengths, size.num_options)
    tracemalloc.start()
    solve_table(chain, all_bytes // 2, size.num_slots)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes / GIB


def as_row(size: Size, seconds: Sequence[float], memory_gib: float) -> str:
    """One row of the table, Markdown."""
    median = statistics.median(seconds)
    target, hit = (
        ("", "")
        if size.target_s is None
        else (f"{size.target_s:g}", _verdict(median <= size.target_s))
    )
    return (
        f"| {size.num_stages} | {', '.join(map(str, size.lengths))} | {size.num_options} | "
        f"{size.num_slots} | {median:.2f} | {target} | "
        f"{hit} | {', '.join(f'{second:.2f}' for second in seconds)} | {memory_gib:.2f} | "
        f"{_verdict(memory_gib <= MAX_GIB)} |"
    )


def _verdict(is_met: bool) -> str:
    return "hit" if is_met else "**miss**"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a page: the machine and one row a chain."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rotor_time", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=5, help="how many of each chain, at least 1")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdout.write(f"{HEADER}\n{machine_text(machine_record('bench.rotor_time'))}\n\n{COLUMNS}\n")
    for size in SIZES:
        sys.stdout.write(as_row(size, seconds_of_runs(size, chosen.runs), peak_gib(size)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
