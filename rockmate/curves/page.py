"""A sweep as one self-contained page.

The curve, the rows, and for each budget the memory over the step, its peak and its blocks.

The page loads nothing: style and pictures are in it, and its few lines of script only open the
budget that was clicked.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib import resources
from string import Template

from rockmate.budget import size_text
from rockmate.curves.figures import svg
from rockmate.curves.picture import memory_figure
from rockmate.curves.sweep import Sweep
from rockmate.curves.sweep_row import SweepRow
from rockmate.curves.table import Column, number, short_number, table_html
from rockmate.plan.plan import Plan

# Number of storages listed for a peak.
_NUM_NAMED = 12


def page(sweep: Sweep) -> str:
    """The page."""
    file = resources.files("rockmate.curves") / "page.html"
    template = Template(file.read_text(encoding="utf-8"))
    shown = sweep.recommended or (sweep.feasible[-1] if sweep.feasible else None)
    what = "Time of a step against activation peak, a curve for each strategy"
    return template.substitute(
        title=escape(sweep.title),
        facts="".join(
            f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(sweep)
        ),
        verdict="".join(f"<p>{escape(line)}</p>" for line in _verdict(sweep)),
        curve=svg(sweep.figure(), what) if shown else "<p>No budget of this sweep is feasible.</p>",
        remarks=escape(sweep.remarks()),
        rows=table_html(
            _columns(sweep),
            sweep.rows,
            lambda row: f"{sweep.note(row)} {row.problem}".strip(),
            link=lambda row: f"#{row.address}" if row.is_feasible else "",
        ),
        panels="\n".join(_panel(sweep, row, is_open=row is shown) for row in sweep.feasible),
    )


def _facts(sweep: Sweep) -> Iterator[tuple[str, str]]:
    settings, baseline = sweep.settings, sweep.baseline
    peak = size_text(baseline.baseline_peak_bytes)
    yield "nothing recomputed, predicted", f"{peak}, {short_number(baseline.baseline_ms)} ms a step"
    for row in sweep:
        if row.eager_peak_bytes is not None:
            peak = size_text(row.eager_peak_bytes)
            yield "eager, measured", f"{peak}, {short_number(row.eager_ms)} ms a step"
            break
    minima = [row.minimum_bytes for row in sweep if row.minimum_bytes is not None]
    if minima:
        without = "without chunks " if any(row.loss_chunks for row in sweep) else ""
        share = min(minima) / baseline.baseline_peak_bytes
        yield f"smallest peak {without}", f"{size_text(min(minima))}, {share:.1%} of the first"
    here = f"{settings['device']}, {settings['num_threads']} threads"
    where = f"estimated for {settings['machine']}" if settings["machine"] else here
    yield "where", f"{where}, PyTorch {settings['torch']}"
    yield "took", sweep.seconds_text


def _verdict(sweep: Sweep) -> Iterator[str]:
    measured = [row for row in sweep if row.is_measured]
    if measured and not sweep.broken_promises:
        compared = [row for row in measured if row.gradient_difference is not None]
        equal = sum(row.gradient_difference == 0 for row in compared)
        gradients = f"gradients equal those of eager bit for bit at {equal} of {len(compared)}"
        others = ", and within rounding at the others" if equal < len(compared) else ""
        told = f"{gradients} budgets{others}" if compared else "eager did not fit"
        yield f"All {len(measured)} measured peaks are within their budgets; {told}."
    if not sweep.is_complete:
        yield (
            "The sweep was interrupted: rows may be missing. The same command takes it up again."
        )


def _columns(sweep: Sweep) -> list[Column]:
    """Those of the terminal, and what has no room there."""
    columns = [
        *sweep.columns(),
        Column("no schedule below", lambda row: number(row.lower_bound_ratio or None, ".3f", "x")),
        Column("recomputed ops", lambda row: number(row.num_recomputed, ",")),
    ]
    if any(row.measured_ratio_spread is not None for row in sweep):
        columns.append(
            Column("spread of measured", lambda row: number(row.measured_ratio_spread, ".3f"))
        )
    return columns


def _panel(sweep: Sweep, row: SweepRow, *, is_open: bool) -> str:
    plan = sweep.plans[row.key]
    name = f"{row.strategy}, {size_text(row.budget_bytes)}, {row.predicted_ratio:.3f}x"
    name += ", recommended" if row.is_recommended else ""
    figure = memory_figure(sweep.baseline, plan)
    picture = svg(figure, f"Activation memory over one training step: {name}")
    return (
        f'<details name="budget"{" open" if is_open else ""}><summary>{escape(name)}</summary>'
        f'<section id="{row.address}">{picture}'
        f"<h3>The plan</h3><pre>{escape(plan.summary())}</pre>"
        f"<h3>In memory at the peak</h3><pre>{escape(peak_text(plan, _NUM_NAMED))}</pre>"
        f"<h3>Block by block</h3><pre>{escape(plan.block_table())}</pre>"
        f"<h3>Parts within parts</h3><pre>{escape(plan.tree())}</pre></section></details>"
    )


def peak_text(plan: Plan, most: int) -> str:
    """Where a plan's peak is, and the largest of what is in memory there, a line each."""
    live = plan.live_at_peak()
    rows = [(entry.num_bytes, entry.description) for entry in live[:most]]
    if rest := live[most:]:
        rows.append((sum(entry.num_bytes for entry in rest), f"in {len(rest)} more"))
    lines = (f"{size_text(num_bytes):>11}  {text}" for num_bytes, text in rows)
    return "\n".join([f"peak in {plan.peak_place()}", *lines])
