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

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockmate._torch import engine
from rockmate._torch.autocast import autocast_off
from rockmate._torch.cuda import join_stream_at_end
from rockmate._torch.members import all_hooks_of, is_of_several
from rockmate._torch.storage import storage_id
from rockmate._torch.subclasses import at_path, is_subclassed, without_class
from rockmate.capture.roles import RoleKind
from rockmate.errors import BackwardError, SignatureMismatchError
from rockmate.graph.parameters import Binding
from rockmate.offload.step_moves import StepMoves
from rockmate.offload.tiers import Pending, tier_of
from rockmate.offload.weight_home import has_homes, homes_of
from rockmate.ops.undefined_gradient import is_undefined
from rockmate.runtime.backward_arguments import (
    DroppingSink,
    addresses_of,
    refuse_parameters,
    refuse_unsupported,
    take_arguments,
)
from rockmate.runtime.ddp import LastHooksSink, is_distributed
from rockmate.runtime.gradient_sink import Anchor, GradientSink
from rockmate.runtime.held_gradients import held_gradients_of
from rockmate.runtime.model_checks import refuse_resized
from rockmate.runtime.pending_steps import pending_steps_of
from rockmate.runtime.plan_agreement import confirm_order, order_of
from rockmate.runtime.program import Argument, ArgumentKind, PlannedLayout, Program, Statics


class Runner:
    """A program and the module whose tensors it reads; lives as long as the plan is in use.

    Attributes:
        program: the forward and backward functions.
        saved_bytes: tells what a forward holds for its backward, as its plan predicts; 0 unset.
        around: the context, by name, in which a forward or backward runs.
        binding: finds the module's tensors by name.
        pending: the forwards of the model whose backward has not run.
        held: whole gradients that wait for their reduction, of a sharded model; else None.
        dispatch: context in which the program's ops run.
        returned_names: parameters whose gradients are returned.
        returned_to: the tensor by whose history the gradient of a parameter is returned.
        output_places: for each output, its position in the program's results.
        update_places: positions of updates in the program's results.
        updated_inputs: indices of the inputs that the forward changes.
        non_differentiable: indices of outputs without a gradient.
        forward_statics: the statics that the forward reads.
        backward_statics: the statics that the backward reads.
        check_tangents: is given the gradients of outputs, and may refuse them.
        copies: a log of copies, as for `StepMoves`.
        backward: the backward with all tangents.
        input_gradients: index of an input -> position of its gradient in the backward's results.
        further_gradients: where each reader of an input has its gradient by itself, those after the
            first: index of the input, and position.
        parameter_gradients: positions of the returned parameter gradients in those.
        input_layouts: index of an input -> the layout that the program relies on.
        tangent_layouts: index of an output -> the layout of its tangent that is relied on.
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
        self.model, self.program, self.name, self.way_out = model, program, name, way_out
        self.copies: list[tuple[int, Pending]] | None = None
        self.check_tangents: Callable[[Sequence[torch.Tensor | None]], None] = lambda _: None
        self.saved_bytes: Callable[[], int] = int
        self.around: Callable[[str], AbstractContextManager[Any]] = engine.profiler_label
        self.binding = Binding(model, program.tensor_names())
        self.returned_to: Callable[[str], torch.Tensor] = self.binding.__getitem__
        self.pending = pending_steps_of(model)
        self.held = held_gradients_of(model)
        self.dispatch = engine.below_autograd if program.runs_below_autograd else nullcontext
        self.returned_names = [
            role.name for role in program.gradients if role.kind is RoleKind.PARAMETER_GRADIENT
        ]
        results = list(enumerate(program.results))
        outputs = {role.index: place for place, role in results if role.kind is RoleKind.OUTPUT}
        self.output_places = [outputs[index] for index in range(len(outputs))]
        self.update_places = [place for place, role in results if role.kind is not RoleKind.OUTPUT]
        updated = [role for _, role in results if role.kind is RoleKind.INPUT_UPDATE]
        self.updated_inputs = [role.index for role in updated]
        self.non_differentiable = sorted(outputs.keys() - program.differentiable)
        self.forward_statics = Statics(program, self.binding, program.forward_arguments)
        self.backward_statics = Statics(program, self.binding, program.backward_arguments)
        self.backward = _Backward(program, program.backward, program.backward_arguments)
        gradients = list(enumerate(program.gradients))
        self.input_gradients: dict[int, int] = {}
        self.further_gradients: list[tuple[int, int]] = []
        for place, role in gradients:
            if role.kind is not RoleKind.INPUT_GRADIENT:
                continue
            if self.input_gradients.setdefault(role.index, place) != place:
                self.further_gradients.append((role.index, place))
        self.parameter_gradients = [
            place for place, role in gradients if role.kind is RoleKind.PARAMETER_GRADIENT
        ]
        self.input_layouts = _layouts(program, RoleKind.INPUT)
        self.tangent_layouts = _layouts(program, RoleKind.TANGENT)
        kinds = [argument.kind for argument in program.forward_arguments]
        has_moves = ArgumentKind.MOVES in kinds
        self._moves_place = kinds.index(ArgumentKind.MOVES) if has_moves else None
        self._owner_places: list[Any] = [self.binding.places[name] for name in program.accumulated]
        self._order = order_of(program.collectives)
        self._backwards: dict[frozenset[int], _Backward] = {}  # by the undefined tangents
        # One for each device of inputs, kept for the next call.
        self._anchors: dict[torch.device, Anchor] = {}
        # The owners of the last call and their accumulation nodes. Autograd makes a node anew for
        # each gradient if nobody holds it, at the cost of a small addition.
        self._owners: dict[str, torch.Tensor] = {}
        self._accumulation_nodes: list[Any] = []

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
        self.send_weights_home()
        device = inputs[0].device if inputs else torch.device("cpu")
        anchor = self._anchors.get(device) or self._anchors.setdefault(device, Anchor(device))
        layouts = self.input_layouts
        laid_out = [
            layouts[index].apply(given) if index in layouts else given
            for index, given in enumerate(inputs)
        ]
        self._refuse_shared(inputs)
        owners = self.gradient_owners()
        if self.returned_names:
            parameters = map(self.returned_to, self.returned_names)
        elif hooks_last or not may_be_needed_early(owners.values()):
            parameters = {id(owner): owner for owner in owners.values()}.values()
        else:
            parameters = ()
        further = [laid_out[index] for index, _ in self.further_gradients]
        outputs = PlannedStep.apply(
            self, owners, anchor, anchor.leaf, len(laid_out), *laid_out, *further, *parameters
        )
        for index in self.updated_inputs:
            # The forward has updated a copy in the planned layout.
            if laid_out[index] is not inputs[index]:
                inputs[index].detach().copy_(laid_out[index])
        return outputs

    def forward_arguments(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[list[Any], StepMoves | None]:
        """The arguments of the forward of one call, and what carries out its moves."""
        arguments: list[Any] = self.forward_statics.tensors(inputs)
        slots, offload = self.program.slots, self.program.offload
        if slots is None:
            return arguments, None
        assert offload is not None
        slab = tier_of(self.model, offload).borrow(slots.num_bytes) if slots.num_bytes else None
        homes = homes_of(self.model) if self.program.fetched else None
        weights = [at_path(self.binding[each.name], each.inner) for each in self.program.fetched]
        moves = StepMoves(slab, slots, homes, weights, self.copies)
        if self._moves_place is not None:
            arguments.insert(self._moves_place, moves)
        return arguments, moves

    def send_weights_home(self) -> None:
        """Has those weights at home that the program fetches, and no others.

        While backwards are to come, the weights that those read stay where they are.

        Raises:
            OffloadError: the home has no room, or a copy has failed.
        """
        named = {e.path: at_path(self.binding[e.name], e.inner) for e in self.program.fetched}
        is_home = self.program.has_homes or has_homes(self.model)
        if is_home and not self.pending.runners_of(self.model):
            homes_of(self.model).hold(named, self.program.offload)

    def gradient_owners(self) -> dict[str, torch.Tensor]:
        """Name -> parameter in the module now, for each gradient that the backward accumulates.

        Raises:
            SignatureMismatchError: one of them is no leaf, so it has no `.grad` to add to.
        """
        owners = [holder[key] for holder, key in self._owner_places]
        if self._owners and all(map(operator.is_, owners, self._owners.values())):
            return self._owners
        named = dict(zip(self.program.accumulated, owners, strict=True))
        derived = [name for name, owner in named.items() if not owner.is_leaf]
        if derived:
            msg = (
                f"{derived[0]} is computed from other tensors in this call (functional_call, a "
                "swapped parameter), so its gradient has no place in .grad. Make the module with "
                'gradients="returned".'
            )
            raise SignatureMismatchError(msg)
        self._accumulation_nodes = [
            torch.autograd.graph.get_gradient_edge(owner).node for owner in owners
        ]
        self._owners = named
        return self._owners

    def release_accumulators(self) -> None:
        """Drops cached accumulation nodes, whose metadata `parameter.data = ...` makes stale."""
        self._owners = {}
        self._accumulation_nodes.clear()

    def backward_for(self, tangents: Sequence[torch.Tensor | None]) -> _Backward:
        """The backward for these tangents; see `rockmate.runtime.undefined_tangents`."""
        if all(tangent is not None for tangent in tangents):  # `in` would compare with each tensor
            return self.backward
        undefined = frozenset(i for i in self.program.differentiable if tangents[i] is None)
        if not undefined:
            return self.backward
        if undefined not in self._backwards:
            variant = self.program.backward_without(undefined)
            self._backwards[undefined] = _Backward(self.program, variant.run, variant.arguments)
        return self._backwards[undefined]

    def _refuse_shared(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises if an input that the forward updates shares memory with another input.

        The capture took all inputs for separate.
        """
        if not self.updated_inputs:
            return
        storages = [storage_id(tensor) for tensor in inputs]
        shared = [index for index in self.updated_inputs if storages.count(storages[index]) > 1]
        if shared:
            msg = (
                f"input {shared[0]} is changed in place by the model and shares memory with "
                "another input. Pass a copy of one of them."
            )
            raise SignatureMismatchError(msg)


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
        arguments, moves = runner.forward_arguments(inputs)
        with runner.around("rockmate::forward"), autocast_off(), runner.dispatch():
            values = program.forward(arguments)
        _write_updates(runner, inputs, values)
        outputs = tuple([values[place] for place in runner.output_places])
        saved: list[torch.Tensor | None] = list(values[len(program.results) :])
        aliases = [values[len(program.results) + place].detach() for place in program.saved_outputs]
        for place in program.saved_outputs:
            saved[place] = None
        fields: Any = ctx
        # Released by autograd after a backward without `retain_graph`.
        statics = runner.backward_statics.tensors(inputs)
        fields.save_for_backward(*statics, *aliases)
        # The script's own hooks of saved tensors may give others back.
        is_watched = program.recomputes and not engine.has_saved_tensor_hooks()
        fields.addresses = addresses_of(statics) if is_watched else None
        # Saved values and states, without saved outputs: None after such a backward.
        fields.saved, fields.moves = saved, moves
        # These refer to tensors of the caller's, and live as long as the function's node.
        fields.owners = owners
        num_before = num_inputs + len(runner.further_gradients)
        fields.visited = () if runner.returned_names else tensors[num_before:]
        fields.runner, fields.num_inputs, fields.anchor = runner, num_inputs, anchor
        # Otherwise each output without a gradient would get zeros of its size.
        fields.set_materialize_grads(False)
        runner.pending.add(ctx)
        fields.mark_non_differentiable(*[outputs[index] for index in runner.non_differentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        runner = ctx.runner
        refuse_unsupported(ctx, tangents)
        runner.check_tangents(tangents)
        sink = _sink(ctx)
        backward = runner.backward_for(tangents)
        # The only holder of the saved values from here on.
        arguments = take_arguments(ctx, backward.order, sink, tangents)
        with runner.around("rockmate::backward"), autocast_off(), runner.dispatch():
            values = backward.run(arguments)
            sink.close()
        if ctx.anchor.leaf.is_cuda:
            join_stream_at_end(ctx.anchor.leaf.device)
        inputs: list[torch.Tensor | None] = [None] * ctx.num_inputs
        for index, place in runner.input_gradients.items():
            inputs[index] = _returned(runner, values, place)
        inputs += [_returned(runner, values, place) for _, place in runner.further_gradients]
        if isinstance(sink, LastHooksSink):
            parameters = sink.remaining_gradients(ctx.visited)
        else:
            returned = [_returned(runner, values, place) for place in runner.parameter_gradients]
            parameters = returned or [None] * len(ctx.visited)
        return None, None, None, None, None, *inputs, *parameters


class _Backward:
    """An emitted backward."""

    def __init__(
        self,
        program: Program,
        run: Callable[[list[Any]], tuple[Any, ...]],
        arguments: Sequence[Argument],
    ) -> None:
        self.run = run
        # For each argument, its position among the sources of `_take_arguments`.
        self.order = program.order_of(arguments)


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


def _layouts(program: Program, kind: RoleKind) -> dict[int, PlannedLayout]:
    return {
        role.index: PlannedLayout(fake)
        for role, fake in program.layouts.items()
        if role.kind is kind and not role.inner  # a signature has the strides of tensors inside
    }


def _write_updates(
    runner: Runner, inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Copies the new values of buffers and inputs to their places."""
    for place in runner.update_places:
        is_input = (role := runner.program.results[place]).kind is RoleKind.INPUT_UPDATE
        target = inputs[role.index] if is_input else runner.binding[role.name]
        tensor = without_class(at_path(target, role.inner))
        # What is written by way of `data` does not count.
        written = tensor.data if place in runner.program.uncounted else tensor.detach()
        refuse_resized(written, values[place], role.name)
        written.copy_(values[place])


def _returned(
    runner: Runner, values: Sequence[torch.Tensor | None], place: int
) -> torch.Tensor | None:
    """The gradient at a place of the backward's results as eager returns it; None if undefined.

    Autograd adds another gradient to it in place only if nothing else refers to its memory, and a
    view refers to its base. `data` does not. Where something else has that memory, a tangent say,
    autograd has to see the tensor itself: it would else put it into several `.grad`, uncopied.
    """
    program = runner.program
    gradient, wrapping = values[place], program.gradients[place].wrapping
    if gradient is None or is_undefined(gradient):
        return None
    if place in program.own_gradients:
        gradient = gradient.data
    name = program.gradients[place].name
    owner = runner.binding[name] if name else None
    return gradient if wrapping is None else wrapping.wrap(gradient, owner)


def _sink(ctx: Any) -> GradientSink:
    """What receives the gradients of parameters."""
    if not ctx.runner.returned_names and not ctx.anchor.is_visited():
        refuse_parameters(ctx.visited, has_others=bool(ctx.owners and not ctx.visited))
        return DroppingSink()
    partial, is_last = ctx.runner.pending.begin(ctx)
    wrappings, held = ctx.runner.program.wrappings, ctx.runner.held
    if ctx.runner.returned_names and held is not None:
        if held.holding():
            msg = (
                "the model holds gradients (set_requires_gradient_sync(False)), and "
                'gradients="returned" has nowhere to add them up. Make the module with '
                'gradients="accumulated", or reduce in each backward.'
            )
            raise BackwardError(msg)
        held = None
    if ctx.visited:
        return LastHooksSink(ctx.owners, wrappings, held)
    return GradientSink(ctx.owners, partial, fires_hooks=is_last, wrappings=wrappings, held=held)
