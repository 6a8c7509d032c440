"""Branched models and some chains beside them, planned and run: their page and picture.

    python -m bench.branched                    # all; writes bench/results/branched_cpu_<yyyymm>.*
    python -m bench.branched --model bart --output /tmp/branched
    python -m bench.branched --read --output bench/results/branched_cpu_202611

Writes STEM.jsonl, STEM.md and STEM.png. Each model runs in a process of its own, as in
`bench.compare`, which says what is measured and how an interrupted command goes on. Peers are
eager, one checkpoint around every block and one around every stage. Pictures need matplotlib, two
of the models diffusers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import branched_page, compare, models
from bench.branched_page import PEERS, SHARES
from bench.comparison.lines import by_model, read, say
from bench.comparison.result import OURS, ModelResult

CHAINS = ("gpt2-12", "llama", "resnet50")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes page and picture.

    Returns:
        1 if the process of a model died, 130 if interrupted.
    """
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    try:
        unfinished = [] if options.read else compare.measure_all(options, lines)
    except KeyboardInterrupt:
        say(f"interrupted; {lines} keeps what was measured, and the same command goes on")
        return 130
    results = [ModelResult(name, own) for name, own in by_model(read(lines)).items()]
    results = [result for result in results if result.eager and result.of("planner")]
    if not results:
        say(f"{lines} has no model that is measured and planned")
        return 1
    text = "\n".join(branched_page.page(results)) + "\n"
    Path(f"{options.output}.md").write_text(text)
    branched_page.save_picture(results, Path(f"{options.output}.png"))
    sys.stdout.write(text)
    for name, status in unfinished:
        say(f"{name}: its process ended with status {status}; the same command goes on")
    return 1 if unfinished else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    every = (*models.BRANCHED, *CHAINS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.branched", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", action="append", choices=every, help="repeatable; default: all")
    add("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    add("--tiny", action="store_true", help="models for tests, steps of milliseconds")
    add("--output", type=Path, metavar="STEM", help="write STEM.jsonl, STEM.md and STEM.png")
    add("--read", action="store_true", help="measure nothing: write page and picture again")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; at least 1")
    if options.output is None and (options.model or options.tiny):
        parser.error("--output STEM is needed for some of the models, or tiny ones")
    if options.output is None:
        options.output = compare.RESULTS / f"branched_cpu_{time.strftime('%Y%m')}"
    options.model = options.model or every
    options.method = [*PEERS, *(f"{OURS}: {share}" for share in SHARES)]
    options.device, options.quick, options.peers_only = "cpu", False, False
    return options


if __name__ == "__main__":
    sys.exit(main())
