"""Planned forwards whose backward has not run, and which backward is the last of several.

A script may call a module twice before one `loss.backward()`: two towers, a pair of a contrastive
loss. Autograd sums a parameter's gradients over all uses before it fires the parameter's hooks. So
of the planned steps that one backward runs, only the last may fire them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rockmate._torch.engine import backward_id, will_execute


@dataclass(slots=True, eq=False)
class PartialGradients:
    """What the planned steps of one backward have accumulated so far.

    Attributes:
        used: ids of the parameters with a gradient.
        hooked: id of a parameter with a tensor hook -> sum of its gradients.
        unfired: id of a parameter with a gradient whose hooks have to fire -> the parameter.
    """

    used: set[int] = field(default_factory=set)
    hooked: dict[int, torch.Tensor] = field(default_factory=dict)
    unfired: dict[int, torch.Tensor] = field(default_factory=dict)


class PendingSteps:
    """The planned forwards of all models with the same parameters, and the backward that runs."""

    def __init__(self) -> None:
        self._nodes: list[weakref.ref[Any]] = []
        self._id = -1
        self._begun: set[int] = set()
        self._partial = PartialGradients()

    def add(self, node: Any) -> None:
        """Notes the autograd node of a forward; its `saved` is None once its backward has run."""
        self._nodes = [each for each in self._nodes if each() is not None]
        self._nodes.append(weakref.ref(node))

    def runners_of(self, model: nn.Module) -> list[Any]:
        """What has run the forwards of a model that hold values for a backward to come."""
        nodes: list[Any] = [each() for each in self._nodes]
        return [node.runner for node in nodes if is_pending(node) and node.runner.model is model]

    def begin(self, node: Any) -> tuple[PartialGradients, bool]:
        """To be called as the backward of a node begins.

        Returns:
            What earlier steps of the same backward have accumulated, and whether this is the last.
        """
        if backward_id() != self._id:
            self._id, self._begun, self._partial = backward_id(), set(), PartialGradients()
        self._begun.add(id(node))
        others = [each() for each in self._nodes]
        is_last = not any(
            other is not None and id(other) not in self._begun and will_execute(other)
            for other in others
        )
        return self._partial, is_last


_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, PendingSteps] = weakref.WeakKeyDictionary()


def pending_steps_of(model: nn.Module) -> PendingSteps:
    """The pending steps of a model, for all of its plans."""
    return _OF_MODEL.setdefault(model, PendingSteps())


def share_pending_steps(model: nn.Module, steps: PendingSteps) -> None:
    """Has a model's planned forwards noted among those of other models with the same parameters."""
    _OF_MODEL[model] = steps


def is_pending(node: Any) -> bool:
    """Whether the backward of an autograd node has still to run, as far as the node can tell.

    Nodes that are no planned step's hold nothing that is planned.
    """
    return getattr(node, "saved", None) is not None
