"""Every peer beside rockmate: all models and methods by one command, and their page.

    python -m bench.compare                        # all; writes bench/results/peers_cpu_<yyyymm>.*
    python -m bench.compare --model llama --method checkpoint --method "rockmate: 0.5" --output X
    python -m bench.compare --model gpt2 --method "rockmate: 0.2" --loss-only --output X
    python -m bench.compare --page --output bench/results/peers_cpu_202611
    python -m bench.compare --readme --output bench/results/peers_cpu_202611

Writes STEM.jsonl, then the page STEM.md, and all points as STEM/points.csv. Each model runs in a
process of its own, and its lines are written when it is finished: an interrupted command goes on
with the next model when it is started again with the same output. A model whose process dies is
named at the end, and the other models go on.
`--readme` prints README's table.

`bench.comparison` says what is measured, `bench.peers` describes the peers,
`bench.models.COMPARED` lists the models. The ILP solver of the min-cut partitioner needs scipy, the
LoRA models peft, diffusion models diffusers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import command, measure, models, peers
from bench.command import Record, say
from bench.comparison import plans
from bench.comparison.measurement import measure_model
from bench.comparison.page import page, points_csv, readme_table
from bench.comparison.result import ModelResult, by_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page.

    Returns:
        1 if the process of a model died.
    """
    options = _parse(arguments)
    lines = command.lines_of(options)
    failed = [] if options.page or options.readme else list(_measure_missing(options, lines))
    records = command.read(lines)
    if not any(record["kind"] == "point" for record in records):
        say(f"{lines} has no point")
        return 1
    _write(records, options)
    for name, status in failed:
        say(f"{name}: its process ended with status {status}; the same command measures it")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(
        "compare", __doc__, models=sorted(models.REGISTRY), rounds=3, tiny=True, stem="peers_cpu"
    )
    add = parser.add_argument
    name = 'for example "checkpoint: every 2"; repeatable; default: all'
    add("--method", action="append", default=[], help=name)
    add("--loss-only", action="store_true", help="plans for steps that return only their loss")
    add("--readme", action="store_true", help="measure nothing: print README's table")
    options = parser.parse_args(arguments)
    for problem in _problems(options, is_whole=options.output == parser.get_default("output")):
        parser.error(problem)
    options.model = options.model or models.COMPARED
    return options


def _problems(options: argparse.Namespace, *, is_whole: bool) -> Iterator[str]:
    """Reasons why the options cannot be met; the whole has an output of its own."""
    known = {peers.STAGES, *peers.peers_for()}
    for method in options.method:
        if method not in known and not plans.is_ours(method):
            examples = '"checkpoint: every 2", "min-cut: 0.5 dp", "rockmate: 0.5"'
            yield f'--method is {method!r}; for example {examples}, "rockmate: at 12.5 MB"'
    is_part = options.model or options.method or options.tiny
    if is_whole and (is_part or options.loss_only):
        yield "--output STEM is needed for part of the comparison"


def _measure_missing(options: argparse.Namespace, lines: Path) -> Iterator[tuple[str, int]]:
    """Adds the lines of the models that a file lacks; gives those whose process died."""
    measured = {key: getattr(options, key) for key in plans.MEASURED}
    for name in options.model:
        runs = [
            r["options"] for r in command.read(lines) if (r["kind"], r["model"]) == ("run", name)
        ]
        if any({key: run.get(key, False) for key in measured} == measured for run in runs):
            say(f"{name} is finished")
            continue
        say(name)
        environment = os.environ | measure.RESIDENT_ENVIRONMENT
        status, records = command.apart(measure_model, name, measured, environment=environment)
        if status:
            yield name, status
            continue
        for record in records:
            command.add_line(lines, record)


def _write(records: Sequence[Record], options: argparse.Namespace) -> None:
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    stem = options.output
    if options.readme:
        sys.stdout.write("\n".join(readme_table(results)) + "\n")
        return
    command.write(options, page(records, f"{stem.name}/points.csv"))
    stem.mkdir(exist_ok=True)
    (stem / "points.csv").write_text(points_csv(results))


if __name__ == "__main__":
    sys.exit(main())
