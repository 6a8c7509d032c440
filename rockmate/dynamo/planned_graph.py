"""A graph of Dynamo's with its plans."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx

from rockmate._torch.dynamo import output_examples
from rockmate.budget import is_share
from rockmate.dynamo.compiled_step import CompiledStep
from rockmate.dynamo.graph_module import GraphModule, Outputs
from rockmate.entry.module import RockmateModule
from rockmate.errors import RockmateError
from rockmate.plan.plan import Plan
from rockmate.runtime.pending_steps import share_pending_steps

logger = logging.getLogger(__name__)
_NUMBERS = itertools.count()


class PlannedGraph:
    """A graph of Dynamo's with its plans.

    Attributes:
        graph: Dynamo's graph.
        step: what it has in common with the other graphs of the same `torch.compile`.
        is_part: whether Dynamo broke the frame, so that others may belong to the same step.
        number: graphs are numbered in the order in which Dynamo made them.
    """

    def __init__(self, graph: fx.GraphModule, step: CompiledStep, *, is_part: bool) -> None:
        self.graph, self.step, self.is_part = graph, step, is_part
        self.number = next(_NUMBERS)
        self._outputs = Outputs(graph, output_examples(graph))
        # By the inputs that are neither tensors nor their sizes.
        self._planned: dict[Hashable, tuple[GraphModule, RockmateModule]] = {}
        self._last: RockmateModule | None = None

    @property
    def plan(self) -> Plan:
        """The plan that the last call ran.

        Raises:
            RockmateError: there was none.
        """
        if self._last is None:
            msg = "this graph has not run yet: it is planned in its first training call."
            raise RockmateError(msg)
        return self._last.plan

    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs for a training call; errors as for `RockmateModule`.

        Raises:
            UnsupportedModelError: the graph is a part of a step, and another part waits for its
                backward.
        """
        graph, planned = self._planned_for(arguments)
        tensors = graph.take(arguments)
        if self.is_part:
            self.step.refuse_second_part()
        returned = planned(*tensors)
        self._last = planned
        if is_share(self.step.budget):
            self.step.budget = planned.plan.budget_bytes
        outputs = self._outputs.rebuild(returned, arguments)
        if self.is_part:
            self.step.note_part(outputs)
        return outputs

    def _planned_for(self, arguments: Sequence[Any]) -> tuple[GraphModule, RockmateModule]:
        """The graph as a module, for the constants of a call, and what plans and runs it."""
        first, _ = next(iter(self._planned.values()), (None, None))
        places = first.constants if first is not None else ()
        key = tuple(arguments[place] for place in places)
        if key not in self._planned:
            graph = GraphModule(self.graph, arguments, loss=self._loss())
            share_pending_steps(graph, self.step.pending)
            key = tuple(graph.constants.values())
            self._planned[key] = graph, self.step.options.module_of(graph, self.step.budget)
        return self._planned[key]

    def _loss(self) -> int | None:
        """Which output tensor alone is differentiated; None if all are.

        Outputs of a part are inputs of the next, and are differentiated.
        """
        loss = None if self.is_part else self._outputs.loss
        if loss is None or self.step.options.planner.differentiable == "loss":
            return loss
        logger.info(
            "the plan has a gradient for each output of this graph. If you differentiate its "
            'scalar output alone, options={"differentiable": "loss", ...} needs less memory.'
        )
        return None
