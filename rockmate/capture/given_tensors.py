"""Tensors that a step is given: those of a sample, and those that code holds by itself.

A forward may read tensors that nobody registered: in plain attributes, lists, closures, tables of a
library. The trace takes each as a constant of the graph, which is the very tensor, so a step reads
what it holds then.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn

from rockmate._torch.fake import LIFTS
from rockmate.capture.roles import Capture, RoleKind
from rockmate.errors import UnsupportedModelError

logger = logging.getLogger(__name__)


def cloned_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, where no elements share memory."""
    if type(tensor) is not torch.Tensor or _overlaps(tensor):
        return tensor.clone()
    like = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **like).copy_(tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, or are not laid out by strides."""
    if tensor.layout != torch.strided:
        return True
    needed = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < needed:
                return True
            needed = stride * size
    return False


def lifted_tensors(capture: Capture) -> list[torch.Tensor]:
    """The tensors that the step reads and that are neither parameters, buffers nor inputs.

    Raises:
        UnsupportedModelError: one of them requires a gradient.
    """
    found: dict[int, torch.Tensor] = {}
    for node, role in capture.inputs:
        if role.kind is RoleKind.CONSTANT and not all(user.target in LIFTS for user in node.users):
            tensor = capture.constants[role.name]
            found[id(tensor)] = tensor
            if tensor.requires_grad:
                modules = [user.meta["module"] for user in node.users if user.meta.get("module")]
                where = f" in {modules[0]}" if modules else ""
                raise UnsupportedModelError(
                    f"the forward reads a tensor of shape {tuple(tensor.shape)}{where} that "
                    "requires a gradient and is neither parameter nor input. Make it a parameter, "
                    "or pass it. For a step of rockmate.plan_step, give its module in the list of "
                    "modules."
                )
    if found:
        logger.info(
            "inputs of the step are tensors that are neither parameters nor buffers: %s",
            ", ".join(str(list(each.shape)) for each in found.values()),
        )
    return list(found.values())


def with_trained_buffers(model: nn.Module, capture: Capture) -> Capture:
    """Buffers of which the forward asks for gradients require them, and are taken for parameters.

    Raises:
        UnsupportedModelError: so it does of a tensor that is neither buffer nor parameter.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    members = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    gradients = (each for each in capture.output_roles if each is not None)
    names = {each.name for each in gradients if each.kind is RoleKind.PARAMETER_GRADIENT}
    for name in names - parameters.keys():
        if name not in members:
            msg = "a tensor in an attribute requires a gradient. Make it a parameter."
            raise UnsupportedModelError(msg)
        members[name].requires_grad_()
    inputs = (
        (node, replace(role, kind=RoleKind.PARAMETER) if role.name in names else role)
        for node, role in capture.inputs
    )
    return replace(capture, inputs=tuple(inputs))
