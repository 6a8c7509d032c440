"""The model's forward as a function from tensors to tensors, as the tracer calls it.

It leaves the model's attributes as they were, and tells what it did to them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import named_members, parametrizations_afresh
from rockmate._torch.storage import storage_id
from rockmate.capture.attribute_access import (
    Accesses,
    AttributeState,
    Place,
    accesses_recorded,
    outside_in_trace,
)
from rockmate.capture.attribute_values import copied, snapshot, traced_in
from rockmate.capture.read_values import NO_VALUES, SampleValues, ValueReader
from rockmate.capture.signature import refuse_attributes
from rockmate.capture.structure import Structure, flatten, flatten_further, loss_of
from rockmate.capture.tensor_parts import HeldTensors
from rockmate.capture.trace_state import (
    attributes_of_members,
    members_of_tensors_left,
    no_random_state_set,
)
from rockmate.capture.write_log import Write, WriteLog, can_watch
from rockmate.errors import InvalidSampleError, NothingToTrainError, UnsupportedModelError
from rockmate.ops.gathering import gathered_by_ops
from rockmate.state.objects import ABSENT, NO_OBJECTS, Objects

# Whether a model that puts another submodule in place of one runs once before it is captured.
RUNS_FIRST = ContextVar("RUNS_FIRST", default=True)


@contextmanager
def first_call_awaited() -> Iterator[None]:
    """Has a capture end in `ModuleReplacedError` where the model's first call sets it up."""
    token = RUNS_FIRST.set(False)
    try:
        yield
    finally:
        RUNS_FIRST.reset(token)


class ModuleReplacedError(UnsupportedModelError):
    """The forward has put another submodule in place of one, as a first call may."""

    def __init__(self, path: str) -> None:
        """The error for a submodule that is replaced in every call.

        Args:
            path: of the submodule.
        """
        super().__init__(
            f"the model's forward puts another submodule at {path} in each call, which a plan "
            "cannot repeat. Make the submodules in __init__, and choose among them in the forward."
        )


@dataclass(slots=True)
class LeftBehind:
    """Attributes that one run of the forward has changed.

    Attributes:
        accesses: what it has read and assigned.
        assigned: what it has assigned without reading it first, with the values.
        carried: what it has read and then changed, with the values: the next run reads those.
    """

    accesses: Accesses = field(default_factory=Accesses)
    assigned: list[tuple[Place, Any]] = field(default_factory=list)
    carried: list[tuple[Place, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, accesses: Accesses, before: AttributeState) -> LeftBehind:
        """What has changed since `before`.

        Args:
            accesses: what was read and assigned.
            before: the state.
        """
        assigned = {place.key: (place, value) for place, value in before.changes()}
        for place in accesses.assigned.values():
            value = getattr(place.owner, "__dict__", {}).get(place.name, ABSENT)
            if value is not ABSENT:  # an equal value may be another one in a call of other sizes
                assigned[place.key] = place, value
        accesses.add_listed({key for key, (_, value) in assigned.items() if traced_in(value)})
        carried = [assigned.pop(key) for key in accesses.reads if key in assigned]
        return cls(
            accesses, list(assigned.values()), [(place, copied(value)) for place, value in carried]
        )


class TracedForward(nn.Module):
    """The model as a function from tensors to a flat tuple of tensors.

    The tracer's descriptors number the tensors of these two tuples. The result has the tensors of
    the model's output, then those that it assigns to attributes, then those that it carries over.

    Attributes:
        structure: rebuilds the arguments of the model.
        keeps_checkpoints: as for `capture_joint`, as is `reads_masks`.
        output_structure: rebuilds the model's output.
        assigned: attributes that the forward assigns without reading them first.
        assigned_structure: rebuilds their values, then those that it carries over.
        fixed: attributes that it assigns objects without tensors to, and those objects.
        left: what the forward did to attributes.
        differentiable_outputs: indices of the outputs with a gradient.
        non_differentiable_outputs: indices of those with a gradient in eager and none in the graph.
        carried_outputs: for the index of a carried tensor its attribute.
        reader: reads values of tensors.
        has_escaped: whether a number is held where no plan brings it.
        read_values: those that it has read.
        held: tensors in attributes of the model's tensors, which are inputs of the trace.
        logs: places of containers that it only writes to.
        log: what it does with those.
        outside: places outside of the model that it may read.
        changed_outside: those of containers with other contents behind the run.
        objects_behind: those outside of the model's modules, behind the run.
        notice: what the user should know of the outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        differentiable: str,
        outputs: str,
        keeps_checkpoints: bool = False,
        reads_masks: bool = False,
        sample: SampleValues | None = None,
        defers: bool = False,
        outside: Sequence[Place] = (),
        objects: Objects = NO_OBJECTS,
        logs: Sequence[Place] = (),
    ) -> None:
        """Takes the model and how it is called.

        With a `sample`, reads of values that follow from its values are answered, or deferred.
        Containers at the places of `logs` are only written to. What stands `outside` is looked at,
        and `objects` outside of the model's modules are looked at behind a run.
        """
        super().__init__()
        self.model = model
        self.structure = structure
        self._differentiable = differentiable
        self._outputs = outputs
        self.keeps_checkpoints, self.reads_masks = keeps_checkpoints, reads_masks
        self.output_structure: Structure | None = None
        self.assigned_structure: Structure | None = None
        self.assigned: list[Place] = []
        self.fixed: list[tuple[Place, Any]] = []
        self.left = LeftBehind()
        self.differentiable_outputs: tuple[int, ...] = ()
        self.non_differentiable_outputs: tuple[int, ...] = ()
        self.carried_outputs: dict[int, Place] = {}
        self.read_values = NO_VALUES
        self._sample, self._defers, self.logs = sample, defers, logs
        self.outside = outside
        self.log, self.writes = WriteLog(), list[Write]()
        self.changed_outside: list[Place] = []
        self._objects = self.objects_behind = objects
        self.reader, self.has_escaped = ValueReader(defers=defers), False
        self.notice = ""
        self._members, self.held = named_members(model), HeldTensors(model)
        for name, tensor in self.held.tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the model once."""
        num_inputs = len(tensors) - (self._sample.num_carriers if self._sample else 0)
        tensors, carriers = tensors[:num_inputs], tensors[num_inputs:]
        args, kwargs = self.structure.rebuild(list(tensors))
        self.held.put(dict(self.named_buffers(recurse=False)))
        members = named_members(self.model)
        before = AttributeState(self.model)
        for place in self.logs:
            if not isinstance(place.owner, types.ModuleType):
                before.save(place.owner)  # as it is without what stands in its place
        watched = [place for place in self.outside if can_watch(place.value())]
        outside = [snapshot(place.value()) for place in watched]
        self.reader = ValueReader(defers=self._defers, carriers=carriers)
        self.log = WriteLog()
        try:
            with (
                self._reads_answered(tensors),
                accesses_recorded(self.model, before) as accesses,
                attributes_of_members(self.model, self._members, accesses),
                no_random_state_set(),
                members_of_tensors_left(),
                parametrizations_afresh(),
                self.log.noting(self.logs),
                gathered_by_ops(self.model),
            ):
                output = self.model(*args, **kwargs)
            pairs = zip(watched, outside, strict=True)
            self.changed_outside = [each for each, one in pairs if snapshot(each.value()) != one]
            if before.replaced_module():
                raise ModuleReplacedError(before.replaced_module())
            replaced = _replaced(self.model, members)
            self.left = LeftBehind.of(accesses, before)
            self.left.assigned += replaced
            flat = self._output_tensors(output, has_labels=kwargs.get("labels") is not None)
            if not any(tensor.requires_grad for tensor in flat):
                msg = (
                    "no output of the model requires a gradient, so there is nothing to train. "
                    "Unfreeze a parameter, pass labels, or call the plain model."
                )
                raise NothingToTrainError(msg)
            self._add_attributes(flat, {id(tensor) for tensor in tensors})
            self.has_escaped = self.reader.has_escaped(also_delivered=False)
        finally:
            before.restore()
        self.objects_behind = self._objects.again(outside_in_trace)
        self.differentiable_outputs = tuple(
            index for index, tensor in enumerate(flat) if tensor.requires_grad
        )
        return tuple(_unshared(flat))

    @contextmanager
    def _reads_answered(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Answers reads of values that follow from the sample, if there is one."""
        if self._sample is None:
            yield
            return
        reader = self.reader
        reader.know_inputs(tensors, self._sample.inputs)
        reader.know_buffers(dict(self.model.named_buffers()), self._sample.buffers)
        with reader.answering():
            yield
        self.read_values = reader.read_values(self._sample.inputs)

    def _output_tensors(self, output: Any, *, has_labels: bool) -> list[torch.Tensor]:
        """The tensors of the model's output, detached where they get no gradient."""
        flat, structure = flatten(output, what="the model's output")
        refuse_attributes(flat, of="output")
        loss_tensor = loss_of(output, has_labels=has_labels)
        loss = next((index for index, tensor in enumerate(flat) if tensor is loss_tensor), None)
        if self._outputs == "loss":
            if loss is None:
                msg = (
                    'outputs="loss" needs an output with a scalar `loss` that requires grad. Leave '
                    '`outputs` at "all".'
                )
                raise InvalidSampleError(msg)
            structure, flat, loss = structure.without_tensors({loss}), [flat[loss]], 0
        if self._differentiable == "loss" and loss is not None:
            self.non_differentiable_outputs = tuple(
                index for index, tensor in enumerate(flat) if index != loss and tensor.requires_grad
            )
            scalars = sum(flat[index].numel() == 1 for index in self.non_differentiable_outputs)
            self.notice = (
                f"{scalars} scalar outputs beside the loss have no gradient in planned steps"
                if scalars
                else ""
            )
            flat = [
                tensor if index == loss else tensor.detach() for index, tensor in enumerate(flat)
            ]
        self.output_structure = structure
        return flat

    def _add_attributes(self, flat: list[torch.Tensor], inputs: set[int]) -> None:
        """Adds the tensors in attributes to those of the output.

        Args:
            flat: the tensors of the output.
            inputs: addresses of the tensors of the call, of which a copy is returned.
        """
        num_outputs = len(flat)
        values, self.fixed = [], []
        for place, value in self.left.assigned:
            try:
                flatten(value, what="it")
            except UnsupportedModelError:
                if traced_in(value):
                    raise _attribute_error(place, value) from None
                self.fixed.append((place, value))
            else:
                values.append((place, value))
        self.assigned = [place for place, _ in values]
        tables = [pair for pair in self.left.carried if traced_in(pair[1])]
        for place, value in tables:
            if not all(isinstance(each, torch.Tensor) for each in traced_in(value)):
                raise _attribute_error(place, value)
        written = [args for _, args in self.log.writes]
        self.writes = [write for write, _ in self.log.writes]
        self.assigned_structure = flatten_further(
            (*(value for _, value in (*values, *tables)), *written), flat, what="an attribute"
        )
        self.log.writes.clear()
        self.left.assigned.clear()
        places = {id(tensor): index for index, tensor in enumerate(flat)}
        self.carried_outputs = {
            places[id(tensor)]: place for place, value in tables for tensor in traced_in(value)
        }
        for index in range(num_outputs, len(flat)):
            if flat[index].requires_grad and id(flat[index]) in inputs:
                flat[index] = flat[index].clone()
        for index in self.carried_outputs:
            flat[index] = flat[index].detach()


def _attribute_error(place: Place, value: Any) -> UnsupportedModelError:
    msg = (
        f"the model's forward assigns a {type(value).__name__} to {place}, and a plan can assign "
        "tensors, constants, and containers or dataclasses of them. Assign one of these."
    )
    return UnsupportedModelError(msg)


def _replaced(
    model: nn.Module, before: dict[str, torch.Tensor]
) -> list[tuple[Place, torch.Tensor]]:
    """The buffers that a forward has assigned another tensor to, which are outputs of the step.

    A parametrization that is taken off puts its parameter's stand-in in a trace among the buffers.
    """
    found, after = [], named_members(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in sorted(before.keys() | buffers.keys()):
        if name not in after:
            msg = (
                f"the model's forward removes its {name}, which a captured graph cannot repeat. "
                "Leave the tensor there, and change it."
            )
            raise UnsupportedModelError(msg)
        if name in buffers and before.get(name) is not after[name]:
            path, _, own = name.rpartition(".")
            found.append((Place(model.get_submodule(path), own), after[name]))
    return found


def _unshared(flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies differentiable outputs that share memory with an earlier one.

    Each output then has a gradient of its own.
    """
    seen: set[int] = set()
    result = []
    for tensor in flat:
        key = storage_id(tensor)
        result.append(tensor.clone() if tensor.requires_grad and key in seen else tensor)
        seen.add(key)
    return result
