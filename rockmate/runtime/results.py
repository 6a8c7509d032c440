"""What the two functions of a planned step return, and where each of it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rockmate._torch.storage import storage_id
from rockmate._torch.subclasses import at_path, without_class
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.wrapping import Wrapping
from rockmate.errors import SignatureMismatchError
from rockmate.graph.parameters import Binding
from rockmate.ops.undefined_gradient import is_undefined
from rockmate.runtime.model_checks import refuse_resized


class Results:
    """The first results of a forward: outputs, and new values of buffers and inputs.

    Attributes:
        roles: of all, in order.
        uncounted: positions of updates that autograd does not count as writes in place, as in
            eager: running statistics of batch normalization.
        differentiable: indices of the outputs that have a gradient.
        non_differentiable: of those that have none.
        outputs: for each output, its position.
        updated_inputs: indices of the inputs that the forward changes.
    """

    def __init__(
        self, roles: Sequence[Role], uncounted: frozenset[int], differentiable: frozenset[int]
    ) -> None:
        self.roles, self.uncounted, self.differentiable = tuple(roles), uncounted, differentiable
        places = {role.index: at for at, role in enumerate(roles) if role.kind is RoleKind.OUTPUT}
        self.outputs = [places[index] for index in range(len(places))]
        self.non_differentiable = sorted(places.keys() - differentiable)
        self._updates = [at for at, role in enumerate(roles) if role.kind is not RoleKind.OUTPUT]
        self.updated_inputs = [role.index for role in roles if role.kind is RoleKind.INPUT_UPDATE]

    def write_updates(
        self, values: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], binding: Binding
    ) -> None:
        """Copies the new values of buffers and inputs to their places, all or none."""
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for place in self._updates:
            is_input = (role := self.roles[place]).kind is RoleKind.INPUT_UPDATE
            target = inputs[role.index] if is_input else binding[role.name]
            tensor = without_class(at_path(target, role.inner))
            # What is written by way of `data` does not count.
            written = tensor.data if place in self.uncounted else tensor.detach()
            refuse_resized(written, values[place], role.name)
            pairs.append((written, values[place]))
        for written, value in pairs:
            written.copy_(value)

    def refuse_shared(self, inputs: Sequence[torch.Tensor]) -> None:
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


class Gradients:
    """The gradients of a backward: those that it returns, and those that the sink accumulates.

    Attributes:
        roles: of what it returns, in order.
        own: positions of those whose memory no other one has, nor a tangent, a static or a saved
            value.
        accumulated: names of the parameters whose gradients the sink accumulates.
        wrappings: name of a parameter -> how to wrap its gradient, where it is a wrapper.
        of_inputs: index of an input -> position of its gradient.
        further: where each reader of an input has its gradient by itself, those after the first:
            index of the input, and position.
        of_parameters: name of a parameter, and position of its gradient, where that is returned.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        own: frozenset[int],
        accumulated: Sequence[str],
        wrappings: Mapping[str, Wrapping],
    ) -> None:
        self.roles, self.own = tuple(roles), own
        self.accumulated, self.wrappings = tuple(accumulated), wrappings
        self.of_inputs: dict[int, int] = {}
        self.further: list[tuple[int, int]] = []
        self.of_parameters: list[tuple[str, int]] = []
        for place, role in enumerate(roles):
            if role.kind is RoleKind.PARAMETER_GRADIENT:
                self.of_parameters.append((role.name, place))
            elif self.of_inputs.setdefault(role.index, place) != place:
                self.further.append((role.index, place))

    def returned(
        self, values: Sequence[torch.Tensor | None], place: int, binding: Binding
    ) -> torch.Tensor | None:
        """The gradient at a place as eager returns it; None if undefined.

        Autograd adds another gradient to it in place only if nothing else refers to its memory, and
        a view refers to its base. `data` does not. Where something else has that memory, a tangent
        say, autograd has to see the tensor itself: it would else put it into several `.grad`,
        uncopied.
        """
        gradient, wrapping = values[place], self.roles[place].wrapping
        if gradient is None or is_undefined(gradient):
            return None
        if place in self.own:
            gradient = gradient.data
        name = self.roles[place].name
        owner = binding[name] if name else None
        return gradient if wrapping is None else wrapping.wrap(gradient, owner)
