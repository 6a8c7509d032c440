"""Slices of a buffer that were written, and tensors that were overwritten.

A loop that writes tiles into one buffer, as TRL's log-probabilities do, leaves in a functional
graph a copy of the whole buffer for each tile. Readers of a tile read what was written into it. The
rows of that may be closer together, so that the values are the same, and their places are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import layout_of, storage_ids, tensors_of
from rockmate.graph.fake_values import insert_call, refresh, refresh_views

_aten = torch.ops.aten
_COPY = _aten.copy.default
_READS = (_aten.slice.Tensor, _COPY)


def read_what_was_written(graph: fx.Graph) -> None:
    """Has readers of what was written read the source, in place."""
    returned = {each for node in graph.output_node().all_input_nodes for each in storage_ids(node)}
    for node in [each for each in graph.nodes if each.target in _READS]:
        source = _copied(node) if node.target is _COPY else _written_at(node)
        if (
            isinstance(source, fx.Node)
            and source.op == "call_function"
            and _are_alike_but_for_gaps(source.meta["val"], node.meta["val"])
            and returned.isdisjoint((*storage_ids(source), *storage_ids(node)))
        ):
            _have_read(node, source)


def _have_read(node: fx.Node, source: fx.Node) -> None:
    """Has readers of a node read another one, and their fake values lie as its layout has them."""
    left, pending = set(storage_ids(node)), list(node.users)
    node.replace_all_uses_with(source)
    while pending:
        reader = pending.pop()
        if reader.op == "call_function":
            before = [layout_of(each) for each in tensors_of(reader)]
            value, is_view = reader.meta["val"], not left.isdisjoint(storage_ids(reader))
            left.update(storage_ids(reader))
            refresh(reader)
            if is_view or [layout_of(each) for each in tensors_of(reader)] != before:
                pending += reader.users
            else:
                reader.meta["val"] = value


def _copied(copy: fx.Node) -> fx.Node:
    """What a tensor is overwritten with, as a tensor of its dtype."""
    _, source, *_ = copy.args
    dtype = copy.meta["val"].dtype
    assert isinstance(source, fx.Node)
    if source.meta["val"].dtype == dtype or source.meta["val"].shape != copy.meta["val"].shape:
        return source
    with copy.graph.inserting_before(copy):
        to = {"dtype": dtype}
        return insert_call(copy.graph, _aten._to_copy.default, (source,), to, like=source)


def _written_at(cut: fx.Node) -> fx.Node | None:
    """What was written where a slice is read, if that was one call; the slice leaves out others."""
    written: Any = cut.args[0]
    place: Any = list(cut.args[1:])
    while written.target is _aten.slice_scatter.default:
        base, source, *other = written.args
        if other == place:
            return source
        if not _are_apart(place, other):
            break
        written = base
    if written is not cut.args[0]:
        cut.replace_input_with(cut.all_input_nodes[0], written)
        left = storage_ids(cut)
        refresh(cut)
        refresh_views(cut, left)
    return None


def _are_apart(place: list[Any], other: list[Any]) -> bool:
    """Whether no element lies within two slices, each a dim, a start and an end."""
    if not (len(place) == len(other) == 3 and all(isinstance(each, int) for each in place + other)):
        return False
    return place[0] == other[0] and (place[2] <= other[1] or other[2] <= place[1])


def _are_alike_but_for_gaps(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and (
        torch.empty_like(tensor).stride() == torch.empty_like(other).stride()
    )
