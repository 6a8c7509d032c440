"""Every peer beside us: all models and all methods by one command, and the page and pictures of it.

    python -m bench.compare                                    # everything; writes bench/results/peers_cpu_<yyyymm>.*
    python -m bench.compare --model llama --quick --output /tmp/peers
    python -m bench.compare --model llama --method "min-cut by layer: 0.5 ilp" --output /tmp/peers
    python -m bench.compare --read --output bench/results/peers_cpu_202611

Writes STEM.jsonl, one line for each point as it is measured, then STEM.md and STEM/<model>.png. Interrupted, it keeps what was measured,
and goes on from there when it is started again with the same output. Each model runs in a process of its own; one that dies is named at
the end and the others go on. See `bench.comparison` for what is measured and how, `bench.peers` for the peers, `bench.models.COMPARED` for
the models. The ILP solver of the min-cut partitioner needs scipy, the LoRA model peft, pictures matplotlib.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import comparison, comparison_plans, comparison_plot, comparison_table, models, peers

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes page and pictures; 1 if a model's process died, 130 if interrupted."""
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    try:
        unfinished = [] if options.read else measure_all(options, lines)
    except KeyboardInterrupt:
        comparison.say(
            f"interrupted; what was measured is in {lines}, and the same command goes on from there"
        )
        return 130
    records = comparison.read(lines)
    if not any(record["kind"] == "point" for record in records):
        comparison.say(f"nothing has been measured in {lines}")
        return 1
    _write(records, options.output)
    for name, status in unfinished:
        comparison.say(
            f"{name}: its process ended with status {status}; start the same command again to go on"
        )
    return 1 if unfinished else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.compare", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=sorted(models.REGISTRY),
        help="repeatable; all of the comparison if left out",
    )
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        help='as "checkpoint: every 2"; repeatable; all if left out',
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu or cuda; each has models of its own size"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="timed rounds, after one that is not counted (default: 3, quick 1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer settings of peers, fewer budgets, one round"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="models of milliseconds, to see that it runs"
    )
    parser.add_argument("--peers-only", action="store_true", help="plan nothing")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="STEM",
        help="where STEM.jsonl, STEM.md and STEM/<model>.png go",
    )
    parser.add_argument(
        "--read", action="store_true", help="measure nothing: write page and pictures again"
    )
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; at least 1")
    kind = options.device.partition(":")[0]
    if kind not in models.COMPARED:
        parser.error(f"--device is {options.device}; one of {', '.join(models.COMPARED)}")
    if kind == "cuda" and not options.read and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA device")
    known = {peers.STAGES, *peers.peers_for(kind, quick=options.quick)}
    for method in options.method:
        if method not in known and not comparison_plans.is_ours(method):
            parser.error(
                f'--method is {method!r}; as "checkpoint: every 2", "min-cut: 0.5 dp", "rockmate: 0.5", "rockmate: at 12.5 MB"'
            )
    is_whole = not (
        options.model or options.method or options.quick or options.tiny or options.peers_only
    )
    if options.output is None and not is_whole:
        parser.error("--output STEM is needed for part of the comparison")
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.output = (
        options.output
        or Path(__file__).parent / "results" / f"peers_{_hardware(kind)}_{time.strftime('%Y%m')}"
    )
    options.model = options.model or models.COMPARED[kind]
    return options


def _hardware(kind: str) -> str:
    is_named = kind == "cuda" and torch.cuda.is_available()
    return (
        re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
        if is_named
        else kind
    )


def measure_all(options: argparse.Namespace, lines: Path) -> list[tuple[str, int]]:
    """Measures what is missing in `lines`, a process for each model.

    Args:
        options: those of the command.
        lines: a file of JSON lines.

    Returns:
        Names of the models that are not finished, with the exit status of their process.

    Raises:
        KeyboardInterrupt: a process was interrupted.
    """
    lines.parent.mkdir(parents=True, exist_ok=True)
    begun = comparison.read(lines)
    finished = {record["model"]: record for record in begun if record["kind"] == "finished"}
    unfinished = []
    for index, name in enumerate(options.model, start=1):
        own = argparse.Namespace(
            model=name, lines=lines, plans=_plan_directory(options, name), device=options.device, rounds=options.rounds,
            method=options.method, quick=options.quick, tiny=options.tiny, peers_only=options.peers_only,
        )  # fmt: skip
        if name in finished and finished[name]["options"] == comparison.plain(own):
            comparison.say(f"{name} is finished ({index} of {len(options.model)})")
            continue
        if all(
            record["model"] != name for record in begun
        ):  # plans that wait are of other results by the same name
            shutil.rmtree(own.plans, ignore_errors=True)
        begin = time.perf_counter()
        comparison.say(f"{name} ({index} of {len(options.model)})")
        status = comparison.start(own)
        if status == 130:
            raise KeyboardInterrupt
        comparison.say(f"{name} took {time.perf_counter() - begin:.0f} s")
        if status:
            unfinished.append((name, status))
    return unfinished


def _plan_directory(options: argparse.Namespace, model: str) -> Path:
    """Outside of the results: plans are needed again only if the measurement is interrupted."""
    return (
        Path(tempfile.gettempdir())
        / f"{options.output.name}_plans"
        / f"{model}{'_tiny' * options.tiny}"
    )


def _write(records: Sequence[Record], stem: Path) -> None:
    text = "\n".join(comparison_table.page(records)) + "\n"
    Path(f"{stem}.md").write_text(text)
    stem.mkdir(exist_ok=True)
    for name, own in comparison.by_model(records).items():
        result = comparison_table.ModelResult(name, own)
        if result.eager and result.peers:
            comparison_plot.save(result, stem / f"{name}.png")
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
