"""Every peer beside rockmate: all models and methods by one command, and their page.

    python -m bench.compare                        # all; writes bench/results/peers_cpu_<yyyymm>.*
    python -m bench.compare --model llama --quick --output /tmp/peers
    python -m bench.compare --model llama --method "min-cut by layer: 0.5 ilp" --output /tmp/peers
    python -m bench.compare --read --output bench/results/peers_cpu_202611

Writes STEM.jsonl, one line for each point as it is measured, then the page STEM.md, all points as
STEM/points.csv, and a picture STEM/<model>.png for each model. An interrupted command keeps what
was measured, and goes on when it is started again with the same output. Each model runs in a
process of its own. A model whose process dies is named at the end, and the other models go on.

`bench.comparison` says what is measured, `bench.peers` describes the peers,
`bench.models.COMPARED` lists the models. The ILP solver of the min-cut partitioner needs scipy, the
LoRA model peft, pictures matplotlib.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench import models, peers
from bench.comparison import picture, plans, process
from bench.comparison.lines import Record, by_model, read, say
from bench.comparison.page import page
from bench.comparison.points import points_csv
from bench.comparison.result import ModelResult

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page.

    Returns:
        1 if the process of a model died, 130 if interrupted.
    """
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    try:
        unfinished = [] if options.read else measure_all(options, lines)
    except KeyboardInterrupt:
        say(f"interrupted; {lines} keeps what was measured, and the same command goes on")
        return 130
    records = read(lines)
    if not any(record["kind"] == "point" for record in records):
        say(f"{lines} has no point")
        return 1
    _write(records, options.output)
    for name, status in unfinished:
        say(f"{name}: its process ended with status {status}; the same command goes on")
    return 1 if unfinished else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    for problem in _problems(options):
        parser.error(problem)
    kind = options.device.partition(":")[0]
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.output is None:
        options.output = RESULTS / f"peers_{_hardware(kind)}_{time.strftime('%Y%m')}"
    options.model = options.model or models.COMPARED[kind]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    every = "repeatable; default: all models of the comparison"
    add("--model", action="append", choices=sorted(models.REGISTRY), help=every)
    name = 'for example "checkpoint: every 2"; repeatable; default: all'
    add("--method", action="append", default=[], help=name)
    add("--device", default="cpu", help="cpu or cuda; each has models of its own size")
    rounds = "timed rounds, after one warm-up round (default: 3, with --quick 1)"
    add("--rounds", type=int, help=rounds)
    add("--quick", action="store_true", help="fewer settings and budgets, one round")
    add("--tiny", action="store_true", help="models for tests, steps of milliseconds")
    add("--peers-only", action="store_true", help="measure no plans of rockmate")
    files = "write STEM.jsonl, STEM.md and the folder STEM"
    add("--output", type=Path, metavar="STEM", help=files)
    add("--read", action="store_true", help="measure nothing: write page and pictures again")
    return parser


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Reasons why the options cannot be met."""
    if options.rounds is not None and options.rounds < 1:
        yield f"--rounds is {options.rounds}; at least 1"
    kind = options.device.partition(":")[0]
    if kind not in models.COMPARED:
        yield f"--device is {options.device}; one of {', '.join(models.COMPARED)}"
    if kind == "cuda" and not options.read and not torch.cuda.is_available():
        yield "--device cuda: this PyTorch sees no CUDA device"
    known = {peers.STAGES, *peers.peers_for(kind, quick=options.quick)}
    for method in options.method:
        if method not in known and not plans.is_ours(method):
            examples = '"checkpoint: every 2", "min-cut: 0.5 dp", "rockmate: 0.5"'
            yield f'--method is {method!r}; for example {examples}, "rockmate: at 12.5 MB"'
    is_part = options.model or options.method or options.quick or options.tiny or options.peers_only
    if options.output is None and is_part:
        yield "--output STEM is needed for part of the comparison"


def _hardware(kind: str) -> str:
    """The name of the graphics card in a file name, otherwise the kind of device."""
    if kind != "cuda" or not torch.cuda.is_available():
        return kind
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def measure_all(options: argparse.Namespace, lines: Path) -> list[tuple[str, int]]:
    """Measures what is missing in a file of lines, with one process for each model.

    Args:
        options: Of the command.
        lines: The file.

    Returns:
        The models that are not finished, with the exit status of their process.

    Raises:
        KeyboardInterrupt: A process was interrupted.
    """
    lines.parent.mkdir(parents=True, exist_ok=True)
    begun = read(lines)
    finished = {record["model"]: record for record in begun if record["kind"] == "finished"}
    unfinished = []
    for index, name in enumerate(options.model, start=1):
        own = argparse.Namespace(
            model=name,
            lines=lines,
            plans=_plan_directory(options, name),
            device=options.device,
            rounds=options.rounds,
            method=options.method,
            quick=options.quick,
            tiny=options.tiny,
            peers_only=options.peers_only,
        )
        if name in finished and finished[name]["options"] == process.measured_options(own):
            say(f"{name} is finished ({index} of {len(options.model)})")
            continue
        # Plans of a model without lines belong to other results with the same file name.
        if all(record["model"] != name for record in begun):
            shutil.rmtree(own.plans, ignore_errors=True)
        begin = time.perf_counter()
        say(f"{name} ({index} of {len(options.model)})")
        status = process.start(own)
        if status == 130:
            raise KeyboardInterrupt
        say(f"{name} took {time.perf_counter() - begin:.0f} s")
        if status:
            unfinished.append((name, status))
    return unfinished


def _plan_directory(options: argparse.Namespace, model: str) -> Path:
    """A temporary folder, since plans are needed again only if the measurement is interrupted."""
    return (
        Path(tempfile.gettempdir())
        / f"{options.output.name}_plans"
        / f"{model}{'_tiny' * options.tiny}"
    )


def _write(records: Sequence[Record], stem: Path) -> None:
    text = "\n".join(page(records, f"{stem.name}/points.csv")) + "\n"
    Path(f"{stem}.md").write_text(text)
    stem.mkdir(exist_ok=True)
    (stem / "points.csv").write_text(points_csv(records))
    for name, own in by_model(records).items():
        result = ModelResult(name, own)
        if result.eager and result.peers:
            picture.save(result, stem / f"{name}.png")
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
