"""The arguments of a planned forward, and where the tensors of a model are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rockmate._torch.subclasses import at_path, is_subclassed, without_class
from rockmate.capture.roles import Role, RoleKind
from rockmate.graph.parameters import Binding
from rockmate.offload.step_moves import StepMoves
from rockmate.offload.tiers import Pending, tier_of
from rockmate.offload.weight_home import has_homes, homes_of
from rockmate.runtime.pending_steps import pending_steps_of
from rockmate.runtime.program import Argument, ArgumentKind, Program


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
        """Finds the places of statics; reads none of them."""
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
