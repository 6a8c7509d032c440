"""Every peer beside rockmate: all models and methods by one command, and their page.

    python -m bench.compare                        # all; writes bench/results/peers_cpu_<yyyymm>.*
    python -m bench.compare --model llama --method checkpoint --method "rockmate: 0.5" --output X
    python -m bench.compare --model gpt2 --method "rockmate: 0.2" --loss-only --output X
    python -m bench.compare --branched             # models that are no chain, beside checkpoints
    python -m bench.compare --page --output bench/results/peers_cpu_202611
    python -m bench.compare --readme --output bench/results/peers_cpu_202611

Writes STEM.jsonl, one line for each point as it is measured, then the page STEM.md, all points as
STEM/points.csv, and a picture STEM/<model>.png for each model; with `--branched` one picture,
STEM.png. An interrupted command keeps what was measured, and goes on when it is started again with
the same output. Each model runs in a process of its own. A model whose process dies is named at the
end, and the other models go on. `--readme` prints README's table.

`bench.comparison` says what is measured, `bench.peers` describes the peers,
`bench.models.COMPARED` lists the models. The ILP solver of the min-cut partitioner needs scipy, the
LoRA models peft, two branched models diffusers, pictures matplotlib.
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

from bench import command, models, peers
from bench.command import Record, read, say
from bench.comparison import branched, plans, process
from bench.comparison.lines import by_model
from bench.comparison.page import page, readme_table
from bench.comparison.points import points_csv, save_picture
from bench.comparison.result import OURS, ModelResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page.

    Returns:
        1 if the process of a model died, 130 if interrupted.
    """
    options = _parse(arguments)
    lines = command.lines_of(options)
    try:
        is_read = options.page or options.readme
        unfinished = [] if is_read else measure_all(options, lines)
    except KeyboardInterrupt:
        say(f"interrupted; {lines} keeps what was measured, and the same command goes on")
        return 130
    records = read(lines)
    if not any(record["kind"] == "point" for record in records):
        say(f"{lines} has no point")
        return 1
    _write(records, options)
    for name, status in unfinished:
        say(f"{name}: its process ended with status {status}; the same command goes on")
    return 1 if unfinished else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    for problem in _problems(options):
        parser.error(problem)
    kind = options.device.partition(":")[0]
    stem = "branched" if options.branched else "peers"
    if options.output is None:
        options.output = command.RESULTS / f"{stem}_{_hardware(kind)}_{time.strftime('%Y%m')}"
    if options.branched:
        options.method = [*branched.PEERS, *(f"{OURS}: {share}" for share in branched.SHARES)]
    every = (*models.BRANCHED, *branched.CHAINS) if options.branched else models.COMPARED[kind]
    options.model = options.model or every
    return options


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "compare", __doc__, models=sorted(models.REGISTRY), rounds=3, tiny=True, stem="peers_cpu"
    )
    add = parser.add_argument
    name = 'for example "checkpoint: every 2"; repeatable; default: all'
    add("--method", action="append", default=[], help=name)
    add("--device", default="cpu", help="cpu or cuda; each has models of its own size")
    add("--quick", action="store_true", help="fewer settings and budgets")
    add("--peers-only", action="store_true", help="measure no plans of rockmate")
    add("--loss-only", action="store_true", help="plans for steps that return only their loss")
    add("--branched", action="store_true", help="the models and budgets of the branched page")
    add("--readme", action="store_true", help="measure nothing: print README's table")
    parser.set_defaults(output=None)
    return parser


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Reasons why the options cannot be met."""
    kind = options.device.partition(":")[0]
    if kind not in models.COMPARED:
        yield f"--device is {options.device}; one of {', '.join(models.COMPARED)}"
    if kind == "cuda" and not options.page and not torch.cuda.is_available():
        yield "--device cuda: this PyTorch sees no CUDA device"
    known = {peers.STAGES, *peers.peers_for(kind, quick=options.quick)}
    for method in options.method:
        if method not in known and not plans.is_ours(method):
            examples = '"checkpoint: every 2", "min-cut: 0.5 dp", "rockmate: 0.5"'
            yield f'--method is {method!r}; for example {examples}, "rockmate: at 12.5 MB"'
    is_part = options.model or options.method or options.quick or options.tiny
    if options.output is None and (is_part or options.peers_only or options.loss_only):
        yield "--output STEM is needed for part of the comparison"


def _hardware(kind: str) -> str:
    """The name of the graphics card in a file name, otherwise the kind of device."""
    if kind != "cuda" or not torch.cuda.is_available():
        return kind
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def measure_all(options: argparse.Namespace, lines: Path) -> list[tuple[str, int]]:
    """Measures what is missing in a file of lines, with one process for each model.

    Returns:
        The models that are not finished, with the exit status of their process.

    Raises:
        KeyboardInterrupt: A process was interrupted.
    """
    lines.parent.mkdir(parents=True, exist_ok=True)
    begun = read(lines)
    finished = {record["model"]: record for record in begun if record["kind"] == "finished"}
    shared = ("device", "rounds", "quick", "tiny", "peers_only", "loss_only")
    unfinished = []
    for index, name in enumerate(options.model, start=1):
        task = process.Task(
            model=name,
            lines=lines.absolute(),
            plans=_plan_directory(options, name),
            method=tuple(options.method),
            **{key: getattr(options, key) for key in shared},
        )
        if name in finished and finished[name]["options"] == task.measured:
            say(f"{name} is finished ({index} of {len(options.model)})")
            continue
        # Plans of a model without lines belong to other results with the same file name.
        if all(record["model"] != name for record in begun):
            shutil.rmtree(task.plans, ignore_errors=True)
        begin = time.perf_counter()
        say(f"{name} ({index} of {len(options.model)})")
        status = process.start(task)
        if status == 130:
            raise KeyboardInterrupt
        say(f"{name} took {time.perf_counter() - begin:.0f} s")
        if status:
            unfinished.append((name, status))
    return unfinished


def _plan_directory(options: argparse.Namespace, model: str) -> Path:
    """A temporary folder, since plans are needed again only if the measurement is interrupted."""
    folder = Path(tempfile.gettempdir()) / f"{options.output.name}_plans"
    return folder / f"{model}{'_tiny' * options.tiny}"


def _write(records: Sequence[Record], options: argparse.Namespace) -> None:
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    stem = options.output
    if options.readme:
        sys.stdout.write("\n".join(readme_table(results)) + "\n")
        return
    if options.branched:
        results = [result for result in results if result.eager and result.of("planner")]
        command.write(options, branched.page(results))
        branched.save_picture(results, Path(f"{stem}.png"))
        return
    command.write(options, page(records, f"{stem.name}/points.csv"))
    stem.mkdir(exist_ok=True)
    (stem / "points.csv").write_text(points_csv(results))
    for result in results:
        if result.eager and result.peers:
            save_picture(result, stem / f"{result.name}.png")


if __name__ == "__main__":
    sys.exit(main())
