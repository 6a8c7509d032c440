"""Gradients of parameters that autocast has cast.

Autocast casts a parameter once for all calls until its context ends, and autograd adds up the
gradients of the cast. So a captured inside returns the gradient of the cast, not the parameter's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate.capture.roles import Capture, RoleKind
from rockmate.errors import UnsupportedModelError

_CAST = torch.ops.aten._to_copy.default


def return_gradients_of_casts(module: nn.Module, capture: Capture) -> None:
    """Changes the graph so that it returns the gradient of each cast that autocast keeps.

    Args:
        module: which was captured.
        capture: its joint graph, which is changed in place.

    Raises:
        UnsupportedModelError: a parameter has other readers beside its cast.
    """
    if not (autocast_dtypes() and torch.is_autocast_cache_enabled()):
        return
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    cast = {
        role.name
        for node, role in capture.inputs
        if role.kind is RoleKind.PARAMETER
        and role.name in trained
        and any(user.target is _CAST for user in node.users)
    }
    output = capture.joint.graph.output_node()
    returned: Any = output.args[0]
    values = list(returned)
    for place, role in enumerate(capture.output_roles):
        if role is not None and role.kind is RoleKind.PARAMETER_GRADIENT and role.name in cast:
            values[place] = _before_cast(values[place], role.name)
    output.args = (tuple(values),)


def _before_cast(gradient: fx.Node, name: str) -> fx.Node:
    if gradient.target is not _CAST:
        msg = f"autocast casts {name}, which it reads without the cast, too, or several times"
        raise UnsupportedModelError(msg)
    before = gradient.args[0]
    assert isinstance(before, fx.Node)
    return before


def cast_names(module: nn.Module, capture: Capture) -> tuple[str, ...]:
    """The parameters whose returned gradient is that of their cast."""
    return tuple([
        role.name
        for node, role in capture.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT
        and node.meta["val"].dtype != module.get_parameter(role.name).dtype
    ])  # fmt: skip
