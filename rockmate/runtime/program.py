"""A planned step as two functions, and what each of their arguments and results stands for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rockmate._torch.engine import below_autograd
from rockmate.capture.forward_attributes import ForwardAttributes
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.read_values import ReadValues
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.signature import CallSignature
from rockmate.capture.size_template import Size
from rockmate.capture.structure import Structure
from rockmate.errors import BackwardError
from rockmate.graph.ir import Op, Storage
from rockmate.plan.plan import Plan
from rockmate.runtime.results import Gradients, Results
from rockmate.schedule.move import SlotPlan
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.state.tensors import layout_of


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
class EmittedFunction:
    """A function that was emitted.

    Attributes:
        run: takes the arguments in one list; returns a tuple. A backward empties the list.
        arguments: in order.
        code: the function's source.
        sizes: of a generic capture, the numbers that the code looks up, by their names there.
    """

    run: Callable[[list[Any]], tuple[Any, ...]]
    arguments: tuple[Argument, ...]
    code: str
    sizes: Mapping[str, Size]


@dataclass(frozen=True, slots=True)
class Moved:
    """What moves between memory and another tier.

    Attributes:
        slots: where moved values wait in the other tier; None if nothing moves or is fetched.
        fetched: the weight of each fetch, in the order of `Schedule.fetches`.
        offload: that tier.
    """

    slots: SlotPlan | None = None
    fetched: tuple[Role, ...] = ()
    offload: OffloadRequest | None = None

    @property
    def has_homes(self) -> bool:
        """Whether weights are at home, or what belongs to trained ones."""
        return bool(self.fetched) or (self.offload is not None and self.offload.with_trained)


class PlannedLayouts:
    """The strides that a graph was captured with, on which its views rely.

    Attributes:
        roles: of the tensors whose strides matter.
        inputs: index of an input -> its layout.
        tangents: index of an output -> the layout of its tangent.
    """

    def __init__(self, fakes: Mapping[Role, torch.Tensor]) -> None:
        self.roles = tuple(fakes)
        self.inputs, self.tangents = (
            {
                role.index: _PlannedLayout(fake)
                for role, fake in fakes.items()
                if role.kind is kind and not role.inner  # a signature has the strides of those
            }
            for kind in (RoleKind.INPUT, RoleKind.TANGENT)
        )

    def applied(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs in these strides: those that lie otherwise are copied."""
        return [
            self.inputs[index].apply(given) if index in self.inputs else given
            for index, given in enumerate(inputs)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A planned step as two functions. `[Note: tensors of a planned step]` has the terms.

    Attributes:
        forward: returns the values of `results`, then those of `saved`.
        backward: returns those of `gradients`.
        backward_without: writes the backward for a loss that leaves some outputs out, whose indices
            it takes. It returns None for an undefined gradient.
        results: the forward's first results: outputs and updates.
        gradients: the backward's results, and what the sink accumulates.
        recomputes: whether the backward runs ops of the forward again.
        product_dtypes: of the backward's matrix products, which autocast casts where it is on.
        saved: saved values and states, the forward's further results, in the order in which the
            backward takes them.
        saved_outputs: positions in `saved` of values in the memory of an output.
        collectives: the collectives in the order in which they run, in words, each with the name of
            its process group.
        constants: tensors that belong to the graphs themselves, by name.
        layouts: those that the code relies on.
        runs_below_autograd: whether autograd has nothing to do for any op. Ops of other libraries
            may differentiate inside.
        num_in_flight: number of forwards before a backward that the plan's budget bounds.
        moved: what is in another tier for a time.
    """

    forward: EmittedFunction
    backward: EmittedFunction
    backward_without: Callable[[frozenset[int]], EmittedFunction]
    results: Results
    gradients: Gradients
    recomputes: bool
    product_dtypes: frozenset[torch.dtype]
    saved: tuple[Argument, ...]
    saved_outputs: tuple[int, ...]
    collectives: tuple[tuple[str, str], ...]
    constants: Mapping[str, torch.Tensor]
    layouts: PlannedLayouts
    runs_below_autograd: bool
    num_in_flight: int
    moved: Moved

    @property
    def dispatch(self) -> Callable[[], AbstractContextManager[Any]]:
        """The context in which the ops run."""
        return below_autograd if self.runs_below_autograd else nullcontext

    def of_copy(self, memo: dict[int, Any]) -> Program:
        """The same for a copy of the model, which `copy.deepcopy` has made."""
        own = {name: memo.get(id(each), each) for name, each in self.constants.items()}
        return replace(self, constants=own)

    def refuse_casts(self, dtype: torch.dtype | None) -> None:
        """Raises `BackwardError` if autocast to a dtype would cast products of the backward."""
        if dtype is None or not self.product_dtypes - {dtype, torch.float64}:
            return
        msg = (
            f"the backward runs under torch.autocast, where eager casts matrix products to {dtype}"
            ", and a plan does not. Call backward() behind the autocast context, as PyTorch "
            'advises, or use RockmateModule with mode="frames", which casts them, too.'
        )
        raise BackwardError(msg)

    def tensor_names(self) -> list[str]:
        """Names of the module's tensors that it reads, updates or has gradients of."""
        arguments = (*self.forward.arguments, *self.backward.arguments)
        roles = [each.source for each in arguments if isinstance(each.source, Role)]
        roles += [*self.results.roles, *self.gradients.roles, *self.moved.fetched]
        names = [role.name for role in roles if role.name and role.kind is not RoleKind.CONSTANT]
        return list(dict.fromkeys([*names, *self.gradients.accumulated]))


class _PlannedLayout:
    """That of one tensor."""

    def __init__(self, planned: torch.Tensor) -> None:
        self._shape, self._strides = tuple(planned.shape), tuple(planned.stride())
        self._layout = layout_of(planned)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout."""
        return tensor.stride() == self._strides or layout_of(tensor) == self._layout

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor if it has this layout, else a copy that has."""
        if self.is_of(tensor):
            return tensor
        return torch.empty_strided(
            self._shape, self._strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)


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
