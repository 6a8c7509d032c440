"""The graphs of one call of `torch.compile`, and how they keep one budget.

Most models are one graph. A graph break leaves several parts: each is planned by itself, and what
it saves is live while later ones run.

With `graph_breaks="error"` the budget is that of one graph. A part is refused if another one waits
for its backward.

With `graph_breaks="share"` the parts share it. Dynamo shows one part after the other, while the
first step runs. So in that step each is planned for its smallest peak. From the second step on the
parts are known, and each has its share. While a part runs, three kinds of values are live: its own,
at most its peak; what earlier parts save for their backwards; and, in its backward, outputs of
later parts, whose memory the user may hold. Backwards run in the reverse order of forwards, since
autograd takes the latest node first. So with the parts of a step in the order of their forwards,

    peak = max over i of  sum_{j<i} saved_j + peak_i + sum_{j>i} outputs_j

The share of a part lies at the same fraction between its smallest peak and its baseline peak. The
largest fraction that keeps the budget is found by bisection, since a part with a larger share may
save less or more.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rockmate._torch.dynamo import Break
from rockmate._torch.storage import storage_id
from rockmate.budget import Budget, is_share, parse_budget, size_text
from rockmate.dynamo.options import Options
from rockmate.errors import InfeasibleBudgetError, UnsupportedModelError
from rockmate.plan.plan import Plan
from rockmate.planner import Planner
from rockmate.runtime.pending_steps import PendingSteps, is_pending

logger = logging.getLogger(__name__)
_HOW_TO_SEE = "torch.compile(..., fullgraph=True) or TORCH_LOGS=graph_breaks explains each"
_DATA_PARALLEL = (
    "the compiled module is a DistributedDataParallel, whose graph Dynamo splits into one for each "
    "bucket of gradients, and the budget is that of one graph. Compile the model first: "
    "DistributedDataParallel(torch.compile(model, ...)). Or share the budget among the graphs: "
    'options={"graph_breaks": "share", ...}.'
)


@dataclass(frozen=True, slots=True)
class _Running:
    """A forward of a part whose backward may not have run.

    Attributes:
        nodes: of the autograd graph, one for each output with a gradient.
        saved_bytes: live after the forward, as its plan predicts.
    """

    nodes: tuple[weakref.ref[Any], ...]
    saved_bytes: int

    @property
    def is_pending(self) -> bool:
        nodes = [node() for node in self.nodes]
        return any(node is not None and is_pending(node) for node in nodes)


class CompiledStep:
    """What the graphs of one `torch.compile` have in common.

    Attributes:
        options: the user's.
        breaks: the graph breaks that Dynamo has told of.
        pending: the forwards of all graphs, so that a parameter of several has its hooks run once.
        budget: the activation budget. A fraction becomes bytes with the first plan or first step.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.breaks: list[Break] = []
        self.pending = PendingSteps()
        self.budget: Budget = options.budget
        self._running: list[_Running] = []
        self._calls: list[PartCall] = []  # of this step, in the order of their forwards
        # By the first part of a step: its parts, and their shares.
        self._known: dict[Hashable, tuple[list[Hashable], Mapping[Hashable, int]]] = {}

    def refuse_second_part(self) -> None:
        """Raises if a part of a broken frame is about to run while another waits for its backward.

        Raises:
            UnsupportedModelError: as said; it names the lines of the breaks. Also for the first
                part of a module that Dynamo splits for DistributedDataParallel.
        """
        if any(each.is_of_data_parallel for each in self.breaks):
            raise UnsupportedModelError(_DATA_PARALLEL)
        self._forget_finished()
        if not self._running:
            return
        places = "; ".join(dict.fromkeys(map(str, self.breaks)))
        raise UnsupportedModelError(
            "the compiled model runs in several graphs, and the budget is that of one. Dynamo "
            f"broke the graph at: {places}. Remove the breaks ({_HOW_TO_SEE}), or share the budget "
            'among the graphs: options={"graph_breaks": "share", ...}.'
        )

    def share_of(self, part: Hashable, planner: Planner) -> int:
        """The bytes that the next call of a part may be planned for.

        Args:
            part: identifies the part and the sizes of its call.
            planner: of that part.

        Raises:
            InfeasibleBudgetError: the parts so far need more than the budget, each at its smallest
                peak.
        """
        self._forget_finished()
        if not self._running and self._calls:
            self._share_out()
        place = len(self._calls)
        self._calls.append(PartCall(part, planner))
        parts, shares = self._known.get(self._calls[0].part, ([], {}))
        if parts[: place + 1] == [call.part for call in self._calls]:
            return shares[part]
        minimum_bytes = planner.minimum_peak_bytes
        if not is_share(self.budget):  # a fraction is one of all parts, which a step has to show
            held_bytes = sum(each.saved_bytes for each in self._running)
            self._check(held_bytes + minimum_bytes)
        return minimum_bytes

    def ran(self, outputs: Sequence[Any], plan: Plan) -> None:
        """Notes the forward of a part: its outputs, and its plan."""
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        nodes = {id(each.grad_fn): weakref.ref(each.grad_fn) for each in tensors if each.grad_fn}
        self._running.append(_Running(tuple(nodes.values()), plan.simulation.saved_bytes))
        if self._calls:
            sizes = {storage_id(each): each.untyped_storage().nbytes() for each in tensors}
            self._calls[-1].output_bytes = sum(sizes.values())

    def _forget_finished(self) -> None:
        self._running = [each for each in self._running if each.is_pending]

    def _share_out(self) -> None:
        """Shares the budget among the parts of the step that has ended."""
        calls, self._calls = self._calls, []
        parts = [call.part for call in calls]
        if self._known.get(parts[0], ([], {}))[0] == parts:
            return
        baseline_bytes = sum(call.planner.baseline_peak_bytes for call in calls)
        self.budget = budget_bytes = parse_budget(self.budget, baseline_bytes)
        shares = shares_within(calls, budget_bytes, self.options.strategy)
        self._check(shares.peak_bytes)
        self._known[parts[0]] = parts, shares.bytes_of
        logger.warning(
            "a step runs %d graphs within the budget of %s: their predicted peaks are %s, and that "
            "of the step is %s",
            len(calls),
            size_text(budget_bytes),
            ", ".join(map(size_text, shares.part_peaks_bytes)),
            size_text(shares.peak_bytes),
        )

    def _check(self, needed_bytes: int) -> None:
        """Raises if parts at their smallest peaks need more than the budget, or warns of it."""
        budget_bytes = parse_budget(self.budget, 0)
        if needed_bytes <= budget_bytes:
            return
        if self.options.on_infeasible == "least":
            logger.warning(
                "the graphs of a step need %s, each at its smallest peak, and the budget is %s",
                size_text(needed_bytes),
                size_text(budget_bytes),
            )
            return
        error = InfeasibleBudgetError(
            budget_bytes,
            needed_bytes,
            where="the graphs of one step that have run so far, each planned for its smallest peak",
        )
        raise error.advised(
            "Graphs that come later in the step may need more. Without graph breaks a step needs "
            f"less: {_HOW_TO_SEE}."
        )


_NUM_HALVINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a budget.

    Attributes:
        bytes_of: the share of each part.
        part_peaks_bytes: predicted peaks of the parts, in the order of their forwards.
        peak_bytes: predicted peak of the whole step.
    """

    bytes_of: Mapping[Hashable, int]
    part_peaks_bytes: tuple[int, ...]
    peak_bytes: int


@dataclass(slots=True)
class PartCall:
    """One forward of a part.

    Attributes:
        part: identifies the part and the sizes of its call.
        planner: of the part.
        output_bytes: of its outputs.
    """

    part: Hashable
    planner: Planner
    output_bytes: int = 0


def shares_within(calls: Sequence[PartCall], budget_bytes: int, strategy: str) -> Shares:
    """Shares that keep the budget, or the smallest peaks if those do not.

    Args:
        calls: the parts in the order of their forwards.
        budget_bytes: of the step.
        strategy: see `Planner.plan`.
    """

    def at(fraction: float) -> Shares:
        shares = {call.part: _share(call.planner, fraction) for call in calls}
        plans = [call.planner.plan(shares[call.part], strategy=strategy) for call in calls]
        return Shares(
            bytes_of=shares,
            part_peaks_bytes=tuple(plan.predicted_peak_bytes for plan in plans),
            peak_bytes=step_peak_bytes(plans, [call.output_bytes for call in calls]),
        )

    low, high = 0.0, 1.0
    if (whole := at(high)).peak_bytes <= budget_bytes:
        return whole
    best = at(low)
    if best.peak_bytes > budget_bytes:
        return best
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if (tried := at(middle)).peak_bytes <= budget_bytes:
            low, best = middle, tried
        else:
            high = middle
    return best


def step_peak_bytes(plans: Sequence[Plan], output_bytes: Sequence[int]) -> int:
    """The predicted peak of a step whose parts run these plans; see the head of this file."""
    earlier, later, peak = 0, sum(output_bytes), 0
    for plan, outputs in zip(plans, output_bytes, strict=True):
        later -= outputs
        peak = max(peak, earlier + plan.predicted_peak_bytes + later)
        earlier += plan.simulation.saved_bytes
    return peak


def _share(planner: Planner, fraction: float) -> int:
    minimum = planner.minimum_peak_bytes
    return minimum + int(fraction * max(0, planner.baseline_peak_bytes - minimum))
