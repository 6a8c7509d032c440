"""A form of a step: the step as captured, with other kernels or in chunks, and its costs."""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from math import inf
from typing import NamedTuple

from rockmate.costs.cost import Costs
from rockmate.graph.snapshot import SnapshotChain
from rockmate.graph.snapshot_capture import snapshot_chain
from rockmate.planning.candidate import Candidate
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.step import CapturedStep
from rockmate.planning.strategies import Searches

# Number of marks for which an infeasible budget is explained, the first ones.
_MAX_EXPLAINED = 8


class Form(Searches):
    """A step and its costs, with all that planning it takes, each part computed on demand.

    Args:
        step: as captured, with fused kernels, with other layouts, or in chunks.
        rule: when the search of the default strategy ends; None for no limit.
    """

    def __init__(self, step: CapturedStep, costs: Costs, rule: StoppingRule | None = None) -> None:
        super().__init__(step.graph, costs, rule)
        self.step = step

    @cached_property
    def chain(self) -> SnapshotChain:
        """Its blocks as plain values."""
        return snapshot_chain(self.blocks)


class Found(NamedTuple):
    """A schedule that was found, and the form whose schedule it is."""

    form: Form
    candidate: Candidate

    @property
    def time_ms(self) -> float:
        """The time of the schedule."""
        return self.candidate.time_ms


def time_of(found: Found | Candidate | None) -> float:
    """The time of a schedule; infinite if there is none."""
    return inf if found is None else found.time_ms


def advice_on_marks(captured: Form, strategy: str, time_limit_s: float) -> str:
    """The smallest peak of the step planned without each mark; empty if there are none.

    Measured costs are reused.
    """
    peaks = []
    sources = (source for each in captured.graph.storages for source in each.mark_sources)
    for source in islice(dict.fromkeys(sources), _MAX_EXPLAINED):
        step = captured.step.without_marks(source)
        assert [op.name for op in step.graph.ops] == [op.name for op in captured.graph.ops]
        form = Form(step, captured.costs, StoppingRule(time_limit_s=time_limit_s))
        peaks.append((form.search(strategy).minimum().peak_bytes, source))
    if not peaks:
        return ""
    texts = [f"without {source!r} it is {peak:,} bytes" for peak, source in sorted(peaks)]
    return f"Marks take part in that peak: {'; '.join(texts)}."
