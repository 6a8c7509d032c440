"""A sample as a capture needs it: its tensors, the signature of its call, and where it is traced.

A model that is planned for a device that is not here is traced with fake tensors of that device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rockmate.capture.checkpoint_regions import refuse_unequal
from rockmate.capture.fake_device import fake_device_tensors, move_to
from rockmate.capture.joint import capture_joint
from rockmate.capture.provenance import source_lines
from rockmate.capture.read_values import SampleValues
from rockmate.capture.roles import Capture
from rockmate.capture.signature import (
    CallSignature,
    SampleCall,
    flatten_bare_call,
    optional_keywords,
)
from rockmate.errors import InvalidSampleError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of a model, taken apart.

    Attributes:
        tensors: the tensors of the call.
        call: its signature, on `device` if there is one.
        device: the device that the step is planned for, if model or sample are not there.
    """

    tensors: list[torch.Tensor]
    call: CallSignature
    device: torch.device | None = None

    @property
    def absence(self) -> str:
        """Why there is nothing here to train a step of the sample with; empty if there is."""
        if self.device is None:
            return ""
        return (
            f"the plan is for a model on {self.device.type}, and this one is not there, so it has "
            "nothing to train with. Read `Planner.plan` and `Planner.frontier`, and make the "
            "module where the model can be."
        )


def read_sample(model: nn.Module, sample_input: Any, device: torch.device | None) -> Sample:
    """Takes a sample apart and checks where it is.

    Args:
        model: the module that it is a sample for.
        sample_input: as for `SampleCall.of`.
        device: the device to plan for; None for the one that the model is on.

    Raises:
        InvalidSampleError: it is none of these; or it and the model are on different devices, or on
            the meta device without a device to plan for.
    """
    given = SampleCall.of(sample_input)
    tensors, call = flatten_bare_call(given.args, given.kwargs, optional_keywords(model))
    _refuse_nested(model, tensors)
    kinds = {each.device.type for each in (*model.parameters(), *model.buffers(), *tensors)}
    if device is not None and kinds - {device.type}:
        return Sample(tensors=tensors, call=call.on(device), device=device)
    is_meta = any(each.device.type == "meta" for each in (*model.parameters(), *model.buffers()))
    if device is None and is_meta:
        raise InvalidSampleError(
            "the model is on the meta device, where nothing can be measured. Say what to plan for "
            '(machine="h100", or the path of a description), or move it and its sample to a device '
            "that is here."
        )
    _check_devices(model, tensors)
    return Sample(tensors=tensors, call=call)


def _refuse_nested(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Raises `UnsupportedModelError` for a nested tensor: its sizes are values, not a shape."""
    places = {f"tensor {index} of the call": tensor for index, tensor in enumerate(tensors)}
    places |= dict(model.named_parameters()) | dict(model.named_buffers())
    nested = next((place for place, tensor in places.items() if tensor.is_nested), None)
    if nested is not None:
        raise UnsupportedModelError(
            f"{nested} is a nested tensor, whose rows have lengths of their own, and a plan is for "
            "one shape. Pad it (`torch.nested.to_padded_tensor`), with a mask."
        )


def _check_devices(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Raises `InvalidSampleError` if the sample and the model are not all on one device."""
    of_model = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    of_sample = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(of_model) > 1:
        raise InvalidSampleError(
            f"the model is spread over {sorted(map(str, of_model))}; a plan is for one device. "
            "Move it to one."
        )
    if of_model and not of_sample <= of_model:
        raise InvalidSampleError(
            f"the sample is on {sorted(map(str, of_sample))} and the model on {of_model.pop()}. "
            "Move the sample there."
        )


def trace_sample(model: nn.Module, sample: Sample, **options: Any) -> Capture:
    """The joint graph of a model for a sample, each node with the user's line that made it.

    Options and errors are those of `capture_joint`.
    """
    values, traced = None, nullcontext(sample.tensors)
    if sample.device is not None:  # stand-ins have no values
        values = SampleValues(sample.tensors, dict(model.named_buffers()))
        traced = fake_device_tensors(model, sample.tensors, sample.device)
    with source_lines(), traced as tensors:
        capture = capture_joint(model, tensors, sample.call.structure, values=values, **options)
    refuse_unequal(model, capture)
    if sample.device is not None:
        move_to(capture.joint, sample.device)
    return capture
