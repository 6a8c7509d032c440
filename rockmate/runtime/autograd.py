"""Runs a planned step under autograd, as one autograd function.

[Note: tensors of a planned step]

| role | what it is | lifetime |
|---|---|---|
| static | parameter, buffer, constant or input of the call | the caller's |
| output | result that the user gets | the user's |
| update | new value of a buffer or input | copied to its place after the forward, then released |
| saved value | value that the backward reads | until its last reader in the backward |
| saved output | saved value in the memory of an output | until neither is referenced |
| state | what an op's first run saves for its recomputation | as a saved value |
| tangent | gradient of an output | from the engine to its last reader |
| anchor | empty leaf that makes the outputs require grad | the runner's |
| owner | parameter to whose `.grad` the backward adds | the caller's |
| visited parameter | owner that is an input of the function | the caller's |

The list of arguments is the only holder of saved values during the backward, and the emitted code
empties it. So each is released after its last reader. A saved output goes through
`save_for_backward`, as an alias, so that autograd notices if the user writes to it in place. The
output itself would refer to the function's node and never be freed.

The function's tensor inputs are the anchor, the inputs of the call and, in two cases, parameters:

- No gradient is needed before the step is done. The parameters are inputs, so that the running
  engine visits their accumulation nodes at the end. The function returns None or an empty gradient
  for them. `[Note: who owns a gradient]` has the reasons.
- `gradients="returned"`. Their gradients are return values, which `torch.autograd.grad` needs. All
  of them are then live at once.

Otherwise parameters are no inputs: the sink has the nodes visited during the backward. If they were
inputs too, the engine would fire post-accumulate hooks again, with an undefined gradient.

A call should cost little beside a small model's step. So everything that does not change from call
to call is computed in `Runner.__init__`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockmate._torch import engine
from rockmate._torch.autocast import autocast_off
from rockmate._torch.cuda import join_stream_at_end
from rockmate._torch.members import all_hooks_of, is_of_several
from rockmate._torch.subclasses import is_subclassed
from rockmate.errors import BackwardError
from rockmate.graph.parameters import Binding
from rockmate.runtime.ddp import LastHooksSink, is_distributed
from rockmate.runtime.gradient_sink import Anchor, GradientOwners, GradientSink
from rockmate.runtime.held_gradients import held_gradients_of
from rockmate.runtime.pending_steps import PartialGradients, pending_steps_of
from rockmate.runtime.plan_agreement import confirm_order, order_of
from rockmate.runtime.program import Program
from rockmate.runtime.step_arguments import (
    Backwards,
    DroppingSink,
    ForwardArguments,
    addresses_of,
    refuse_parameters,
    refuse_unsupported,
)


class Runner:
    """A program and the module whose tensors it reads; lives as long as the plan is in use.

    Attributes:
        program: the forward and backward functions.
        saved_bytes: tells what a forward holds for its backward, as its plan predicts; 0 unset.
        around: the context, by name, in which a forward or backward runs.
        binding: finds the module's tensors by name.
        pending: the forwards of the model whose backward has not run.
        held: whole gradients that wait for their reduction, of a sharded model; else None.
        returned_to: the tensor by whose history the gradient of a parameter is returned.
        check_tangents: is given the gradients of outputs, and may refuse them.
        memory_of: what of the tensors that are read again must be equal in the backward.
        arguments: those of forwards.
        backwards: those that have been asked for.
        owners: parameters whose gradients are accumulated.
    """

    def __init__(
        self, program: Program, model: nn.Module, *, name: str = "the model", way_out: str = ""
    ) -> None:
        """Finds the places of the model's tensors; reads none of them.

        Args:
            program: the forward and backward functions.
            model: whose they are.
            name: of the model, for errors.
            way_out: what else a user may do about an error, after what can be done in any case.
        """
        self.model, self.program = model, program
        self.check_tangents: Callable[[Sequence[torch.Tensor | None]], None] = lambda _: None
        self.saved_bytes: Callable[[], int] = int
        self.memory_of: Callable[[Sequence[torch.Tensor]], list[Any]] = addresses_of
        self.around: Callable[[str], AbstractContextManager[Any]] = engine.profiler_label
        self.binding = Binding(model, program.tensor_names())
        self.returned_to: Callable[[str], torch.Tensor] = self.binding.__getitem__
        self.pending = pending_steps_of(model)
        self.held = held_gradients_of(model)
        self.arguments = ForwardArguments(program, model, self.binding)
        self.backwards = Backwards(program, self.binding, name=name, way_out=way_out)
        self.owners = GradientOwners(self.binding, program.gradients.accumulated)
        self._order = order_of(program.collectives)
        # One for each device of inputs, kept for the next call.
        self._anchors: dict[torch.device, Anchor] = {}

    def run(
        self, inputs: Sequence[torch.Tensor], *, hooks_last: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The model's output tensors, in the order of their index.

        Args:
            inputs: the tensors of the call.
            hooks_last: hooks of parameters must fire when the step is done; see
                `rockmate.runtime.ddp`.
        """
        confirm_order(self.model, self._order)
        self.arguments.send_weights_home()
        device = inputs[0].device if inputs else torch.device("cpu")
        anchor = self._anchors.get(device) or self._anchors.setdefault(device, Anchor(device))
        laid_out, gradients = self.program.layouts.applied(inputs), self.program.gradients
        self.program.results.refuse_shared(inputs)
        owners = self.owners.now()
        if gradients.of_parameters:
            parameters = [self.returned_to(name) for name, _ in gradients.of_parameters]
        elif hooks_last or not may_be_needed_early(owners.values()):
            parameters = {id(owner): owner for owner in owners.values()}.values()
        else:
            parameters = ()
        further = [laid_out[index] for index, _ in gradients.further]
        outputs = PlannedStep.apply(
            self, owners, anchor, anchor.leaf, len(laid_out), *laid_out, *further, *parameters
        )
        for index in self.program.results.updated_inputs:
            # The forward has updated a copy in the planned layout.
            if laid_out[index] is not inputs[index]:
                inputs[index].detach().copy_(laid_out[index])
        return outputs


class PlannedStep(torch.autograd.Function):
    """The step as one autograd function; the module docstring has the roles of its tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: FunctionCtx,
        runner: Runner,
        owners: Mapping[str, torch.Tensor],
        anchor: Anchor,
        leaf: torch.Tensor,
        num_inputs: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs, program = tensors[:num_inputs], runner.program
        results, gradients = program.results, program.gradients
        arguments, moves = runner.arguments.of(inputs)
        with runner.around("rockmate::forward"), autocast_off(), program.dispatch():
            values = program.forward.run(arguments)
        results.write_updates(values, inputs, runner.binding)
        outputs = tuple([values[place] for place in results.outputs])
        num_results = len(results.roles)
        saved: list[torch.Tensor | None] = list(values[num_results:])
        aliases = [values[num_results + place].detach() for place in program.saved_outputs]
        for place in program.saved_outputs:
            saved[place] = None
        fields: Any = ctx
        # Released by autograd after a backward without `retain_graph`.
        statics = runner.backwards.statics.tensors(inputs)
        fields.save_for_backward(*statics, *aliases)
        # The script's own hooks of saved tensors may give others back.
        is_watched = program.recomputes and not engine.has_saved_tensor_hooks()
        fields.memory_of = runner.memory_of
        fields.memory = runner.memory_of(statics) if is_watched else None
        # Saved values and states, without saved outputs: None after such a backward.
        fields.saved, fields.moves = saved, moves
        # These refer to tensors of the caller's, and live as long as the function's node.
        fields.owners = owners
        num_before = num_inputs + len(gradients.further)
        fields.visited = () if gradients.of_parameters else tensors[num_before:]
        fields.runner, fields.num_inputs, fields.anchor = runner, num_inputs, anchor
        # Otherwise each output without a gradient would get zeros of its size.
        fields.set_materialize_grads(False)
        runner.pending.add(ctx)
        fields.mark_non_differentiable(*[outputs[index] for index in results.non_differentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        runner = ctx.runner
        refuse_unsupported(ctx, tangents)
        runner.check_tangents(tangents)
        sink = _sink(ctx)
        backward, order = runner.backwards.of(tangents)
        # The only holder of the saved values from here on.
        arguments = runner.backwards.take_arguments(ctx, order, sink, tangents)
        with runner.around("rockmate::backward"), autocast_off(), runner.program.dispatch():
            values = backward.run(arguments)
            sink.close()
        if ctx.anchor.leaf.is_cuda:
            join_stream_at_end(ctx.anchor.leaf.device)
        gradients = runner.program.gradients
        returned = partial(gradients.returned, values, binding=runner.binding)
        inputs: list[torch.Tensor | None] = [None] * ctx.num_inputs
        for index, place in gradients.of_inputs.items():
            inputs[index] = returned(place)
        inputs += [returned(place) for _, place in gradients.further]
        if isinstance(sink, LastHooksSink):
            parameters = sink.remaining_gradients(ctx.visited)
        else:
            parameters = [returned(place) for _, place in gradients.of_parameters]
            parameters = parameters or [None] * len(ctx.visited)
        return None, None, None, None, None, *inputs, *parameters


def may_be_needed_early(parameters: Collection[torch.Tensor]) -> bool:
    """Whether a gradient may be needed before the step is done.

    A hook may step an optimizer and free the gradient. In a process group its reduction may run
    beside the backward, which Python cannot see. That of a parameter of a class of its own would be
    held to the end. A hook of several gradients counts those of one run of the engine: the last.
    """
    tables = [each for each in chain.from_iterable(map(all_hooks_of, parameters)) if each]
    are_together = any(is_of_several(hook) for table in tables for hook in table.values())
    is_needed = is_distributed() or bool(tables) or any(map(is_subclassed, parameters))
    return is_needed and not are_together


def _sink(ctx: Any) -> GradientSink:
    """What receives the gradients of parameters."""
    gradients, held = ctx.runner.program.gradients, ctx.runner.held
    if not gradients.of_parameters and not ctx.anchor.is_visited():
        refuse_parameters(ctx.visited, has_others=bool(ctx.owners and not ctx.visited))
        return DroppingSink()
    earlier, is_last = ctx.runner.pending.begin(ctx)
    wrappings = gradients.wrappings
    if gradients.of_parameters and held is not None:
        if held.holding():
            msg = (
                "the model holds gradients (set_requires_gradient_sync(False)), and "
                'gradients="returned" has nowhere to add them up. Make the module with '
                'gradients="accumulated", or reduce in each backward.'
            )
            raise BackwardError(msg)
        held = None
    if ctx.visited:
        earlier, is_last = PartialGradients(earlier.used), False  # the engine has hooked ones
    sink = LastHooksSink if ctx.visited else GradientSink
    return sink(ctx.owners, earlier, fires_hooks=is_last, wrappings=wrappings, held=held)
