"""A planned step as two functions, and what each of their arguments and results stands for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rockmate._torch.subclasses import at_path, is_subclassed, without_class
from rockmate.capture.forward_attributes import ForwardAttributes
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.read_values import ReadValues
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.signature import CallSignature
from rockmate.capture.size_template import Size
from rockmate.capture.structure import Structure
from rockmate.capture.wrapping import Wrapping
from rockmate.graph.ir import Op, Storage
from rockmate.graph.parameters import Binding
from rockmate.plan.plan import Plan
from rockmate.schedule.move import SlotPlan
from rockmate.schedule.offload_request import OffloadRequest


class ArgumentKind(enum.Enum):
    """What an argument of an emitted function is; the value begins its name in the code."""

    # A parameter, buffer, input or constant.
    STATIC = "static"
    # The gradient of an output.
    TANGENT = "tangent"
    # A value that the forward saves for the backward.
    SAVED = "saved"
    # What an op's first run saves for its recomputation: a random state, or what `Op.save_state`
    # returns.
    STATE = "state"
    # The gradient sink, which accumulates the gradients of parameters.
    SINK = "sink"
    # What carries out the moves of one call.
    MOVES = "moves"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an emitted function.

    Attributes:
        kind: what it is.
        source: the role of a static or tangent, the storage of a saved value, the op of a state;
            None for the sink and for what carries out moves.
    """

    kind: ArgumentKind
    source: Role | Storage | Op | None


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """The backward for one set of undefined tangents.

    Attributes:
        run: takes the arguments in one list, which it empties. Returns the gradients of the
            program, None for an undefined one.
        arguments: in order.
        sizes: names in its code that the backward with all tangents does not have.
    """

    run: Callable[[list[Any]], tuple[Any, ...]]
    arguments: tuple[Argument, ...]
    sizes: tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A planned step as two functions. `[Note: tensors of a planned step]` has the terms.

    Attributes:
        forward: takes the arguments of `forward_arguments` in one list; returns a tuple: the values
            of `results`, then those of `saved`.
        backward: takes the arguments of `backward_arguments` in one list, which it empties; returns
            the values of `gradients`.
        backward_without: writes the backward for a loss that leaves some outputs out, whose indices
            it takes.
        forward_arguments: of the forward, in order.
        backward_arguments: of the backward, in order.
        results: roles of the forward's first results: outputs and updates.
        uncounted: positions in `results` of updates that autograd does not count as writes in
            place, as in eager: running statistics of batch normalization.
        recomputes: whether the backward runs ops of the forward again.
        saved: saved values and states, the forward's further results, in the order in which the
            backward takes them.
        saved_outputs: positions in `saved` of values in the memory of an output.
        gradients: roles of the backward's results.
        own_gradients: positions in `gradients` of those whose memory no other one has, nor a
            tangent, a static or a saved value.
        accumulated: names of the parameters whose gradients the sink accumulates.
        wrappings: name of a parameter -> how to wrap its gradient, where it is a wrapper.
        collectives: the collectives in the order in which they run, in words, each with the name of
            its process group.
        constants: tensors that belong to the graphs themselves, by name.
        differentiable: indices of the outputs that have a gradient.
        layouts: for inputs and tangents a fake tensor with the strides that the code relies on.
        runs_below_autograd: whether autograd has nothing to do for any op. Ops of other libraries
            may differentiate inside.
        forward_code: the forward's source.
        backward_code: the backward's source.
        num_in_flight: number of forwards before a backward that the plan's budget bounds.
        slots: where moved values wait in the other tier; None if nothing moves or is fetched.
        fetched: the weight of each fetch, in the order of `Schedule.fetches`.
        offload: that tier.
    """

    forward: Callable[[list[Any]], tuple[Any, ...]]
    backward: Callable[[list[Any]], tuple[Any, ...]]
    backward_without: Callable[[frozenset[int]], BackwardVariant]
    forward_arguments: tuple[Argument, ...]
    backward_arguments: tuple[Argument, ...]
    results: tuple[Role, ...]
    uncounted: frozenset[int]
    recomputes: bool
    saved: tuple[Argument, ...]
    saved_outputs: tuple[int, ...]
    gradients: tuple[Role, ...]
    own_gradients: frozenset[int]
    accumulated: tuple[str, ...]
    wrappings: Mapping[str, Wrapping]
    collectives: tuple[tuple[str, str], ...]
    constants: Mapping[str, torch.Tensor]
    differentiable: frozenset[int]
    layouts: Mapping[Role, torch.Tensor]
    runs_below_autograd: bool
    forward_code: str
    backward_code: str
    num_in_flight: int = 1
    slots: SlotPlan | None = None
    fetched: tuple[Role, ...] = ()
    offload: OffloadRequest | None = None

    @property
    def has_homes(self) -> bool:
        """Whether weights are at home, or what belongs to trained ones."""
        return bool(self.fetched) or (self.offload is not None and self.offload.with_trained)

    def of_copy(self, memo: dict[int, Any]) -> Program:
        """The same for a copy of the model, which `copy.deepcopy` has made."""
        own = {name: memo.get(id(each), each) for name, each in self.constants.items()}
        return replace(self, constants=own)

    def order_of(self, arguments: Sequence[Argument]) -> list[int]:
        """Positions of a backward's arguments among all that one may take.

        These are the statics of `backward_arguments`, the saved values and states, the sink, what
        carries out moves, and a tangent for each output.
        """
        statics = [
            argument for argument in self.backward_arguments if argument.kind is ArgumentKind.STATIC
        ]
        places = {argument: place for place, argument in enumerate((*statics, *self.saved))}
        sink = len(statics) + len(self.saved)  # several may be of one constant
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

    def tensor_names(self) -> list[str]:
        """Names of the module's tensors that it reads, updates or has gradients of."""
        arguments = (*self.forward_arguments, *self.backward_arguments)
        roles = [each.source for each in arguments if isinstance(each.source, Role)]
        roles += [*self.results, *self.gradients, *self.fetched]
        names = [role.name for role in roles if role.name and role.kind is not RoleKind.CONSTANT]
        return list(dict.fromkeys([*names, *self.accumulated]))


class PlannedLayout:
    """The strides that a graph was captured with, on which its views rely."""

    def __init__(self, planned: torch.Tensor) -> None:
        """Takes the layout of a fake tensor."""
        self._shape, self._strides = tuple(planned.shape), tuple(planned.stride())
        # The stride of a dimension of size 1 does not matter.
        self._dims = [dim for dim, size in enumerate(self._shape) if size > 1]

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout."""
        strides = tensor.stride()
        return strides == self._strides or all(
            strides[dim] == self._strides[dim] for dim in self._dims
        )

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if it has this layout, else a copy that has."""
        if self.is_of(tensor):
            return tensor
        return torch.empty_strided(
            self._shape, self._strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCall:
    """A plan and its code, independent of the module that runs them.

    Attributes:
        plan_of: makes the plan at its first use; running needs the program alone.
        program: the forward and backward functions.
        call: signature of the calls that the program serves.
        state: signature of the module that it was made for.
        output_structure: rebuilds the model's output from its tensors.
        non_differentiable_outputs: indices of outputs with a gradient in eager and none in the
            plan; see `rockmate.runtime.undefined_tangents`.
        attributes: what the forward reads and leaves behind in attributes.
        read_values: values of tensors that it reads.
        larger: the call whose program this one runs with other numbers; its plan bounds all bytes.
    """

    plan_of: Callable[[], Plan]
    program: Program
    call: CallSignature
    state: ModelSignature
    output_structure: Structure
    non_differentiable_outputs: tuple[int, ...]
    attributes: ForwardAttributes
    read_values: ReadValues
    larger: PlannedCall | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return self.plan_of()
