"""One call of an opaque module.

Its inputs and outputs, what a run saves, its time and workspace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rockmate._torch.allocator import net_allocated
from rockmate._torch.members import tensor_tables
from rockmate._torch.storage import storage_id, version_of
from rockmate.capture.attribute_access import AttributeState, Place
from rockmate.capture.attribute_values import traced_in
from rockmate.capture.compiled_model import uncompiled
from rockmate.capture.opaque_graph import (
    HeldMemory,
    Layout,
    RunGraph,
    SavedRun,
    SavedStorages,
    storage_keys,
)
from rockmate.capture.opaque_inputs import ReleasableInputs, attach_input
from rockmate.capture.structure import Structure, flatten
from rockmate.errors import BackwardError, UnsupportedModelError
from rockmate.state.call_state import undone
from rockmate.state.random_state import RandomState, random_state_kept
from rockmate.state.writes import Writes

# Bytes for each tensor that is saved: to look at one takes some microseconds.
_LEAST_BORROWED = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class OpaqueCall:
    """One call of a submodule in the model's forward, as it was on the sample.

    Attributes:
        name: path of the submodule, with the number of the call where it is called more than once.
        module: the submodule.
        arguments: rebuilds its positional and keyword arguments from their tensors.
        result: rebuilds its result from its tensors.
        inputs: the tensors of the arguments, then the parameters.
        parameter_names: of those parameters.
        outputs: layouts of the tensors of the result.
        gradients: layouts of the gradients of those inputs that require one.
        differentiable: of the inputs, which require a gradient.
        saved_bytes: what its autograd graph holds beside parameters, buffers, the outputs and what
            it borrows.
        borrowed: positions of the inputs that its autograd graph borrows.
        saved_outputs: positions of the outputs that its autograd graph holds.
        draws: whether it draws random numbers.
        changes_buffers: whether a run changes one of its buffers, so that it must not run again.
        changes_attributes: whether a run changes one of its attributes; the same holds.
        writes: tensors in its attributes that a run changes in place.
        autocast: dtype for each kind of device on which autocast is on in the call.
    """

    name: str
    module: nn.Module
    arguments: Structure
    result: Structure
    inputs: tuple[Tensor, ...]
    parameter_names: tuple[str, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    differentiable: tuple[bool, ...]
    autocast: Mapping[str, torch.dtype]
    saved_bytes: int = 0
    borrowed: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    draws: bool = False
    changes_buffers: bool = False
    changes_attributes: bool = False
    writes: Writes = field(default_factory=Writes)

    @property
    def num_arguments(self) -> int:
        """How many of the inputs are no parameters."""
        return len(self.inputs) - len(self.parameter_names)

    def observe(self) -> None:
        """Runs the submodule on the sample's inputs to see what it saves, draws and changes.

        Leaves everything as it was.
        """
        buffers = self.copied_buffers()
        before = {name: version_of(buffer) for name, buffer in buffers.items()}
        attributes = AttributeState(self.module)
        with self.random_state_kept() as random, undone(self.module) as self.writes:
            self.run(self.copied_inputs(), buffers=buffers)
            now = RandomState([self.outputs[0].device], of_pytorch_alone=True)
            self.draws = bool(random.differences(now))
            changes = attributes.changes()
        self._refuse_assigned_gradients(changes)
        # A run whose ops are observed may save other tensors.
        with self.random_state_kept(), undone(self.module, self.writes):
            self._observe_saved(self.copied_buffers())
        self.changes_attributes = bool(changes or self.writes.changed)
        self.changes_buffers = any(
            version_of(buffer) != before[name] for name, buffer in buffers.items()
        )
        with self.random_state_kept():
            # Memory of another allocator, such as NumPy's, is seen to be saved and not measured.
            measured_bytes = self._measured_bytes(self.copied_buffers())
            self.saved_bytes = max(self.saved_bytes, measured_bytes)

    def _refuse_assigned_gradients(self, changes: Sequence[tuple[Place, Any]]) -> None:
        """Raises if a run assigns a tensor with a gradient, which would end in the submodule."""
        for place, value in changes:
            if any(isinstance(found, Tensor) and found.grad_fn for found in traced_in(value)):
                msg = (
                    f"the untraced submodule {self.name} assigns a tensor that requires a gradient "
                    f"to {place}, and that gradient would not reach its parameters. Assign "
                    "`tensor.detach()`, or return the tensor."
                )
                raise UnsupportedModelError(msg)

    def _observe_saved(self, buffers: Mapping[str, Tensor]) -> None:
        """Finds which inputs the graph can borrow, and which outputs it holds."""
        inputs = self.copied_inputs()
        arguments = HeldMemory(inputs[: self.num_arguments])
        saved = SavedStorages()
        run = self.run(inputs, buffers=buffers, borrowed=range(self.num_arguments), note=saved.note)
        self._refuse_foreign(run)
        values = run.values(inputs, self.outputs)
        others = {*storage_keys(inputs), *storage_keys(values), *storage_keys(run.outputs)}
        self.saved_bytes = 1 + sum(saved.num_bytes[key] for key in saved.keys - others)
        self.saved_outputs = tuple(
            index
            for index, (value, output) in enumerate(
                zip(storage_keys(values), storage_keys(run.outputs), strict=True)
            )
            if value == output and value in saved.keys
        )
        graph = RunGraph.of(run)  # held, so that no two storages have one address
        del run, values, inputs
        shared = (
            saved.keys & arguments.num_bytes.keys()
        ) - arguments.held()  # by what no hook sees
        if sum(arguments.num_bytes[key] for key in shared) >= _LEAST_BORROWED * saved.count:
            self.borrowed = tuple(
                index for index, key in enumerate(arguments.keys) if key in shared
            )
        del graph

    def _measured_bytes(self, buffers: Mapping[str, Tensor]) -> int:
        """What a run leaves allocated beside its outputs, and the byte of the handle itself."""
        run, device = OpaqueForward(self).without_effects, self.outputs[0].device
        left_bytes, values = net_allocated(lambda: run(self.copied_inputs(), buffers), device)
        return left_bytes - sum(value.untyped_storage().nbytes() for value in values[:-1])

    def random_state_kept(self) -> contextlib.AbstractContextManager[RandomState]:
        """Puts PyTorch's random state back; yields how it was."""
        return random_state_kept([self.outputs[0].device], of_pytorch_alone=True)

    def copied_inputs(self) -> list[Tensor]:
        """The sample's inputs: the parameters themselves, and copies of the others.

        Copies share memory where the originals do.
        """
        copies: dict[int, torch.UntypedStorage] = {}
        copied = []
        for tensor in self.inputs[: self.num_arguments]:
            memory = tensor.untyped_storage()
            if storage_id(memory) not in copies:
                copies[storage_id(memory)] = memory.clone()
            copied.append(
                tensor.new_empty(0).set_(
                    copies[storage_id(memory)],
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
            )
        return [*copied, *self.inputs[self.num_arguments :]]

    def copied_buffers(self) -> dict[str, Tensor]:
        """Copies of the submodule's buffers, by name."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def run(
        self,
        inputs: Sequence[Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        borrowed: Sequence[int] | None = None,
        note: Callable[[Tensor], None] | None = None,
    ) -> SavedRun:
        """The outputs for `inputs`, with their autograd graph.

        Args:
            inputs: in the order of `OpaqueCall.inputs`.
            buffers: in place of the submodule's own.
            borrowed: positions of the inputs that the graph borrows, if not those of
                `OpaqueCall.borrowed`.
            note: called with each tensor that the graph saves.
        """
        loan = ReleasableInputs(inputs, self.borrowed if borrowed is None else borrowed, note=note)
        pairs = [
            attach_input(tensor) if needs else (tensor.detach(), tensor.detach())
            for tensor, needs in zip(
                inputs[: self.num_arguments], self.differentiable[: self.num_arguments], strict=True
            )
        ]
        parameters = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(
                inputs[self.num_arguments :], self.differentiable[self.num_arguments :], strict=True
            )
        ]
        args, kwargs = self.arguments.rebuild([value for _, value in pairs])
        state = {**dict(zip(self.parameter_names, parameters, strict=True)), **(buffers or {})}
        state = {f"module.{name}": tensor for name, tensor in by_place(self.module, state).items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(loan.saving())
            before = versions_of(inputs[: self.num_arguments])
            with uncompiled(self.module):
                result = functional_call(
                    _Hookless(self.module), state, args, kwargs, tie_weights=False
                )
            if versions_of(inputs[: self.num_arguments]) != before:
                raise input_change_error(self.name)
        outputs, structure = flatten(result, what=f"the result of {self.name}")
        self._check(outputs, structure)
        return SavedRun([*(leaf for leaf, _ in pairs), *parameters], outputs, loan)

    def _refuse_foreign(self, run: SavedRun) -> None:
        """Raises if the outputs depend on a foreign tensor that needs a gradient.

        Foreign is what is neither an input nor a parameter of the submodule.
        """
        known = {id(leaf) for leaf in run.leaves}
        pending, seen = (
            [output.grad_fn for output in run.outputs if output.grad_fn is not None],
            set(),
        )
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)  # of a node that accumulates into a leaf
            if variable is not None and id(variable) not in known:
                msg = (
                    f"the untraced submodule {self.name} uses a tensor of shape "
                    f"{tuple(variable.shape)} that needs a gradient and is "
                    "neither its input nor its parameter. Pass it in, or leave a larger part of "
                    "the model untraced."
                )
                raise UnsupportedModelError(msg)
            pending += [parent for parent, _ in node.next_functions if parent is not None]

    def _check(self, outputs: Sequence[Tensor], structure: Structure) -> None:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        planned = [(layout.shape, layout.dtype) for layout in self.outputs]
        if len(found) == len(planned) and structure != self.result:
            kinds = ["tensor"] * len(found)
            msg = (
                f"the untraced submodule {self.name} returned {structure.rebuild(kinds)}, and "
                f"{self.result.rebuild(kinds)} for the sample. "
                "What it returns beside tensors is fixed when the step is planned: return it as a "
                "tensor, or leave a larger part of the "
                "model untraced."
            )
            raise UnsupportedModelError(msg)
        if found != planned:
            msg = (
                f"the untraced submodule {self.name} returned {found}, and {planned} for the "
                "sample. What it returns must have the same "
                "shapes in every step: pad it, or leave a larger part of the model untraced."
            )
            raise UnsupportedModelError(msg)


class _Hookless(nn.Module):
    """A submodule without its own hooks, which are part of what is traced around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


class OpaqueForward:
    """The forward of an untraced submodule as an op: `(tensors) -> [*outputs, handle]`."""

    def __init__(self, call: OpaqueCall) -> None:
        """Of this call."""
        self.call = call
        self.__name__ = self.__qualname__ = "untraced_forward"

    def __str__(self) -> str:
        return f"rockmate.untraced_forward[{self.call.name}]"

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.call.draws

    @property
    def runs_once(self) -> bool:
        """Whether it must not be recomputed."""
        return self.call.changes_buffers or self.call.changes_attributes

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the submodule."""
        return self.with_buffers(tensors, None)

    def with_buffers(
        self, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor] | None
    ) -> list[Tensor]:
        """Runs the submodule with these buffers in place of its own, if any are given."""
        run = self.call.run(tensors, buffers=buffers)
        handle = torch.empty(1, dtype=torch.uint8)
        handle.graph = RunGraph.of(run)  # pyright: ignore[reportAttributeAccessIssue]
        return [*run.values(tensors, self.call.outputs), handle]

    def on_sample(self, _: Callable[[int], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments.

        The same on the sample's inputs instead of made-up ones, with copies of the buffers.
        """
        run = self.without_effects if self.call.changes_attributes else self.with_buffers
        return run, (self.call.copied_inputs(), self.call.copied_buffers())

    def without_effects(
        self, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Runs the submodule with these buffers and leaves its attributes as they were."""
        with undone(self.call.module, self.call.writes):
            return self.with_buffers(tensors, buffers)


class OpaqueBackward:
    """The backward of an untraced submodule.

    `(gradients of the outputs, handle, values) -> gradients of the inputs that need one`.

    The values are the inputs that the handle's graph borrows, then the outputs that it holds.

    The gradient of an output that the loss does not depend on is None.
    """

    def __init__(self, call: OpaqueCall) -> None:
        """Of this call."""
        self.call = call
        self.__name__ = self.__qualname__ = "untraced_backward"

    def __str__(self) -> str:
        return f"rockmate.untraced_backward[{self.call.name}]"

    @property
    def released_bytes(self) -> int:
        """What the handle stands for, which a run releases on its way."""
        return self.call.saved_bytes - 1

    def __call__(
        self, gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Differentiates the run that made the handle, and frees what it saved."""
        graph: RunGraph | None = getattr(handle, "graph", None)
        if graph is None:
            msg = (
                f"retain_graph=True is not possible with the untraced submodule {self.call.name}, "
                "which runs its backward once."
            )
            raise BackwardError(msg)
        del handle.graph  # pyright: ignore[reportAttributeAccessIssue]
        return graph.differentiate(
            gradients, values[: len(self.call.borrowed)], self.call.gradients
        )

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments.

        Gradients as `made_up` makes that argument, and a run that is made for this.

        Which gradients there are and how they are laid out matters: a kernel copies what it cannot
        read as it is.
        """
        forward, (inputs, buffers) = OpaqueForward(self.call).on_sample(made_up)
        *outputs, handle = forward(inputs, buffers)
        values = [
            *(inputs[index] for index in self.call.borrowed),
            *(outputs[index] for index in self.call.saved_outputs),
        ]
        return self, (made_up(0), handle, values)


def by_place(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replacements of parameters and buffers, once for each place that holds one.

    A tied tensor has several places. A module with two names has one: PyTorch, left to find them,
    swaps it twice and puts back the wrong one.
    """
    present = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    replacement = {id(present[name]): tensor for name, tensor in state.items()}
    places = {
        f"{path}.{name}" if path else name: tensor
        for path, part in module.named_modules()
        for name, tensor in (item for table in tensor_tables(part) for item in table.items())
    }
    return {
        place: replacement[id(tensor)]
        for place, tensor in places.items()
        if id(tensor) in replacement
    }


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor has been changed in place."""
    return [version_of(tensor) for tensor in tensors]


def input_change_error(name: str) -> UnsupportedModelError:
    """The error for a submodule that changes an input in place."""
    msg = (
        f"the untraced submodule {name} changes an input in place, which the rest of the step "
        "would not see. Change a copy in its forward "
        "(x = x.clone()), or leave a larger part of the model untraced."
    )
    return UnsupportedModelError(msg)
