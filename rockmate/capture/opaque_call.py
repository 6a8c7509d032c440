"""One call of an opaque module.

Its inputs and outputs, what a run saves, its time and workspace.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._torch.allocator import net_allocated
from rockmate._torch.autocast import autocast_around
from rockmate._torch.members import tensor_tables
from rockmate._torch.settings import Settings
from rockmate._torch.storage import StorageWeakRef, storage_id, versions_of
from rockmate.capture.attribute_access import AttributeState, Place
from rockmate.capture.attribute_values import traced_in
from rockmate.capture.compiled_model import uncompiled
from rockmate.capture.opaque_graph import Layout, RunGraph, attach_input
from rockmate.capture.opaque_ops import OpaqueOp
from rockmate.capture.structure import Structure, flatten
from rockmate.errors import BackwardError, RockmateError, UnsupportedModelError
from rockmate.state.call_state import CallState
from rockmate.state.random_state import RandomState, random_state_kept
from rockmate.state.tensors import with_attributes_of
from rockmate.state.writes import Writes

_NUM_DRAWS = 8
"""Runs to see what a call that draws random numbers takes at most: it may leave layers out."""


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
        gradients: of each input the layout of its gradient; None if it requires none.
        saved_bytes: what its autograd graph holds beside parameters, buffers and the outputs.
        saved_outputs: positions of the outputs that its autograd graph holds.
        draws: whether it draws random numbers.
        changes_state: whether a run changes an attribute, buffer or parameter of it.
        repeats: whether it may run again: it changes none, or its first run alone, by setting up.
        writes: tensors of its own that a run changes in place.
        settings: of PyTorch, in the call.
    """

    name: str
    module: nn.Module
    arguments: Structure
    result: Structure
    inputs: tuple[Tensor, ...]
    parameter_names: tuple[str, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout | None, ...]
    settings: Settings
    saved_bytes: int = 0
    saved_outputs: tuple[int, ...] = ()
    draws: bool = False
    changes_state: bool = False
    repeats: bool = True
    writes: Writes = field(default_factory=Writes)

    @property
    def num_arguments(self) -> int:
        """How many of the inputs are no parameters."""
        return len(self.inputs) - len(self.parameter_names)

    @property
    def num_draws(self) -> int:
        """Runs by which its memory is measured: that of the largest counts."""
        return _NUM_DRAWS if self.draws else 1

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Of the inputs, which require a gradient."""
        return tuple(layout is not None for layout in self.gradients)

    def traced(self, tensors: Sequence[Tensor]) -> Any:
        """The result in a trace, of the tensors of the arguments and the parameters."""

        def made(_: Sequence[Tensor]) -> list[Tensor]:
            outputs = [layout.empty() for layout in self.outputs]
            handle = torch.empty(self.saved_bytes, dtype=torch.uint8, device=outputs[0].device)
            return [*outputs, handle]

        op = OpaqueOp(
            forward=OpaqueForward(self),
            results=made,
            backward=OpaqueBackward(self),
            saved=lambda _, results: [results[-1], *(results[at] for at in self.saved_outputs)],
            gradients=lambda _: [each.empty() for each in self.gradients if each is not None],
            differentiable=self.differentiable,
        )
        return self.result.rebuild(op.traced(tensors)[:-1])

    @contextlib.contextmanager
    def _refused(self, what: str) -> Iterator[None]:
        """An error within is one of a part that does not run by itself."""
        try:
            yield
        except (RockmateError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = f"{error}".partition("\n")[0].rstrip(".")
            msg = f"the {what} of {self.name} does not run apart from the model's: {text}."
            raise UnsupportedModelError(msg) from error

    def observe(self) -> None:
        """Runs the submodule on the sample's inputs to see what it saves, draws and changes.

        Leaves everything as it was.
        """
        attributes, before = AttributeState(self.module), self.state()
        devices = [self.outputs[0].device]
        kept = partial(random_state_kept, devices, of_pytorch_alone=True)
        with kept() as random, before.undone() as self.writes:
            with self._refused("forward"):
                outputs, graph = self.run(self.copied_inputs())
            self._refuse_foreign(graph)
            with self._refused("backward"):
                self._take_layouts(graph.found(list(map(torch.ones_like, outputs))))
            now = RandomState(devices, of_pytorch_alone=True)
            self.draws = bool(random.differences(now))
            self._refuse_assigned_gradients(attributes.changes())
            has_changed = before.objects.has_changed()
            with self._refused("forward"):
                is_changed = has_changed or self.writes.changed
                self.repeats = not is_changed or self._repeats(outputs)
        self.changes_state = has_changed or bool(self.writes.changed)
        self.repeats |= not self.changes_state
        with kept():
            found = [self._measured_saved() for _ in range(self.num_draws)]
        self.saved_bytes = max(num_bytes for num_bytes, _ in found)
        self.saved_outputs = tuple(sorted({at for _, held in found for at in held}))

    def _repeats(self, outputs: Sequence[Tensor]) -> bool:
        """Whether a run on what the run before it has left is alike: that one has set it up."""
        left = self.state()
        with left.undone() as writes:
            again, _ = self.run(self.copied_inputs())
            has_changed = left.objects.has_changed()
        is_alike = all(map(torch.equal, outputs, again))
        return is_alike and not (self.draws or has_changed or writes.changed)

    def measured(
        self, run: Callable[..., list[Tensor]], begin: CallState | None = None
    ) -> Callable[..., list[Tensor]]:
        """A half of it that leaves all as it was: it runs often to be measured.

        Args:
            run: the half.
            begin: the state that it begins in; None for the present one.
        """

        def without_effects(*given: Any) -> list[Tensor]:
            with self.state().undone(self.writes):
                if begin is not None:
                    begin.objects.restore()
                return run(*given)

        return without_effects if self.changes_state else run

    def state(self) -> CallState:
        """All that a run can change: of the submodule, and objects among its arguments."""
        arguments = self.arguments.rebuild(list(self.inputs[: self.num_arguments]))
        return CallState(self.module, *arguments)

    def _take_layouts(self, found: Sequence[Tensor | None]) -> None:
        """Takes how gradients of arguments lie: kernels that read them round by their strides."""
        given = iter(found)
        of_inputs = [None if layout is None else next(given) for layout in self.gradients]
        self.gradients = tuple(
            layout if gradient is None or at >= self.num_arguments else Layout.of(gradient)
            for at, (gradient, layout) in enumerate(zip(of_inputs, self.gradients, strict=True))
        )

    def _refuse_assigned_gradients(self, changes: Sequence[tuple[Place, Any]]) -> None:
        """Raises if a run assigns a tensor with a gradient, which would end in the submodule."""
        for place, value in changes:
            if any(isinstance(found, Tensor) and found.grad_fn for found in traced_in(value)):
                raise UnsupportedModelError(
                    f"the untraced submodule {self.name} assigns a tensor that requires a gradient "
                    f"to {place}, and that gradient would not reach its parameters. Assign "
                    "`tensor.detach()`, or return the tensor."
                )

    def _measured_saved(self) -> tuple[int, Sequence[int]]:
        """How many bytes the autograd graph holds beside the outputs, and which of these.

        Ops are not observed: a run whose ops are may save other tensors.
        """
        run, device = self.measured(OpaqueForward(self)), self.outputs[0].device
        left_bytes, results = net_allocated(lambda: run(self.copied_inputs()), device)
        handle = results.pop()  # holds the graph
        outputs = [value.untyped_storage() for value in results]
        saved_bytes = max(1, left_bytes - sum(memory.nbytes() for memory in outputs))
        held = [StorageWeakRef(memory) for memory in outputs]
        del results, outputs
        saved_outputs = [at for at, each in enumerate(held) if not each.expired()]
        del handle
        return saved_bytes, saved_outputs

    def copied_inputs(self) -> list[Tensor]:
        """The sample's inputs: the parameters themselves, and copies of the others.

        Copies share memory where the originals do.
        """
        arguments = copy.deepcopy(self.inputs[: self.num_arguments])
        return [*arguments, *self.inputs[self.num_arguments :]]

    def run(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], RunGraph]:
        """The outputs for inputs, outside of their autograd graph, and this graph."""
        arguments, needs = inputs[: self.num_arguments], self.differentiable
        pairs = [
            attach_input(tensor) if needed else (tensor.detach(), tensor.detach())
            for tensor, needed in zip(arguments, needs[: self.num_arguments], strict=True)
        ]
        parameters = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(
                inputs[self.num_arguments :], needs[self.num_arguments :], strict=True
            )
        ]
        args, kwargs = self.arguments.rebuild([value for _, value in pairs])
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.settings.applied())
            before = versions_of(arguments)
            with uncompiled(self.module), self._replaced(parameters):
                result = self.module.forward(*args, **kwargs)  # its hooks are traced around it
            if versions_of(arguments) != before:
                raise input_change_error(self.name)
        outputs, structure = flatten(result, what=f"the result of {self.name}")
        self._check(outputs, structure)
        graph = RunGraph([*(leaf for leaf, _ in pairs), *parameters], outputs)
        return self._values(inputs, outputs), graph

    @contextlib.contextmanager
    def _replaced(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Puts others in each place of the parameters; a tied one has several."""
        own = map(self.module.get_parameter, self.parameter_names)
        pairs = zip(own, parameters, strict=True)
        replaced = {id(each): with_attributes_of(each, other) for each, other in pairs}
        places = [
            (table, name, each)
            for table in (tensor_tables(part)[0] for part in self.module.modules())
            for name, each in table.items()
            if id(each) in replaced
        ]
        try:
            for table, name, each in places:
                table[name] = replaced[id(each)]
            yield
        finally:
            for table, name, each in places:
                table[name] = each

    def _values(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs as the plan has them: in memory of their own, laid out as on the sample."""
        given = {*map(storage_id, inputs)}
        values = []
        for tensor, layout in zip(outputs, self.outputs, strict=True):
            is_shared = storage_id(tensor) in given
            values.append(
                layout.laid_out(tensor.detach().clone() if is_shared else tensor.detach())
            )
            given.add(storage_id(tensor))
        return values

    def _refuse_foreign(self, graph: RunGraph) -> None:
        """Raises if the outputs depend on a foreign tensor that needs a gradient.

        Foreign is what is neither an input nor a parameter of the submodule.
        """
        known = {id(leaf) for leaf in graph.leaves}
        pending, seen = [end.node for end in graph.ends if end is not None], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)  # of a node that accumulates into a leaf
            if variable is not None and id(variable) not in known:
                raise UnsupportedModelError(
                    f"the untraced submodule {self.name} uses a tensor of shape "
                    f"{tuple(variable.shape)} that needs a gradient and is "
                    "neither its input nor its parameter. Pass it in, or leave a larger part of "
                    "the model untraced."
                )
            pending += [parent for parent, _ in node.next_functions if parent is not None]

    def _check(self, outputs: Sequence[Tensor], structure: Structure) -> None:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        planned = [(layout.shape, layout.dtype) for layout in self.outputs]
        if len(found) == len(planned) and structure != self.result:
            kinds = ["tensor"] * len(found)
            raise UnsupportedModelError(
                f"the untraced submodule {self.name} returned {structure.rebuild(kinds)}, and "
                f"{self.result.rebuild(kinds)} for the sample. "
                "What it returns beside tensors is fixed when the step is planned: return it as a "
                "tensor, or leave a larger part of the "
                "model untraced."
            )
        if found != planned:
            raise UnsupportedModelError(
                f"the untraced submodule {self.name} returned {found}, and {planned} for the "
                "sample. What it returns must have the same "
                "shapes in every step: pad it, or leave a larger part of the model untraced."
            )


class _OpaqueOp:
    """A half of the call of an untraced submodule."""

    __name__: str

    def __init__(self, call: OpaqueCall) -> None:
        self.call, self.__qualname__ = call, self.__name__
        self.num_draws = call.num_draws

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}[{self.call.name}]"


class OpaqueForward(_OpaqueOp):
    """The forward of an untraced submodule as an op: `(tensors) -> [*outputs, handle]`."""

    __name__ = "untraced_forward"

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.call.draws

    @property
    def runs_once(self) -> bool:
        """Whether it must not be recomputed."""
        return not self.call.repeats

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the submodule."""
        outputs, graph = self.call.run(tensors)
        handle = torch.empty(1, dtype=torch.uint8)
        handle.graph = graph  # pyright: ignore[reportAttributeAccessIssue]
        return [*outputs, handle]

    def on_sample(self, _: Callable[[int], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the sample's inputs instead of made-up ones."""
        return self.call.measured(self), (self.call.copied_inputs(),)


class OpaqueBackward(_OpaqueOp):
    """The backward of an untraced submodule.

    `(gradients of the outputs, [handle, *values]) -> gradients of the inputs that need one`.

    The values are the outputs that the handle's graph holds. They are arguments to be live.

    The gradient of an output that the loss does not depend on is None; the handle has none.
    """

    __name__ = "untraced_backward"

    @property
    def released_bytes(self) -> int:
        """What the handle stands for, which a run releases on its way."""
        return self.call.saved_bytes - 1

    def __call__(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> list[Tensor]:
        """Differentiates the run that made the handle, and frees what it saved."""
        handle = saved[0]
        graph: RunGraph | None = getattr(handle, "graph", None)
        if graph is None:
            raise BackwardError(
                f"retain_graph=True is not possible with the untraced submodule {self.call.name}, "
                'which runs its backward once. Keep the budget without a plan: mode="frames".'
            )
        del handle.graph  # pyright: ignore[reportAttributeAccessIssue]
        with autocast_around():
            return graph.differentiate(gradients[:-1], self.call.gradients)

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments.

        Gradients as `made_up` makes that argument, and a run that is made for this.

        Which gradients there are and how they are laid out matters: a kernel copies what it cannot
        read as it is.
        """
        with self.call.state().undone(self.call.writes):
            *outputs, handle = OpaqueForward(self.call)(self.call.copied_inputs())
            between = self.call.state()
        saved = [outputs[at] for at in self.call.saved_outputs]
        return self.call.measured(self, between), (made_up(0), [handle, *saved])


def input_change_error(name: str) -> UnsupportedModelError:
    """The error for a submodule that changes an input in place."""
    return UnsupportedModelError(
        f"the untraced submodule {name} changes an input in place, which the rest of the step "
        "would not see. Change a copy in its forward "
        "(x = x.clone()), or leave a larger part of the model untraced."
    )
