"""Where an emitted function finds parameters, buffers, constants and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rockmate._torch.subclasses import at_path, is_subclassed, without_class
from rockmate.capture.roles import Role, RoleKind
from rockmate.graph.parameters import Binding
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
