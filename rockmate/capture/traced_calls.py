"""The distinct calls of a trace, with the fake results on which autograd went.

Passes replace and remove calls. What they leave is measured; these are all that the trace was made
on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rockmate._torch.ops import is_op
from rockmate.capture.nodes import call_name, storage_ids
from rockmate.ops.collectives import is_communication
from rockmate.ops.observed_layouts import call_key


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call of an op that makes memory.

    Attributes:
        key: equal for calls of equal metadata.
        target: the op.
        args: its arguments, with fake tensors.
        kwargs: its keywords.
        results: its fake results.
        place: the op and the submodule that called it.
    """

    key: Hashable
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    place: str

    @property
    def cuda_devices(self) -> set[int]:
        """Indices of the GPUs of its results."""
        results = self.results if isinstance(self.results, tuple | list) else (self.results,)
        devices = [each.device for each in results if isinstance(each, torch.Tensor)]
        return {each.index or 0 for each in devices if each.type == "cuda"}


def traced_calls(graph: fx.Graph) -> tuple[TracedCall, ...]:
    """The distinct calls of a joint graph as it was traced, views left out."""
    found = dict[Hashable, TracedCall]()
    for node in graph.nodes:
        if node.op != "call_function" or not is_op(node.target) or is_communication(node.target):
            continue
        made = set(storage_ids(node))
        if not made or any(not made.isdisjoint(storage_ids(read)) for read in node.all_input_nodes):
            continue
        key = call_key(node.target, node.args, node.kwargs)
        if key not in found:
            found[key] = TracedCall(
                key=key,
                target=node.target,
                args=fx.map_arg(node.args, _fake),
                kwargs=fx.map_arg(node.kwargs, _fake),
                results=node.meta["val"],
                place=f"{call_name(node)} in {node.meta.get('module') or 'the model'}",
            )
    return tuple(found.values())


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]
