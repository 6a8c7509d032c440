"""The page of a comparison, and its table of all points.

Targets are set in its template, before anything is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.command import Record
from bench.comparison.result import (
    GRADIENT_TOLERANCE,
    LEAST_PEAK_RATIO,
    TIME_TOLERANCE,
    ModelResult,
    by_model,
)
from bench.pages import about, filled


def page(records: Sequence[Record], points_file: str = "points.csv") -> list[str]:
    """The page's lines.

    Args:
        records: of `bench.comparison`.
        points_file: the path of the table of all points, from the page.
    """
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    shares = [result.least.share for result in results if result.least]
    points = [point for result in results for point in result.points]
    return filled(
        "peers",
        results=results,
        matches=[match for result in results for match in result.matches],
        median=[statistics.median(shares)] if shares else [],
        planned=[point for point in points if point.budget_bytes is not None],
        tolerance=100 * TIME_TOLERANCE,
        least_ratio=LEAST_PEAK_RATIO,
        gradients=GRADIENT_TOLERANCE,
        points_file=points_file,
        provenance=about(_starts(results)),
        has_further_rounds=any(_methods_asked(each) == {True, False} for each in results),
        quick=[r.name for r in results if all(x["options"].get("quick") for x in r.of("run"))],
    )


def _starts(results: Iterable[ModelResult]) -> list[Record]:
    return [
        run | {"model": result.name, "command": _command(run["options"])}
        for result in results
        for run in result.of("run")
    ]


def _methods_asked(result: ModelResult) -> set[bool]:
    """Whether commands of a model named methods."""
    return {bool(run["options"]["method"]) for run in result.of("run")}


def _command(options: Record) -> str:
    words = ["python -m bench.compare"]
    words += [f"--device {options['device']}"] if "device" in options else []
    switches = ("quick", "tiny", "loss_only")
    words += [f"--{name.replace('_', '-')}" for name in switches if options.get(name)]
    words += ["--rounds", str(options["rounds"])]
    words += [f'--method "{method}"' for method in options["method"]]
    return " ".join(words)


def readme_table(results: Sequence[ModelResult]) -> list[str]:
    """README's table of results."""
    return filled("readme", results={result.name: result for result in results})


def points_csv(results: Sequence[ModelResult]) -> str:
    """All methods of all models as CSV; one without a point has a note that says why."""
    return "\n".join(filled("points.csv", results=results)) + "\n"
