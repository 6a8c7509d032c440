"""Runs a planned step under autograd.

One autograd function stands for the whole step. Its tensor inputs are an *anchor* (an empty leaf that makes the result require grad)
and the user's inputs; parameters are no inputs of it, because their gradients do not leave through its return value: each is handed
to `.grad` inside the backward, as soon as it is final, by a nested `torch.autograd.backward`, which accumulates and fires hooks as
usual. (Were the parameters inputs too, the outer engine would visit their accumulation nodes once more with nothing, and
post-accumulate hooks would fire twice.) With `gradients="returned"` parameters are inputs and their gradients return values, which
`torch.autograd.grad` needs and which costs the memory of all of them at once.

How a gradient is handed over is said in `delivery`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from rockmate.capture import Role, RoleKind
from rockmate.data_parallel import LastHooksSink
from rockmate.delivery import Binding, GradientSink
from rockmate.emit import Argument, ArgumentKind, Program
from rockmate.errors import BackwardError, SignatureMismatchError
from rockmate.graph import Storage


class Runner:
    """A program with the module that it belongs to: what an autograd function needs to run it."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.program = program
        arguments = (*program.forward_arguments, *program.backward_arguments)
        roles = [a.what for a in arguments if isinstance(a.what, Role)] + [*program.results, *program.gradients]
        names = [role.name for role in roles if role.name and role.kind is not RoleKind.CONSTANT]
        self.binding = Binding(model, list(dict.fromkeys([*names, *program.delivered])))
        self.parameter_names = [role.name for role in program.gradients if role.kind is RoleKind.PARAMETER_GRADIENT]
        self.delivered_names = program.delivered
        self.outputs = [i for i, role in enumerate(program.results) if role.kind is RoleKind.OUTPUT]
        self.updates = [i for i, role in enumerate(program.results) if role.kind is not RoleKind.OUTPUT]
        self.changed_inputs = [role.index for role in program.results if role.kind is RoleKind.INPUT_UPDATE]
        self.differentiable = program.differentiable
        self.statics = [a for a in program.backward_arguments if a.kind is ArgumentKind.STATIC]
        self._anchors: dict[torch.device, torch.Tensor] = {}

    def run(self, inputs: Sequence[torch.Tensor], *, hooks_last: bool = False) -> tuple[torch.Tensor, ...]:
        """The model's output tensors, in the order of their index.

        Args:
            inputs: the tensors of the call.
            hooks_last: hooks of parameters fire when the step is done; see `data_parallel`.
        """
        device = inputs[0].device if inputs else torch.device("cpu")
        anchor = self._anchors.setdefault(device, torch.empty(0, device=device, requires_grad=True))
        layouts, given = self.program.layouts, inputs
        inputs = [_laid_out(t, layouts[Role(RoleKind.INPUT, index=i)]) for i, t in enumerate(given)]
        self._refuse_shared(given)
        parameters = [self.binding[name] for name in self.parameter_names]
        if hooks_last and not parameters:
            parameters = list({id(owner): owner for owner in self.gradient_owners().values()}.values())
        outputs = PlannedStep.apply(self, anchor, len(inputs), *inputs, *parameters)
        for index in self.changed_inputs:  # a copy in the planned layout has been changed in its place
            if inputs[index] is not given[index]:
                given[index].detach().copy_(inputs[index])
        return outputs

    def _refuse_shared(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises if an input that the forward changes in place shares memory with another, which the capture did not know."""
        if not self.changed_inputs:
            return
        memory = [tensor.untyped_storage()._cdata for tensor in inputs]
        shared = [index for index in self.changed_inputs if memory.count(memory[index]) > 1]
        if shared:
            msg = f"input {shared[0]} is changed in place by the model and shares memory with another input. Pass a copy of one of them."
            raise SignatureMismatchError(msg)

    def gradient_owners(self) -> dict[str, torch.Tensor]:
        """The parameters whose gradients the backward will hand over: those that stand in the module now.

        Raises:
            SignatureMismatchError: one of them is no leaf, so it has no `.grad` to add to.
        """
        owners = {name: self.binding[name] for name in self.delivered_names}
        derived = [name for name, owner in owners.items() if not owner.is_leaf]
        if derived:
            msg = (
                f"{derived[0]} is computed from other tensors in this call (functional_call, a swapped parameter), so its gradient has no "
                'place in .grad. Make the module with gradients="returned".'
            )
            raise SignatureMismatchError(msg)
        return owners

    def static(self, argument: Argument, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The present tensor of a static argument."""
        role = argument.what
        assert isinstance(role, Role)
        if role.kind is RoleKind.INPUT:
            return inputs[role.index]
        return self.program.constants[role.name] if role.kind is RoleKind.CONSTANT else self.binding[role.name]


class PlannedStep(torch.autograd.Function):
    """The step as one autograd function; see the module docstring."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: FunctionCtx, runner: Runner, anchor: torch.Tensor, num_inputs: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        inputs, program = tensors[:num_inputs], runner.program
        with _as_captured("rockmate::forward"):
            values = program.forward([runner.static(argument, inputs) for argument in program.forward_arguments])
        for position in runner.updates:
            role = program.results[position]
            target = inputs[role.index] if role.kind is RoleKind.INPUT_UPDATE else runner.binding[role.name]
            target.detach().copy_(values[position])
        ordered = {program.results[position].index: values[position] for position in runner.outputs}
        outputs = tuple(ordered[index] for index in range(len(ordered)))
        kept = values[len(program.results) :]
        shared = {tensor.untyped_storage()._cdata for tensor in outputs}
        # A kept tensor that the user holds too goes through autograd, which notices when it is changed in place; an alias of it,
        # since the output itself would refer to this node and never be freed.
        held = [t.detach() if _is_held(a, t, shared) else None for a, t in zip(program.kept, kept, strict=True)]
        ctx.save_for_backward(*[runner.static(argument, inputs) for argument in runner.statics], *held)  # pyright: ignore
        ctx.kept = [tensor if alias is None else None for tensor, alias in zip(kept, held, strict=True)]  # pyright: ignore
        ctx.owners = runner.gradient_owners()  # pyright: ignore
        ctx.visited = () if runner.parameter_names else tensors[num_inputs:]  # pyright: ignore
        ctx.runner, ctx.num_inputs, ctx.anchor = runner, num_inputs, anchor  # pyright: ignore
        ctx.set_materialize_grads(False)  # outputs without a gradient would each get zeros of their size
        ctx.output_metadata = [(t.shape, t.dtype, t.device) for t in outputs]  # pyright: ignore
        ctx.mark_non_differentiable(*[tensor for index, tensor in enumerate(outputs) if index not in runner.differentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        runner, program = ctx.runner, ctx.runner.program
        _refuse_what_no_schedule_serves(ctx, hands_over=not runner.parameter_names)
        saved = ctx.saved_tensors
        statics, held = saved[: len(runner.statics)], saved[len(runner.statics) :]
        kept = [tensor if alias is None else alias for tensor, alias in zip(ctx.kept, held, strict=True)]
        if torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore
            kept = [tensor.clone() for tensor in kept]  # the planned backward works in place on what it is given
        else:
            ctx.kept = None
        sink = LastHooksSink(ctx.owners) if ctx.visited else GradientSink(ctx.owners)
        arguments = _backward_arguments(ctx, iter(statics), kept, tangents, sink)
        del saved, statics, held, kept
        with _as_captured("rockmate::backward"):
            values = program.backward(arguments)
        by_role = dict(zip(program.gradients, values, strict=True))
        inputs = [by_role.get(Role(RoleKind.INPUT_GRADIENT, index=index)) for index in range(ctx.num_inputs)]
        parameters = [by_role[Role(RoleKind.PARAMETER_GRADIENT, name=name)] for name in runner.parameter_names]
        if isinstance(sink, LastHooksSink):
            parameters = [sink.rest_of(parameter) for parameter in ctx.visited]
        return None, None, None, *inputs, *parameters


@contextlib.contextmanager
def _as_captured(label: str) -> Iterator[None]:
    """Runs a planned graph as it was written: the casts of autocast are in it, so autocast must not add its own."""
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.profiler.record_function(label))
        yield


def _is_held(argument: Argument, tensor: torch.Tensor, shared: set[int]) -> bool:
    return isinstance(argument.what, Storage) and tensor.untyped_storage()._cdata in shared


def _backward_arguments(
    ctx: Any, statics: Any, kept: list[Any], tangents: Sequence[torch.Tensor | None], sink: GradientSink
) -> list[Any]:
    """The argument list, in order; it becomes the only holder of what was kept."""
    runner: Runner = ctx.runner
    kept.reverse()
    arguments: list[Any] = []
    for argument in runner.program.backward_arguments:
        match argument.kind:
            case ArgumentKind.STATIC:
                arguments.append(next(statics))
            case ArgumentKind.TANGENT:
                assert isinstance(argument.what, Role)
                arguments.append(_tangent(ctx, tangents, argument.what.index))
            case ArgumentKind.SINK:
                arguments.append(sink)
            case _:
                arguments.append(kept.pop())
    return arguments


def _tangent(ctx: Any, tangents: Sequence[torch.Tensor | None], index: int) -> torch.Tensor:
    """The gradient of an output; zeros for a differentiable output that the user's loss does not use."""
    tangent = tangents[index]
    planned = ctx.runner.program.layouts[Role(RoleKind.TANGENT, index=index)]
    if tangent is None:
        shape, dtype, device = ctx.output_metadata[index]
        tangent = torch.zeros((), dtype=dtype, device=device).expand(shape)
    return _laid_out(tangent, planned)


def _laid_out(tensor: torch.Tensor, planned: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides that the graph was captured with, on which its views rely; itself if it has them."""
    pairs = zip(tensor.shape, tensor.stride(), planned.stride(), strict=True)
    if all(present == expected for size, present, expected in pairs if size > 1):
        return tensor
    return torch.empty_strided(planned.shape, planned.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


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
    if hands_over and not _runs_to_leaves(ctx.anchor):
        msg = (
            "torch.autograd.grad and backward(inputs=...) want gradients returned, but this module hands them to .grad as they "
            'arise. Make it with gradients="returned".'
        )
        raise BackwardError(msg)


def _runs_to_leaves(anchor: torch.Tensor) -> bool:
    """Whether the running backward accumulates into every leaf, as `loss.backward()` does."""
    node = torch.autograd.graph.get_gradient_edge(anchor).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised inside autograd.grad
        return False
