"""The arguments of a planned step's two functions, and what a backward may be asked for.

A planned backward adds the gradients of parameters to `.grad` as it computes them. If a backward
asks for no parameter of the step (`torch.autograd.grad` and `backward(inputs=...)`), they are
dropped instead, and the gradients of inputs are returned as ever. Whether it asks for one can be
told if the parameters are inputs of the planned step: without hooks, outside a process group.
Otherwise, and for parameters, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.engine import is_asked_for, is_batched, keeps_graph
from rockmate._torch.subclasses import at_path, is_subclassed, without_class
from rockmate.capture.roles import Role, RoleKind
from rockmate.errors import BackwardError
from rockmate.graph.parameters import Binding
from rockmate.offload.step_moves import StepMoves
from rockmate.offload.tier import Pending
from rockmate.offload.tiers import tier_of
from rockmate.offload.weight_home import has_homes, homes_of
from rockmate.runtime.gradient_sink import GradientSink
from rockmate.runtime.pending_steps import pending_steps_of
from rockmate.runtime.program import Argument, ArgumentKind, EmittedFunction, Program
from rockmate.state.digest import bits_of


class Statics:
    """The static arguments of an emitted function, and where each is found."""

    def __init__(self, program: Program, binding: Binding, arguments: Sequence[Argument]) -> None:
        # (holder, key) of each; holder None stands for the inputs of the call.
        self._places: list[tuple[Mapping[str, Any] | None, Any]] = []
        # (position, attributes) of those inside of the tensor found there, or of another class.
        self._inner: list[tuple[int, tuple[str, ...]]] = []
        for argument in arguments:
            if argument.kind is not ArgumentKind.STATIC:
                continue
            role = argument.source
            assert isinstance(role, Role)
            if role.inner or (role.name in binding.places and is_subclassed(binding[role.name])):
                self._inner.append((len(self._places), role.inner))
            if role.kind is RoleKind.INPUT:
                self._places.append((None, role.index))
            elif role.kind is RoleKind.CONSTANT:
                self._places.append((program.constants, role.name))
            else:
                self._places.append(binding.places[role.name])

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are there now, in the order of the arguments."""
        found = [inputs[key] if holder is None else holder[key] for holder, key in self._places]
        for place, path in self._inner:
            found[place] = without_class(at_path(found[place], path))
        return found


class ForwardArguments:
    """The arguments of a model's planned forwards: statics, and what carries out moves.

    Attributes:
        copies: a log of copies, as for `StepMoves`.
    """

    def __init__(self, program: Program, model: nn.Module, binding: Binding) -> None:
        self.copies: list[tuple[int, Pending]] | None = None
        self._model, self._moved, self._binding = model, program.moved, binding
        self._statics = Statics(program, binding, program.forward.arguments)
        kinds = [argument.kind for argument in program.forward.arguments]
        has_moves = ArgumentKind.MOVES in kinds
        self._moves_place = kinds.index(ArgumentKind.MOVES) if has_moves else None

    def of(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], StepMoves | None]:
        """Those of one call, and what carries out its moves."""
        arguments: list[Any] = self._statics.tensors(inputs)
        slots, offload = self._moved.slots, self._moved.offload
        if slots is None:
            return arguments, None
        assert offload is not None
        slab = tier_of(self._model, offload).borrow(slots.num_bytes) if slots.num_bytes else None
        homes = homes_of(self._model) if self._moved.fetched else None
        weights = [weight for _, weight in self._fetched()]
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
        is_home = self._moved.has_homes or has_homes(self._model)
        if is_home and not pending_steps_of(self._model).runners_of(self._model):
            homes_of(self._model).hold(dict(self._fetched()), self._moved.offload)

    def _fetched(self) -> list[tuple[str, torch.Tensor]]:
        """The path of the weight of each fetch, and the weight as it is now."""
        binding, fetched = self._binding, self._moved.fetched
        return [(each.path, at_path(binding[each.name], each.inner)) for each in fetched]


class Backwards:
    """The backwards of a model's planned step, one for each set of undefined tangents.

    Attributes:
        statics: those that a backward reads.
    """

    def __init__(self, program: Program, binding: Binding, *, name: str, way_out: str) -> None:
        """Has the backward with all tangents; see `Runner` for the arguments."""
        self._program, self._name, self._way_out = program, name, way_out
        self.statics = Statics(program, binding, program.backward.arguments)
        self._of_all = program.backward, self._order_of(program.backward.arguments)
        self._others: dict[frozenset[int], tuple[EmittedFunction, list[int]]] = {}

    def of(self, tangents: Sequence[torch.Tensor | None]) -> tuple[EmittedFunction, list[int]]:
        """The backward for these tangents, with the order of its arguments for `take_arguments`.

        See `rockmate.runtime.undefined_tangents`.
        """
        if all(tangent is not None for tangent in tangents):  # `in` would compare with each tensor
            return self._of_all
        differentiable = self._program.results.differentiable
        undefined = frozenset(index for index in differentiable if tangents[index] is None)
        if not undefined:
            return self._of_all
        if undefined not in self._others:
            variant = self._program.backward_without(undefined)
            self._others[undefined] = variant, self._order_of(variant.arguments)
        return self._others[undefined]

    def take_arguments(
        self,
        ctx: Any,
        order: Sequence[int],
        sink: GradientSink,
        tangents: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """The arguments in one list. `ctx` drops saved values unless the graph is kept."""
        num_statics = len(self.statics)
        statics_and_aliases = self._saved_tensors(ctx)
        statics, aliases = statics_and_aliases[:num_statics], statics_and_aliases[num_statics:]
        if ctx.memory is not None and ctx.memory != ctx.memory_of(statics):
            msg = (
                f"{self._name} reads a parameter, buffer or input again whose memory was changed "
                "after the forward by way of `tensor.data`. Change it after the backward"
                f"{self._way_out}."
            )
            raise BackwardError(msg)
        saved, moves = list(ctx.saved), ctx.moves
        for place, alias in zip(self._program.saved_outputs, aliases, strict=True):
            saved[place] = alias
        if keeps_graph():
            # The emitted backward writes in place to saved values.
            saved = [tensor.clone() for tensor in saved]
        else:
            ctx.saved = ctx.moves = None
        planned = list(tangents)
        for index, layout in self._program.layouts.tangents.items():
            tangent = tangents[index]  # None for an output that no loss uses
            planned[index] = None if tangent is None else layout.apply(tangent)
        sources = [*statics, *saved, sink, moves, *planned]
        return [sources[place] for place in order]

    def _saved_tensors(self, ctx: Any) -> Sequence[torch.Tensor]:
        try:
            return ctx.saved_tensors
        except RuntimeError as error:
            msg = (
                f"{self._name}: a parameter, buffer, input or output that the backward reads was "
                f"changed in place after the forward: {error} Change it after the backward, or "
                f"change a copy{self._way_out}."
            )
            raise BackwardError(msg) from error

    def _order_of(self, arguments: Sequence[Argument]) -> list[int]:
        """Positions of a backward's arguments among the sources of `take_arguments`."""
        saved, all_arguments = self._program.saved, self._program.backward.arguments
        statics = [each for each in all_arguments if each.kind is ArgumentKind.STATIC]
        places = {argument: place for place, argument in enumerate((*statics, *saved))}
        sink = len(statics) + len(saved)  # several may be of one constant
        order = []
        for argument in arguments:
            match argument.kind:
                case ArgumentKind.SINK:
                    order.append(sink)
                case ArgumentKind.MOVES:
                    order.append(sink + 1)
                case ArgumentKind.TANGENT:
                    assert isinstance(argument.source, Role)
                    order.append(sink + 2 + argument.source.index)
                case _:
                    order.append(places[argument])
        return order


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of the memory of each, which `tensor.data = ...` changes unseen by autograd."""
    return list(map(torch.Tensor.data_ptr, tensors))


def contents_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bits of each, as `tensor.data.add_` changes bits alone."""
    return [(each.data_ptr(), bits_of(each)) for each in tensors]


class DroppingSink(GradientSink):
    """Drops the gradients of parameters."""

    def __init__(self) -> None:
        super().__init__({}, fires_hooks=False)

    def _drop(self, *_: Any, **__: Any) -> None: ...

    accumulate: Any = _drop
    accumulate_matmul: Any = _drop
    accumulate_embedding: Any = _drop
    fire_hooks: Any = _drop


def refuse_parameters(visited: Iterable[torch.Tensor], *, has_others: bool) -> None:
    """Raises `BackwardError` if the running backward may ask for parameters of the step.

    Visited are those that are inputs of the step, and it may have others.
    """
    nodes = (torch.autograd.graph.get_gradient_edge(each).node for each in visited)
    if has_others or any(map(is_asked_for, nodes)):
        msg = (
            "torch.autograd.grad and backward(inputs=...) want gradients of parameters returned, "
            "or the model has hooks or is in a process group, and this module adds gradients to "
            '.grad as they are computed. Make it with gradients="returned".'
        )
        raise BackwardError(msg)


def refuse_unsupported(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> None:
    """Raises `BackwardError` for a second backward or derivative, several at once, or autocast."""
    if ctx.saved is None:
        msg = (
            "backward ran a second time through the same forward, whose values have been freed. "
            "Call the module again, or pass retain_graph=True to the first backward, which then "
            "keeps them beyond the budget."
        )
        raise BackwardError(msg)
    if torch.is_grad_enabled():
        msg = (
            "create_graph=True asks for a second derivative, which a planned backward does not "
            'have. Use the plain model for it, or mode="frames" with plan_frames=False, or plan '
            "the step as a function that takes the derivative itself, of the plain model:\n"
            "  def loss_fn(x): return grad(model(x).sum(), x, create_graph=True)[0].norm()\n"
            "  step = rockmate.plan_step(loss_fn, [model], budget=0.8)\n"
            "  step(x).backward()"
        )
        raise BackwardError(msg)
    ctx.runner.program.refuse_casts(autocast_dtypes().get(ctx.anchor.leaf.device.type))
    if any(each is not None and is_batched(each) for each in tangents):
        msg = (
            "is_grads_batched=True asks for several gradients at once. Run one backward for each, "
            "or use the plain model."
        )
        raise BackwardError(msg)
