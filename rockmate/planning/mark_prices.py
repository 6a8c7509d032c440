"""What each of the user's marks costs: the same step planned without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan

from rockmate.graph.ir import Graph
from rockmate.planning.form import Form, time_of
from rockmate.planning.search_problem import StoppingRule

# Number of marks for which an infeasible budget is explained, the first ones.
MAX_EXPLAINED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkPrice:
    """What one mark costs within a budget.

    Attributes:
        mark: the pattern, the name of a value, "policy", or "checkpoint".
        minimum_peak_bytes: the smallest peak found without it.
        ms_without: time of the fastest schedule found without it, in milliseconds; infinite if none
            fits the budget.
        added_ms: time that the mark adds within the budget, in milliseconds; infinite if a schedule
            fits only without it, NaN if none fits either way. Never negative: what keeps a mark is
            a schedule without it, too.
    """

    mark: str
    minimum_peak_bytes: int
    ms_without: float
    added_ms: float


def mark_sources(graph: Graph) -> list[str]:
    """What asked for the marks of a graph's values, each once."""
    sources = (source for storage in graph.storages for source in storage.mark_sources)
    return list(dict.fromkeys(sources))


def forms_without_each(
    form: Form, time_limit_s: float, *, most: int | None = None
) -> Iterator[tuple[str, Form]]:
    """Each source of marks, and the step planned without its marks; measured costs are reused."""
    for source in mark_sources(form.graph)[:most]:
        step = form.step.without_marks(source)
        assert [op.name for op in step.graph.ops] == [op.name for op in form.graph.ops]
        yield source, Form(step, form.costs, StoppingRule(time_limit_s=time_limit_s))


def price_within(
    source: str, without: Form, budget_bytes: int, strategy: str, *, marked: Form
) -> MarkPrice:
    """The price of one mark."""
    search, marked_search = without.search(strategy), marked.search(strategy)
    ms_with = time_of(marked_search.best_within(budget_bytes))
    ms_without = min(ms_with, time_of(search.best_within(budget_bytes)))
    return MarkPrice(
        mark=source,
        minimum_peak_bytes=min(search.minimum().peak_bytes, marked_search.minimum().peak_bytes),
        ms_without=ms_without,
        added_ms=nan if ms_without == inf else ms_with - ms_without,
    )


def advice_on_marks(captured: Form, strategy: str, time_limit_s: float) -> str:
    """What the smallest peak would be without each of the marks; empty if there are none."""
    peaks = [
        (form.search(strategy).minimum().peak_bytes, source)
        for source, form in forms_without_each(captured, time_limit_s, most=MAX_EXPLAINED)
    ]
    if not peaks:
        return ""
    texts = [f"without {source!r} it is {peak:,} bytes" for peak, source in sorted(peaks)]
    return f"Marks take part in that peak: {'; '.join(texts)}."
