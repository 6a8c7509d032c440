"""A sweep as one self-contained page.

The curve, the rows, and for each budget the memory over the step, its peak and its blocks.

The page loads nothing: style and drawings are in it, and its few lines of script only show the
chosen budget. Without script all show.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from rockmate.budget import size_text
from rockmate.plan.block_table import BlockRow
from rockmate.plan.plan import Plan
from rockmate.sweeps.report_charts import curve_chart, memory_chart, peak_text, row_key
from rockmate.sweeps.result import Sweep
from rockmate.sweeps.row import SweepRow
from rockmate.sweeps.table import cost_below, gradients_text

# Number of storages listed for a peak.
_NUM_NAMED = 12
# The id of a panel begins with it; the key of the row follows.
_PANEL = "budget-"


def report_html(sweep: Sweep) -> str:
    """The page."""
    template = Template(
        (resources.files("rockmate.sweeps") / "report.html").read_text(encoding="utf-8")
    )
    feasible = [row for row in sweep.rows if row.is_feasible]
    shown = sweep.recommended or feasible[-1:]
    first = row_key(shown[0]) if shown else ""
    return template.substitute(
        title=escape(sweep.title),
        facts=_facts(sweep),
        verdict=_verdict(sweep),
        curve=curve_chart(sweep) if feasible else "<p>No budget of this sweep is feasible.</p>",
        legend=_legend(sweep),
        recommended=_recommended(sweep),
        rows=_rows(sweep),
        choices="".join(_choice(row, is_first=row_key(row) == first) for row in feasible),
        panels="\n".join(_panel(sweep, row, is_first=row_key(row) == first) for row in feasible),
    )


# --- head -----------------------------------------------------------------------------------------


def _facts(sweep: Sweep) -> str:
    settings, baseline = sweep.settings, sweep.baseline
    eager = next((row for row in sweep.rows if row.eager_peak_bytes is not None), None)
    where = (
        f"estimated for {settings['machine']}"
        if settings["machine"]
        else f"{settings['device']}, {settings['num_threads']} threads"
    )
    facts = [
        (
            "nothing recomputed, predicted",
            f"{size_text(baseline.baseline_peak_bytes)}, {baseline.baseline_ms:,.1f} ms a step",
        )
    ]
    if eager is not None and eager.eager_peak_bytes is not None:
        facts.append(
            (
                "eager, measured",
                f"{size_text(eager.eager_peak_bytes)}, {eager.eager_ms:,.1f} ms a step",
            )
        )
    smallest = min(
        (row.minimum_bytes for row in sweep.rows if row.minimum_bytes is not None), default=None
    )
    if smallest is not None:
        facts.append(
            (
                "smallest peak without chunks"
                if any(row.loss_chunks for row in sweep.rows)
                else "smallest feasible peak",
                f"{size_text(smallest)}, {smallest / baseline.baseline_peak_bytes:.1%} of it",
            )
        )
    facts.append(("where", f"{where}, PyTorch {settings['torch']}"))
    facts.append(
        ("took", ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in sweep.timings.items()))
    )
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts
    )


def _verdict(sweep: Sweep) -> str:
    lines = [f'<p class="bad">FAILED: {escape(line)}</p>' for line in sweep.broken_promises]
    measured = [row for row in sweep.rows if row.is_measured]
    if measured and not lines:
        compared = [row for row in measured if row.gradient_difference is not None]
        equal = sum(row.gradient_difference == 0 for row in compared)
        gradients = (
            f"gradients equal those of eager bit for bit at {equal} of {len(compared)} budgets"
            if compared
            else "eager did not fit"
        )
        others = ", and within rounding at the others" if equal < len(compared) else ""
        lines.append(
            f'<p class="good">All {len(measured)} measured peaks are within their budgets; '
            f"{gradients}{others}.</p>"
        )
    if not sweep.is_complete:
        lines.append(
            '<p class="bad">The sweep was interrupted: rows may be missing. The same command takes '
            "it up again.</p>"
        )
    return "".join(lines)


def _legend(sweep: Sweep) -> str:
    entries = [
        f'<span><i class="key s{index}"></i>{escape(strategy)}</span>'
        for index, strategy in enumerate(sweep.strategies)
    ]
    if any(row.is_recommended for row in sweep.rows):
        entries.append('<span><i class="key ring"></i>knee</span>')
    if any(row.measured_ratio is not None for row in sweep.rows):
        entries.append('<span><i class="key diamond"></i>measured, against eager</span>')
    if any(row.lower_bound_ratio for row in sweep.rows):
        entries.append('<span><i class="key dashes"></i>no schedule is faster</span>')
    return "".join(entries)


def _recommended(sweep: Sweep) -> str:
    if not sweep.recommended:
        return (
            "<p>The curve has no knee: time grows evenly as memory shrinks.</p>"
            if sweep.plans
            else ""
        )
    cards = []
    for row in sweep.recommended:
        costs = (("down to it", row.extra_ms_per_100_mib), ("below it", cost_below(sweep, row)))
        texts = [
            f"{where}, 100 MiB less cost {cost:,.1f} ms a step"
            for where, cost in costs
            if cost is not None
        ]
        cards.append(
            f'<a class="card" href="#{_PANEL}{row_key(row)}" '
            f'data-key="{row_key(row)}"><b>{escape(size_text(row.budget_bytes))}</b>'
            f"<span>{row.budget_share:.0%} of the peak, {row.predicted_ratio:.3f}x the time</span>"
            f"<small>{escape(row.strategy)}{''.join(f'; {text}' for text in texts)}</small></a>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


# --- rows -----------------------------------------------------------------------------------------

_ROW_HEADS = (
    "strategy",
    "budget",
    "of the peak",
    "predicted peak",
    "predicted ms",
    "predicted time",
    "no schedule below",
    "ms per 100 MiB less",
    "recomputed ops",
)
_MEASURED_HEADS = ("measured peak", "measured ms", "measured time", "gradients")


def _rows(sweep: Sweep) -> str:
    with_measured = any(row.is_measured for row in sweep.rows)
    with_chunks = any(row.loss_chunks for row in sweep.rows)
    with_moved = any(row.moved_bytes for row in sweep.rows)
    heads = _ROW_HEADS + (("chunks",) if with_chunks else ())
    heads += ("moved",) if with_moved else ()
    heads += _MEASURED_HEADS if with_measured else ()
    lines = ["<thead><tr>", *(f"<th>{head}</th>" for head in heads), "</tr></thead><tbody>"]
    for row in sweep.rows:
        lines.append(
            _row_html(
                row, with_chunks=with_chunks, with_moved=with_moved, with_measured=with_measured
            )
            if row.is_feasible
            else _infeasible_html(row, num_columns=len(heads))
        )
    return "".join([*lines, "</tbody>"])


def _row_html(row: SweepRow, *, with_chunks: bool, with_moved: bool, with_measured: bool) -> str:
    cells = [
        row.strategy,
        size_text(row.budget_bytes),
        f"{row.budget_share:.3f}",
        peak_text(row.predicted_peak_bytes),
        _number(row.predicted_ms, ",.1f"),
        _number(row.predicted_ratio, ".3f", "x"),
        _number(row.lower_bound_ratio or None, ".3f", "x"),
        _number(row.extra_ms_per_100_mib, ",.1f"),
        _number(row.num_recomputed, ","),
    ]
    if with_chunks:
        cells.append(row.loss_chunks)
    if with_moved:
        cells.append(peak_text(row.moved_bytes))
    if with_measured:
        spread = (
            f" ± {row.measured_ratio_spread / 2:.3f}"
            if row.measured_ratio_spread is not None
            else ""
        )
        ratio = _number(row.measured_ratio, ".3f", "x")
        cells += [
            peak_text(row.measured_peak_bytes),
            _number(row.measured_ms, ",.1f"),
            ratio + spread,
            gradients_text(row) or row.problem,
        ]
    kind = " ".join(
        ["row", *(["knee"] if row.is_recommended else []), *(["bad"] if row.broken_promise else [])]
    )
    linked = [cells[0], f'<a href="#{_PANEL}{row_key(row)}">{escape(cells[1])}</a>']
    inner = "".join(f"<td>{cell}</td>" for cell in [linked[0], linked[1], *map(escape, cells[2:])])
    return f'<tr class="{kind}" data-key="{row_key(row)}">{inner}</tr>'


def _infeasible_html(row: SweepRow, *, num_columns: int) -> str:
    cells = escape(row.strategy), escape(size_text(row.budget_bytes)), f"{row.budget_share:.3f}"
    head = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr class="infeasible">{head}<td colspan="{num_columns - 3}">no plan: '
        f"{escape(row.problem)}</td></tr>"
    )


def _choice(row: SweepRow, *, is_first: bool) -> str:
    text = (
        f"{row.strategy}, {size_text(row.budget_bytes)}, "
        f"{row.predicted_ratio:.3f}x{', knee' if row.is_recommended else ''}"
    )
    return (
        f'<option value="{row_key(row)}"{" selected" if is_first else ""}>{escape(text)}</option>'
    )


# --- one budget -----------------------------------------------------------------------------------


def _panel(sweep: Sweep, row: SweepRow, *, is_first: bool) -> str:
    plan = sweep.plans[row.key]
    return (
        f'<section class="panel{" shown" if is_first else ""}" id="{_PANEL}{row_key(row)}">'
        f"<h3>{escape(row.strategy)}, budget {escape(size_text(row.budget_bytes))}</h3>"
        f"{memory_chart(sweep.baseline, plan)}"
        '<p class="legend"><span><i class="key s0"></i>this plan</span><span><i class="key '
        'grey"></i>nothing recomputed</span></p>'
        f"<div class=two><div><h4>In memory at the peak</h4>{_live_html(plan)}</div>"
        f"<div><h4>The plan</h4><pre>{escape(plan.summary())}</pre></div></div>"
        "<h4>Block by block</h4><div "
        f"class=scroll><table>{_blocks_html(plan.block_rows())}</table></div>"
        "<h4>Parts within parts</h4><div "
        f"class=scroll><pre>{escape(plan.tree())}</pre></div></section>"
    )


def _live_html(plan: Plan) -> str:
    live = plan.live_at_peak()
    rows = [(entry.description, entry.num_bytes) for entry in live[:_NUM_NAMED]]
    if live[_NUM_NAMED:]:
        rows.append(
            (f"{len(live) - _NUM_NAMED} more", sum(entry.num_bytes for entry in live[_NUM_NAMED:]))
        )
    whole = max(plan.predicted_peak_bytes, 1)
    lines = []
    for text, num_bytes in rows:
        bar = f'<td class=bar><i style="width:{100 * num_bytes / whole:.1f}%"></i></td>'
        lines.append(f"<tr><td>{escape(text)}</td><td>{size_text(num_bytes)}</td>{bar}</tr>")
    total = (
        "<td>in all, in "
        f"{escape(plan.peak_place())}</td><td>{size_text(plan.predicted_peak_bytes)}</td>"
    )
    lines.append(f"<tr class=sum>{total}<td></td></tr>")
    return f'<table class="live">{"".join(lines)}</table>'


def _blocks_html(rows: Sequence[BlockRow]) -> str:
    heads = (
        "",
        "block",
        "ops",
        "makes",
        "keeps",
        "",
        "runs again",
        "ms again",
        "peak of the step in it",
    )
    lines = ["<thead><tr>", *(f"<th>{head}</th>" for head in heads), "</tr></thead><tbody>"]
    for number, row in enumerate(rows):
        share = 100 * row.kept_bytes / row.made_bytes if row.made_bytes else 0.0
        cells = [
            f"<td>{number}</td><td>{escape(row.name)}</td><td>{row.num_ops}</td>",
            f"<td>{size_text(row.made_bytes)}</td>",
            f"<td>{size_text(row.kept_bytes)}</td><td class=bar><i "
            f'style="width:{share:.0f}%"></i></td>',
            f"<td>{row.num_recomputed}</td><td>{row.recompute_ms:,.2f}</td>",
            f"<td>{size_text(row.peak_bytes)}</td>",
        ]
        lines.append(f"<tr{' class=knee' if row.is_peak else ''}>{''.join(cells)}</tr>")
    return "".join([*lines, "</tbody>"])


# --- words ----------------------------------------------------------------------------------------


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
