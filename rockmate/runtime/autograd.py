"""Runs a planned step under autograd.

One autograd function stands for the whole step. Its tensor inputs are an *anchor* (an empty leaf that makes the result require grad)
and the user's inputs; parameters are no inputs of it, because their gradients do not leave through its return value: each is handed
to `.grad` inside the backward, as soon as it is final, by a nested `torch.autograd.backward`, which accumulates and fires hooks as
usual. (Were the parameters inputs too, the outer engine would visit their accumulation nodes once more with nothing, and
post-accumulate hooks would fire twice.) Where nobody is seen to wait for a gradient, parameters are inputs all the same: that visit is
their only one. With `gradients="returned"` parameters are inputs and their gradients return values, which `torch.autograd.grad` needs
and which costs the memory of all of them at once.

How a gradient is handed over is said in `delivery`.

A call should cost little beside a small model's step, so what does not change from call to call is worked out in `Runner.__init__`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockmate._torch.autocast import autocast_off
from rockmate._torch.engine import (
    below_autograd,
    fast_apply,
    has_functorch_transforms,
    keeps_graph,
    record_function,
    unwrap_if_dead,
    will_execute,
)
from rockmate._torch.members import all_hooks_of
from rockmate._torch.storage import storage_id
from rockmate.capture.roles import Role, RoleKind
from rockmate.errors import BackwardError, SignatureMismatchError
from rockmate.graph.parameters import Binding
from rockmate.ops.unused_gradient import is_undefined
from rockmate.runtime.ddp import LastHooksSink, is_distributed
from rockmate.runtime.emit import Argument, ArgumentKind, Program
from rockmate.runtime.gradient_sink import GradientSink


class Runner:
    """A program with the module that it belongs to: what an autograd function needs to run it."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.program = program
        arguments = (*program.forward_arguments, *program.backward_arguments)
        roles = [a.what for a in arguments if isinstance(a.what, Role)] + [
            *program.results,
            *program.gradients,
        ]
        names = [role.name for role in roles if role.name and role.kind is not RoleKind.CONSTANT]
        self.binding = Binding(model, list(dict.fromkeys([*names, *program.delivered])))
        self.parameter_names = [
            role.name for role in program.gradients if role.kind is RoleKind.PARAMETER_GRADIENT
        ]
        self.dispatch = below_autograd if program.runs_below_autograd else contextlib.nullcontext
        self.delivered_names = program.delivered
        self._owner_places: list[Any] = [self.binding.places[name] for name in program.delivered]
        outputs = {
            role.index: place
            for place, role in enumerate(program.results)
            if role.kind is RoleKind.OUTPUT
        }
        self.outputs = [outputs[index] for index in range(len(outputs))]
        self.updates = [
            place for place, role in enumerate(program.results) if role.kind is not RoleKind.OUTPUT
        ]
        self.changed_inputs = [
            role.index for role in program.results if role.kind is RoleKind.INPUT_UPDATE
        ]
        self.non_differentiable = [
            index for index in range(len(outputs)) if index not in program.differentiable
        ]
        self.read_in_forward = _Statics(program, self.binding, program.forward_arguments)
        self.read_in_backward = _Statics(program, self.binding, program.backward_arguments)
        self.backward_order = _order(program, len(outputs))
        places = {role: place for place, role in enumerate(program.gradients)}
        self.input_gradients = {
            role.index: place
            for role, place in places.items()
            if role.kind is RoleKind.INPUT_GRADIENT
        }
        self.parameter_gradients = [
            places[Role(RoleKind.PARAMETER_GRADIENT, name=name)] for name in self.parameter_names
        ]
        layouts = {role: _Layout(fake) for role, fake in program.layouts.items()}
        self.input_layouts = {
            role.index: layout for role, layout in layouts.items() if role.kind is RoleKind.INPUT
        }
        self.tangent_layouts = {
            role.index: layout for role, layout in layouts.items() if role.kind is RoleKind.TANGENT
        }
        self._anchors: dict[torch.device, _Anchor] = {}
        self._owners: dict[str, torch.Tensor] = {}
        self._accumulators: list[Any] = []

    def run(
        self, inputs: Sequence[torch.Tensor], *, hooks_last: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The model's output tensors, in the order of their index.

        Args:
            inputs: the tensors of the call.
            hooks_last: hooks of parameters must fire when the step is done; see `data_parallel`.
        """
        device = inputs[0].device if inputs else torch.device("cpu")
        anchor = self._anchors.get(device) or self._anchors.setdefault(device, _Anchor(device))
        given = inputs
        inputs = [
            self.input_layouts[index].of(unwrap_if_dead(tensor))
            for index, tensor in enumerate(given)
        ]
        self._refuse_shared(given)
        owners = self.gradient_owners()
        if self.parameter_names:
            parameters = [self.binding[name] for name in self.parameter_names]
        elif hooks_last or not _is_awaited(owners.values()):
            parameters = {id(owner): owner for owner in owners.values()}.values()
        else:
            parameters = ()
        is_plain = not self.parameter_names and not has_functorch_transforms()
        apply = _apply if is_plain else PlannedStep.apply  # which refuses such transforms
        outputs = apply(self, owners, anchor, anchor.leaf, len(inputs), *inputs, *parameters)
        for (
            index
        ) in self.changed_inputs:  # a copy in the planned layout has been changed in its place
            if inputs[index] is not given[index]:
                given[index].detach().copy_(inputs[index])
        return outputs

    def _refuse_shared(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises if an input that the forward changes in place shares memory with another, which the capture did not know."""
        if not self.changed_inputs:
            return
        memory = [storage_id(tensor) for tensor in inputs]
        shared = [index for index in self.changed_inputs if memory.count(memory[index]) > 1]
        if shared:
            msg = f"input {shared[0]} is changed in place by the model and shares memory with another input. Pass a copy of one of them."
            raise SignatureMismatchError(msg)

    def gradient_owners(self) -> dict[str, torch.Tensor]:
        """The parameters whose gradients the backward will hand over: those that stand in the module now.

        Raises:
            SignatureMismatchError: one of them is no leaf, so it has no `.grad` to add to.
        """
        owners = [holder[key] for holder, key in self._owner_places]
        if self._owners and all(map(operator.is_, owners, self._owners.values())):
            return self._owners
        derived = [
            name
            for name, owner in zip(self.delivered_names, owners, strict=True)
            if not owner.is_leaf
        ]
        if derived:
            msg = (
                f"{derived[0]} is computed from other tensors in this call (functional_call, a swapped parameter), so its gradient has no "
                'place in .grad. Make the module with gradients="returned".'
            )
            raise SignatureMismatchError(msg)
        # Nodes at which autograd accumulates; one that nobody holds is made anew for each gradient, at the cost of adding it.
        self._accumulators = [
            torch.autograd.graph.get_gradient_edge(owner).node for owner in owners
        ]
        self._owners = dict(zip(self.delivered_names, owners, strict=True))
        return self._owners

    def release_accumulators(self) -> None:
        """Lets go of the nodes at which autograd accumulates: they remember the shapes that parameters had (`.data` may be another)."""
        self._owners = {}
        self._accumulators.clear()


class PlannedStep(torch.autograd.Function):
    """The step as one autograd function; see the module docstring."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: FunctionCtx,
        runner: Runner,
        owners: Mapping[str, torch.Tensor],
        anchor: _Anchor,
        leaf: torch.Tensor,
        num_inputs: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs, program = tensors[:num_inputs], runner.program
        with record_function("rockmate::forward"), autocast_off(), runner.dispatch():
            values = program.forward(runner.read_in_forward.present(inputs))
        for place in runner.updates:
            role = program.results[place]
            target = (
                inputs[role.index]
                if role.kind is RoleKind.INPUT_UPDATE
                else runner.binding[role.name]
            )
            target.detach().copy_(values[place])
        outputs = tuple([values[place] for place in runner.outputs])
        kept: list[torch.Tensor | None] = list(values[len(program.results) :])
        # A kept tensor that the user holds too goes through autograd, which notices when it is changed in place; an alias of it,
        # since the output itself would refer to this node and never be freed.
        held = [values[len(program.results) + place].detach() for place in program.held]
        for place in program.held:
            kept[place] = None
        ctx.save_for_backward(*runner.read_in_backward.present(inputs), *held)
        ctx.kept = kept  # pyright: ignore
        ctx.owners = owners  # pyright: ignore
        ctx.visited = () if runner.parameter_names else tensors[num_inputs:]  # pyright: ignore
        ctx.runner, ctx.num_inputs, ctx.anchor = runner, num_inputs, anchor  # pyright: ignore
        ctx.set_materialize_grads(
            False
        )  # outputs without a gradient would each get zeros of their size
        ctx.output_metadata = [(t.shape, t.dtype, t.device) for t in outputs]  # pyright: ignore
        ctx.mark_non_differentiable(*[outputs[index] for index in runner.non_differentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        runner, program = ctx.runner, ctx.runner.program
        _refuse_what_no_schedule_serves(ctx, hands_over=not runner.parameter_names)
        saved = ctx.saved_tensors
        kept = list(ctx.kept)
        for place, alias in zip(program.held, saved[len(runner.read_in_backward) :], strict=True):
            kept[place] = alias
        if keeps_graph():
            kept = [
                tensor.clone() for tensor in kept
            ]  # the planned backward works in place on what it is given
        else:
            ctx.kept = None
        sink = LastHooksSink(ctx.owners) if ctx.visited else GradientSink(ctx.owners)
        sources = [*saved[: len(runner.read_in_backward)], *kept, sink, *_tangents(ctx, tangents)]
        arguments = [sources[place] for place in runner.backward_order]
        del saved, kept, sources  # the list of arguments is the only holder of what was kept
        with record_function("rockmate::backward"), autocast_off(), runner.dispatch():
            values = program.backward(arguments)
            sink.close()
        inputs = [None] * ctx.num_inputs
        for index, place in runner.input_gradients.items():
            inputs[index] = None if is_undefined(values[place]) else values[place]
        parameters = [
            None if is_undefined(values[place]) else values[place]
            for place in runner.parameter_gradients
        ]
        if isinstance(sink, LastHooksSink):
            parameters = sink.rests_of(ctx.visited)
        return None, None, None, None, None, *inputs, *parameters


_apply = fast_apply(PlannedStep)


class _Statics:
    """The static arguments of an emitted graph, and where each stands."""

    def __init__(self, program: Program, binding: Binding, arguments: Sequence[Argument]) -> None:
        self._places: list[
            tuple[Mapping[str, Any] | None, Any]
        ] = []  # None stands for the inputs of the call
        for role in (
            argument.what for argument in arguments if argument.kind is ArgumentKind.STATIC
        ):
            assert isinstance(role, Role)
            if role.kind is RoleKind.INPUT:
                self._places.append((None, role.index))
            else:
                self._places.append(
                    (program.constants, role.name)
                    if role.kind is RoleKind.CONSTANT
                    else binding.places[role.name]
                )

    def __len__(self) -> int:
        return len(self._places)

    def present(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that stand there now, in the order of the arguments."""
        return [inputs[key] if holder is None else holder[key] for holder, key in self._places]


class _Layout:
    """The strides that a graph was captured with, on which its views rely."""

    def __init__(self, planned: torch.Tensor) -> None:
        self._shape, self._strides = tuple(planned.shape), tuple(planned.stride())
        self._counting = [dim for dim, size in enumerate(self._shape) if size > 1]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in this layout; itself if it has it."""
        strides = tensor.stride()
        if strides == self._strides or all(
            strides[dim] == self._strides[dim] for dim in self._counting
        ):
            return tensor
        return torch.empty_strided(
            self._shape, self._strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)


class _Anchor:
    """The leaf that makes a step require grad, and the node at which autograd would accumulate its gradient."""

    def __init__(self, device: torch.device) -> None:
        self.leaf = torch.empty(0, device=device, requires_grad=True)
        self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node

    def runs_to_leaves(self) -> bool:
        """Whether the running backward accumulates into every leaf, as `loss.backward()` does."""
        return will_execute(self.node)


def _is_awaited(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether somebody may want a gradient before the step is done.

    A hook may step and free it; in a group of processes its reduction may run beside the backward, and who does that is not seen from
    Python. Otherwise the running engine visits the parameters in passing when the step is done, at a tenth of the cost of a visit from
    within the backward.
    """
    return is_distributed() or any(chain.from_iterable(map(all_hooks_of, parameters)))


def _order(program: Program, num_outputs: int) -> list[int]:
    """For each argument of the backward its place among static arguments, kept values, the sink and the outputs' gradients."""
    num_statics = sum(
        argument.kind is ArgumentKind.STATIC for argument in program.backward_arguments
    )
    statics, kept = (
        iter(range(num_statics)),
        iter(range(num_statics, num_statics + len(program.kept))),
    )
    sink = num_statics + len(program.kept)
    order = []
    for argument in program.backward_arguments:
        match argument.kind:
            case ArgumentKind.STATIC:
                order.append(next(statics))
            case ArgumentKind.SINK:
                order.append(sink)
            case ArgumentKind.TANGENT:
                assert isinstance(argument.what, Role)
                order.append(sink + 1 + argument.what.index)
            case _:
                order.append(next(kept))
    return order


def _tangents(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of the outputs; zeros for a differentiable output that the user's loss does not use."""
    given = list(tangents)
    for index, layout in ctx.runner.tangent_layouts.items():
        tangent = tangents[index]
        if tangent is None:
            shape, dtype, device = ctx.output_metadata[index]
            tangent = torch.zeros((), dtype=dtype, device=device).expand(shape)
        given[index] = layout.of(tangent)
    return given


def _refuse_what_no_schedule_serves(ctx: Any, *, hands_over: bool) -> None:
    if ctx.kept is None:
        msg = (
            "backward ran a second time through the same forward, whose values have been freed. Call the module again, or pass "
            "retain_graph=True to the first backward (which then keeps them beyond the budget)."
        )
        raise BackwardError(msg)
    if torch.is_grad_enabled():
        msg = "create_graph=True asks for a second derivative, which a planned backward does not have. Use the plain model for it."
        raise BackwardError(msg)
    if hands_over and not ctx.anchor.runs_to_leaves():
        msg = (
            "torch.autograd.grad and backward(inputs=...) want gradients returned, but this module hands them to .grad as they "
            'arise. Make it with gradients="returned".'
        )
        raise BackwardError(msg)
