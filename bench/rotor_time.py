"""Time and memory of rotor's table, on chains as long as those of real models.

    taskset -c 1 python -m bench.rotor_time > bench/results/rotor_time_cpu_<yyyymm>.md

Each stage has options that trade bytes for time. The budget is half of the bytes that saving
everything takes. Times are processor times on one thread, medians of some runs, since other
processes slow down memory accesses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.machine import machine_record
from bench.pages import machine_section, table
from rotor import Chain, Option, Stage, solve_table

MIB = 2**20
GIB = 2**30
MAX_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A chain and its table.

    Attributes:
        num_stages: Of the chain.
        lengths: Lengths of the spans that have options, in stages.
        num_options: Of each span.
        num_slots: Of the table.
        target_s: Target of the processor time; None if there is none.
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

COLUMNS = (
    *("stages", "spans of", "options each", "slots", "median, s", "target, s", ""),
    *("runs, s", "memory, GiB", ""),
)


def model_like(num_stages: int, lengths: tuple[int, ...], num_options: int) -> tuple[Chain, int]:
    """A chain that trades bytes for time in each span, and the bytes that saving all takes."""
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
    """Processor time of each run."""
    chain, all_bytes = model_like(size.num_stages, size.lengths, size.num_options)
    seconds = []
    for _ in range(num_runs):
        begin = time.process_time()
        solve_table(chain, all_bytes // 2, size.num_slots)
        seconds.append(time.process_time() - begin)
    return seconds


def peak_gib(size: Size) -> float:
    """Peak memory of one run, with the table."""
    chain, all_bytes = model_like(size.num_stages, size.lengths, size.num_options)
    tracemalloc.start()
    solve_table(chain, all_bytes // 2, size.num_slots)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes / GIB


def as_row(size: Size, seconds: Sequence[float], memory_gib: float) -> list[str]:
    """One row of the table."""
    median = statistics.median(seconds)
    target = ["", ""]
    if size.target_s is not None:
        target = [f"{size.target_s:g}", _verdict(median <= size.target_s)]
    return [
        *(str(size.num_stages), ", ".join(map(str, size.lengths))),
        *(str(size.num_options), str(size.num_slots), f"{median:.2f}", *target),
        ", ".join(f"{second:.2f}" for second in seconds),
        *(f"{memory_gib:.2f}", _verdict(memory_gib <= MAX_GIB)),
    ]


def _verdict(is_met: bool) -> str:
    return "hit" if is_met else "**miss**"


def page(rows: Sequence[Sequence[str]], record: Mapping[str, Any]) -> str:
    """The page, with the longest chain as its headline."""
    longest = max(rows, key=lambda row: int(row[0]))
    lines = [
        "# Time of rotor's table",
        "",
        f"**The table of {longest[0]} stages with {longest[2]} options each and {longest[3]} slots "
        f"takes {longest[4]} s of processor time and {longest[8]} GiB.**",
        "",
        *table(COLUMNS, rows),
        "",
        *machine_section(record),
        "",
        "## How it was measured",
        "",
        f"{' '.join((__doc__ or '').split(chr(10) * 2)[2].split())} Memory is the peak of arrays "
        f"while the table is filled; its target is {MAX_GIB:g} GiB.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rotor_time", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each chain, at least 1")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = machine_record("bench.rotor_time")
    rows = [as_row(size, seconds_of_runs(size, chosen.runs), peak_gib(size)) for size in SIZES]
    sys.stdout.write(page(rows, record))


if __name__ == "__main__":
    main()
