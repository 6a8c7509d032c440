"""The model's forward as a function from tensors to tensors, as the tracer calls it.

It leaves the model's attributes as they were, and tells what it did to them.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from rockmate.capture.read_values import SampleValues, ValueReader
from rockmate.capture.signature import refuse_attributes
from rockmate.capture.structure import Structure, flatten, loss_of
from rockmate.capture.tensor_parts import HeldTensors
from rockmate.capture.trace_state import (
    attributes_of_members,
    members_of_tensors_left,
    no_random_state_set,
)
from rockmate.capture.write_log import Write, WriteLog, can_watch
from rockmate.errors import InvalidSampleError, NothingToTrainError, UnsupportedModelError
from rockmate.ops.gathering import gathered_by_ops
from rockmate.state.objects import ABSENT, Objects


class ModuleReplacedError(UnsupportedModelError):
    """The forward has put another submodule in place of one, as a first call may."""

    def __init__(self, path: str) -> None:
        """The error for the submodule at a path."""
        super().__init__(
            f"the model's forward puts another submodule at {path}, which a plan cannot repeat. "
            "Run the plain model once before it is planned, if its first call alone does so. Else "
            "make the submodules in __init__, and choose among them in the forward."
        )


class Outside(NamedTuple):
    """What a forward may reach outside of its model's modules.

    Attributes:
        places: where values stand that it may read.
        objects: those that can be reached, with their contents.
    """

    places: Sequence[Place]
    objects: Objects


@dataclass(slots=True)
class LeftBehind:
    """What one run of the forward has left behind in attributes, and what it read of them.

    Attributes:
        accesses: what it has read and assigned.
        carried: what it has read and then changed, with the values: the next run reads those.
        assigned: attributes that it has assigned without reading them first.
        fixed: attributes that it assigns objects without tensors to, and those objects.
        writes: what it does to containers that it only writes to.
        values: rebuilds what is assigned, then what is carried over, then the arguments of writes.
        carried_outputs: for the index of a carried tensor its attribute.
        outside: places of containers that have other contents, and objects as they are now.
    """

    accesses: Accesses
    carried: list[tuple[Place, Any]]
    assigned: list[Place] = field(default_factory=list)
    fixed: list[tuple[Place, Any]] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    values: Structure | None = None
    carried_outputs: dict[int, Place] = field(default_factory=dict)
    outside: Outside = field(init=False)

    @classmethod
    def of(cls, accesses: Accesses, before: AttributeState) -> tuple[LeftBehind, dict[Place, Any]]:
        """What has changed since `before`; and what was assigned, with the values."""
        assigned = dict(before.changes())
        for place in accesses.assigned:
            value = getattr(place.owner, "__dict__", {}).get(place.name, ABSENT)
            if value is not ABSENT:  # an equal value may be another one in a call of other sizes
                assigned[place] = value
        accesses.add_listed({place for place, value in assigned.items() if traced_in(value)})
        carried = [place for place in accesses.reads if place in assigned]
        return cls(accesses, [(each, copied(assigned.pop(each))) for each in carried]), assigned

    def add_tensors(
        self,
        assigned: Iterable[tuple[Place, Any]],
        log: WriteLog,
        flat: list[torch.Tensor],
        inputs: set[int],
    ) -> None:
        """Adds the tensors in attributes to those of the output.

        Args:
            assigned: attributes and their values.
            log: what was done to containers that are only written to.
            flat: the tensors of the output.
            inputs: addresses of the tensors of the call, of which a copy is returned.
        """
        num_outputs, values = len(flat), []
        for place, value in assigned:
            try:
                flatten(value, what="it")
            except UnsupportedModelError:
                if traced_in(value):
                    raise _attribute_error(place, value) from None
                self.fixed.append((place, value))
            else:
                values.append((place, value))
        self.assigned = [place for place, _ in values]
        tables = [pair for pair in self.carried if traced_in(pair[1])]
        for place, value in tables:
            if not all(isinstance(each, torch.Tensor) for each in traced_in(value)):
                raise _attribute_error(place, value)
        self.writes, written = [write for write, _ in log.writes], [args for _, args in log.writes]
        values_of_all = (*(value for _, value in (*values, *tables)), *written)
        self.values = flatten(values_of_all, what="an attribute", tensors=flat)[1]
        log.writes.clear()
        places = {id(tensor): index for index, tensor in enumerate(flat)}
        self.carried_outputs = {
            places[id(tensor)]: place for place, value in tables for tensor in traced_in(value)
        }
        for index in range(num_outputs, len(flat)):
            if flat[index].requires_grad and id(flat[index]) in inputs:
                flat[index] = flat[index].clone()
        for index in self.carried_outputs:
            flat[index] = flat[index].detach()


@dataclass(slots=True)
class TracedOutputs:
    """The output tensors of a model as its graph has them.

    Attributes:
        structure: rebuilds the model's output.
        differentiable: indices of those with a gradient, tensors in attributes included.
        non_differentiable: indices of those with a gradient in eager and none in the graph.
        notice: what the user should know of them.
    """

    structure: Structure
    differentiable: tuple[int, ...] = ()
    non_differentiable: tuple[int, ...] = ()
    notice: str = ""

    @classmethod
    def of(
        cls, output: Any, *, differentiable: str, outputs: str, has_labels: bool
    ) -> tuple[TracedOutputs, list[torch.Tensor]]:
        """The tensors of an output, detached where they get no gradient; see `capture_joint`."""
        flat, structure = flatten(output, what="the model's output")
        refuse_attributes(flat, of="output")
        loss_tensor = loss_of(output, has_labels=has_labels)
        loss = next((index for index, tensor in enumerate(flat) if tensor is loss_tensor), None)
        if outputs == "loss":
            if loss is None:
                raise InvalidSampleError(
                    'outputs="loss" needs an output with a scalar `loss` that requires grad. Leave '
                    '`outputs` at "all".'
                )
            structure, flat, loss = structure.with_tensor_alone(loss), [flat[loss]], 0
        found = cls(structure)
        if differentiable == "loss" and loss is not None:
            others = [at for at, each in enumerate(flat) if at != loss and each.requires_grad]
            found.non_differentiable = tuple(others)
            if scalars := sum(flat[index].numel() == 1 for index in others):
                found.notice = (
                    f"{scalars} scalar outputs beside the loss have no gradient in planned steps"
                )
            flat = [each if index == loss else each.detach() for index, each in enumerate(flat)]
        return found, flat


class TracedForward(nn.Module):
    """The model as a function from tensors to a flat tuple of tensors.

    The tracer's descriptors number the tensors of these two tuples. The result has the tensors of
    the model's output, then those that it assigns to attributes, then those that it carries over.

    Attributes:
        structure: rebuilds the arguments of the model.
        keeps_checkpoints: as for `capture_joint`, as is `reads_masks`.
        outputs: those of the last run, as are `left`, `reader` and `log`.
        left: what the forward did to attributes.
        reader: reads values of tensors.
        log: what it does with containers that it only writes to.
        takes_gradient: whether it takes a gradient itself.
        held: tensors in attributes of the model's tensors, which are inputs of the trace.
        outside: what it may reach outside of the model.
    """

    outputs: TracedOutputs
    left: LeftBehind
    takes_gradient: bool

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        differentiable: str,
        outputs: str,
        outside: Outside,
        keeps_checkpoints: bool = False,
        reads_masks: bool = False,
        sample: SampleValues | None = None,
        logs: Sequence[Place] = (),
        caches: Sequence[Any] = (),
    ) -> None:
        """Takes the model and how it is called.

        With a `sample`, reads of values that follow from its values are answered, or deferred.
        Containers at the places of `logs` are only written to. What stands `outside` is looked at
        behind a run, and `caches` of functions are emptied.
        """
        super().__init__()
        self.model = model
        self.structure = structure
        self._differentiable, self._outputs = differentiable, outputs
        self.keeps_checkpoints, self.reads_masks = keeps_checkpoints, reads_masks
        self.outside, self.log, self._caches = outside, WriteLog(logs), caches
        self._sample, self.reader = sample, ValueReader(sample)
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
        self.reader, self.log = ValueReader(self._sample, carriers), WriteLog(self.log.places)
        for place in self.log.places:
            if not isinstance(place.owner, types.ModuleType):
                before.save(place.owner)  # as it is without what stands in its place
        values = {place: place.value() for place in self.outside.places}
        watched = {place: snapshot(value) for place, value in values.items() if can_watch(value)}
        try:
            with (
                self.reader.answering(self.model, tensors),
                accesses_recorded(self.model, before) as accesses,
                attributes_of_members(self.model, self._members, accesses),
                no_random_state_set(),
                members_of_tensors_left(),
                parametrizations_afresh(),
                self.log.noting(),
                gathered_by_ops(self.model),
            ):
                output = self.model(*args, **kwargs)
            changed = [each for each, one in watched.items() if snapshot(each.value()) != one]
            if before.replaced_module():
                raise ModuleReplacedError(before.replaced_module())
            replaced = _replaced(self.model, members)
            self.left, assigned = LeftBehind.of(accesses, before)
            self.outputs, flat = TracedOutputs.of(
                output,
                differentiable=self._differentiable,
                outputs=self._outputs,
                has_labels=kwargs.get("labels") is not None,
            )
            if not any(tensor.requires_grad for tensor in flat):
                raise NothingToTrainError(
                    "no output of the model requires a gradient, so there is nothing to train. "
                    "Unfreeze a parameter, pass labels, or call the plain model."
                )
            inputs = {id(tensor) for tensor in tensors}
            self.left.add_tensors([*assigned.items(), *replaced], self.log, flat, inputs)
            del assigned, replaced
            self.reader.note_escapes(also_delivered=False)
        finally:
            before.restore()
            for each in self._caches:  # no call is to meet tensors of a trace
                each.cache_clear()
        self.left.outside = Outside(changed, self.outside.objects.again(outside_in_trace))
        self.outputs.differentiable = tuple(
            at for at, each in enumerate(flat) if each.requires_grad
        )
        return tuple(_unshared(flat))


def _attribute_error(place: Place, value: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's forward assigns a {type(value).__name__} to {place}, and a plan can assign "
        "tensors, constants, and containers or dataclasses of them. Assign one of these."
    )


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
            raise UnsupportedModelError(
                f"the model's forward removes its {name}, which a captured graph cannot repeat. "
                "Leave the tensor there, and change it."
            )
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
