"""The backend `"rockmate"` of `torch.compile`.

    model = torch.compile(model, backend="rockmate", options={"budget": "2GiB"})

Dynamo finds it by the entry point of this distribution. It captures the user's Python code and
hands over one graph for each frame, or several where it cannot go on. A graph is planned and run as
`RockmateModule` plans and runs a module.

Nothing is planned, and no error raised, while Dynamo compiles: it would wrap an error in its own,
or with `suppress_errors` run the model uncompiled, without a bound. All that happens in the first
call of the graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from rockmate._torch.dynamo import (
    break_of,
    broken_caller,
    compilations_left,
    compile_call,
    fails_past_limit,
    guard_training,
    is_fake_call,
    output_examples,
)
from rockmate.dynamo.compiled_step import CompiledStep
from rockmate.dynamo.options import Options
from rockmate.dynamo.planned_graph import PlannedGraph

logger = logging.getLogger(__name__)

_STEPS: weakref.WeakKeyDictionary[Any, CompiledStep] = weakref.WeakKeyDictionary()
# Dynamo counts by code, so a limit that is reached by one model holds for others of its class.
_LAST_COMPILATION = (
    "Dynamo has compiled this model's forward as often as torch._dynamo.config.recompile_limit "
    "allows. A call that needs another compilation runs uncompiled, and no budget bounds it. Raise "
    "the limit, or have such a call fail: torch.compile(..., fullgraph=True) or "
    "torch._dynamo.config.fail_on_recompile_limit_hit = True."
)
_GRAPHS: weakref.WeakSet[PlannedGraph] = weakref.WeakSet()


def rockmate_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], **arguments: Any
) -> Callable[..., Any]:
    """What Dynamo runs in place of a graph.

    Args:
        graph: Dynamo's.
        example_inputs: not used: a graph is planned for the tensors of its first call.
        **arguments: `options` of `torch.compile`; see `Options`.
    """
    try:
        options = Options.of(arguments.pop("options", None), arguments)
    except Exception as error:  # noqa: BLE001 - raised where Dynamo does not wrap it
        return _raiser(error)
    call = compile_call()
    step = _STEPS.setdefault(call, CompiledStep(options))
    breaks = [each for each in (broken_caller(), break_of(graph)) if each is not None]
    step.breaks += breaks
    if not _trains(graph):
        return graph.forward
    if guard_training(graph) is False:
        logger.info("a graph of a model in eval mode runs as it is, without a plan")
        return graph.forward
    if compilations_left() == 0 and not fails_past_limit():
        logger.warning(_LAST_COMPILATION)
    planned = PlannedGraph(graph, step, is_part=bool(breaks))
    _GRAPHS.add(planned)
    return _runner(planned)


def planned_graphs() -> list[PlannedGraph]:
    """The graphs of `torch.compile(backend="rockmate")` in this process, oldest first.

    Each has its `plan` from its first training call on. A graph is left out once Dynamo has dropped
    it, as after `torch._dynamo.reset()`.
    """
    return sorted(_GRAPHS, key=lambda graph: graph.number)


def _raiser(error: Exception) -> Callable[..., NoReturn]:
    def fail(*arguments: Any) -> NoReturn:
        raise error.with_traceback(None)

    return fail


def _runner(planned: PlannedGraph) -> Callable[..., tuple[Any, ...]]:
    """The function that Dynamo's code calls; a function, since Dynamo may copy an object."""

    def run(*arguments: Any) -> tuple[Any, ...]:
        if is_fake_call(arguments) or not torch.is_grad_enabled():
            return planned.graph(*arguments)
        return planned.run(arguments)

    return run


def _trains(graph: fx.GraphModule) -> bool:
    """Whether an output of the graph has a gradient, as Dynamo saw it."""
    if not torch.is_grad_enabled():
        return False
    outputs = output_examples(graph)
    return any(isinstance(each, Tensor) and each.requires_grad for each in outputs)
