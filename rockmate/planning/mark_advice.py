"""What the smallest peak would be without each of the user's marks."""

from __future__ import annotations

from rockmate.graph.ir import Graph
from rockmate.planning.form import Form
from rockmate.planning.search_problem import StoppingRule

# Number of marks for which an infeasible budget is explained, the first ones.
_MAX_EXPLAINED = 8


def advice_on_marks(captured: Form, strategy: str, time_limit_s: float) -> str:
    """The smallest peak of the step planned without each mark; empty if there are none.

    Measured costs are reused.
    """
    peaks = []
    for source in _mark_sources(captured.graph)[:_MAX_EXPLAINED]:
        step = captured.step.without_marks(source)
        assert [op.name for op in step.graph.ops] == [op.name for op in captured.graph.ops]
        form = Form(step, captured.costs, StoppingRule(time_limit_s=time_limit_s))
        peaks.append((form.search(strategy).minimum().peak_bytes, source))
    if not peaks:
        return ""
    texts = [f"without {source!r} it is {peak:,} bytes" for peak, source in sorted(peaks)]
    return f"Marks take part in that peak: {'; '.join(texts)}."


def _mark_sources(graph: Graph) -> list[str]:
    """What asked for the marks of a graph's values, each once."""
    sources = (source for storage in graph.storages for source in storage.mark_sources)
    return list(dict.fromkeys(sources))
