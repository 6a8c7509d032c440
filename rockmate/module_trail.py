"""The submodule that ran each op, written to `node.meta["module"]` while a model is traced.

Nodes of the forward are made while their submodule runs. Nodes of the backward are made by autograd, when none does: they bear the
sequence number that autograd gave the op that they differentiate, and numbers count up while the forward passes through submodules.
Numbers alone would not do for the forward, since an op that needs no gradient (in a frozen submodule) is given none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rockmate.traced_nodes import each_node


@dataclass(frozen=True, slots=True)
class ModuleTrail:
    """Where the forward has been.

    Attributes:
        spans: autograd sequence numbers of each submodule's forward: (first, past the last, module path).
        entered: for each submodule whose forward has begun and not ended, the outer ones first: (first sequence number, module path).
    """

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    entered: list[tuple[int, str]] = field(default_factory=list)

    @property
    def innermost(self) -> str:
        """Path of the submodule that is running; empty if none is."""
        return self.entered[-1][1] if self.entered else ""

    def name_backward(self, graph: fx.Graph) -> None:
        """Gives each node that no submodule made the module of the op that it differentiates."""
        module_of_sequence = self._module_of_sequence()
        for node in graph.nodes:
            if "module" not in node.meta:
                node.meta["module"] = module_of_sequence.get(node.meta.get("seq_nr", -1), "")

    def _module_of_sequence(self) -> dict[int, str]:
        """The innermost module of each sequence number. Spans end in order of leaving, so an inner one comes before its parent."""
        last_trace_start = max((first for first, _, path in self.spans if not path), default=0)
        result: dict[int, str] = {}
        for first, past_last, path in self.spans:
            if (
                first < last_trace_start
            ):  # an earlier trace of the same module: the tracer runs it more than once
                continue
            for number in range(first, past_last):
                result.setdefault(number, path)
        return result


@contextlib.contextmanager
def module_trail(model: nn.Module) -> Iterator[ModuleTrail]:
    """Records the trail of the model's forward, and names the nodes that are made on it."""
    trail = ModuleTrail()

    def enter(path: str) -> Callable[..., None]:
        return lambda module, inputs: trail.entered.append(
            (torch.autograd._get_sequence_nr(), path)
        )

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        first, path = trail.entered.pop()
        trail.spans.append((first, torch.autograd._get_sequence_nr(), path))

    def note_module(node: fx.Node) -> None:
        if trail.entered:
            node.meta["module"] = trail.innermost

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with each_node(note_module):
            yield trail
    finally:
        for handle in handles:
            handle.remove()
