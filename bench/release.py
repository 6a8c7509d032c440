"""Measures what README states, by one command, into one folder.

    python -m bench.release --output release                  # hours on one CPU thread
    python -m bench.release --output /tmp/release --quick     # a rehearsal on a tiny model

The steps are `bench.compare` on README's models, for its picture and its table, and
`bench.plan_quality`, for the gaps to the lower bound. Each step writes lines, a page and pictures
into the folder, and goes on where an interruption stopped it. README.md in the folder has the rows
of README's table and the sentence on gaps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import compare, plan_quality
from bench.comparison.lines import by_model, read, say
from bench.comparison.result import ModelResult
from bench.pages import megabytes, table
from bench.quality.records import Records, percent
from bench.quality.targets import LARGEST_GAP

ROWS = {
    "llama": "Llama type",
    "llama-lora": "Llama type with LoRA",
    "gpt2-deep": "GPT-2, 24 layers",
    "gpt2-1row": "GPT-2, full vocabulary",
    "bert-narrow": "BERT, narrow",
    "t5-small": "T5-small",
    "vit-small": "ViT-small",
    "resnet50": "ResNet-50",
}
"""Model to its name in README's table. README's picture is that of the first."""

QUICK_ROWS = {"mlp": "MLP"}
QUICK_METHODS = ("checkpoint", "rockmate: minimum")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps and writes README's rows; the status of a step that failed, or 0."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    peers, quality = options.output / "peers", options.output / "plan_quality"
    rows = QUICK_ROWS if options.quick else ROWS
    chosen = [word for name in rows for word in ("--model", name)]
    methods = [word for name in QUICK_METHODS for word in ("--method", name)]
    extra = ["--tiny", "--quick"] if options.quick else []
    steps = {
        compare: [*chosen, *extra, *(methods if options.quick else [])],
        plan_quality: [*chosen, *extra] if options.quick else [],
    }
    for (step, words), stem in zip(steps.items(), (peers, quality), strict=True):
        say(f"{step.__name__} {' '.join(words)}")
        status = step.main([*words, "--output", str(stem)])
        if status:
            return status
    text = "\n".join([*_table(peers, rows), "", _gap_sentence(quality)]) + "\n"
    (options.output / "README.md").write_text(text)
    sys.stdout.write(text)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.release", description=(__doc__ or "").partition("\n")[0]
    )
    folder = "write lines, pages and pictures to DIRECTORY"
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY", help=folder)
    parser.add_argument("--quick", action="store_true", help="rehearse on a tiny model")
    return parser.parse_args(arguments)


def _table(stem: Path, rows: dict[str, str]) -> list[str]:
    """README's table of results, from the lines of `bench.compare`."""
    columns = (
        *("model", "eager", "checkpoint: peak, time", "rockmate there"),
        *("smallest peak of others", "rockmate's, time"),
    )
    records = by_model(read(Path(f"{stem}.jsonl")))
    results = [ModelResult(name, records[name]) for name in rows]
    return table(columns, [_row(result, rows[result.name]) for result in results])


def _row(result: ModelResult, title: str) -> list[str]:
    eager, checkpoint, least = result.eager, result.checkpoint, result.least
    assert eager is not None
    assert checkpoint is not None
    assert least is not None
    peer, ours = checkpoint.peer, least.ours
    return [
        title,
        megabytes(eager.peak_bytes),
        f"{megabytes(peer.peak_bytes)}, {peer.ratio:.3f}",
        f"{checkpoint.ours.ratio:.3f}" if checkpoint.ours else "none as small",
        megabytes(least.peer.peak_bytes),
        f"{megabytes(ours.peak_bytes)}, {ours.ratio:.3f}" if ours else "none as fast",
    ]


def _gap_sentence(stem: Path) -> str:
    """README's sentence on the distance of plans to the lower bound."""
    lines = Records(read(Path(f"{stem}.jsonl")))
    gaps = [gap for own in lines.gaps_of_models().values() for gap in own.values()]
    num_near = sum(gap <= LARGEST_GAP for gap in gaps)
    return (
        f"{num_near} of {len(gaps)} plans are within {100 * LARGEST_GAP:g} % of the lower bound; "
        f"the median gap is {percent(statistics.median(gaps))}."
    )


if __name__ == "__main__":
    sys.exit(main())
