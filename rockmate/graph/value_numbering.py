"""Merges what a captured graph computes twice and removes what computes nothing; every number stays as it is, bitwise.

Hugging Face models build masks, position ids and rotary tables in each layer anew, autograd writes the derivative of a square as
2 * pow(x, 1), dropout that drops nothing is captured as a copy, and half of a graph's nodes are views of views. The pass is value
numbering (Alpern, Wegman and Zadeck, POPL 1988) in one sweep over the graph, which mutates nothing, so that equal calls on equal
arguments are equal values:

* a *view* is known by what it is taken from, dtype, shape, strides and offset: of equal ones the first stands for all;
* a *call* is known by its target and arguments, Python constants by type and exact value: likewise;
* a *copy* (a clone in the same layout, a power of one, a product with one, the gradient of a slice that takes all) gives way to what it
  copies.

Left alone are calls that draw random numbers, calls that are not PyTorch's own, and what the outside world holds: the user may write into
an output, so it shares no memory with anything that it does not share in eager.

A call that only the backward needs (it is *late*) merges into its equal in the forward. A schedule loses nothing by that: where the one
ran in the backward, the other can run again; and keeping the value instead becomes possible. Two late calls do not merge: each runs
where it is read, and one for both would have to be held between. Nor does a large constant: filling it again is cheaper than holding it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from rockmate._torch.ops import is_op, schema_of
from rockmate.capture.nodes import layout_of, storage_ids, tensors_of
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
_OWN = {cross_entropy_backward, dropout_apply}
_LARGE_FILL_BYTES = 1 << 16
_NAMESPACES = {"aten", "prims"}  # a library's own op may draw or count without saying so
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_CLONES = {_aten.clone.default, _aten._to_copy.default}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_SUMS = {_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar}


def clean(graph: fx.Graph) -> None:
    """Merges equal values and removes copies, views that change nothing and dead calls, in place.

    Args:
        graph: a functional joint graph whose nodes carry fake tensors; nodes that it returns stay, as do placeholders.
    """
    _Cleaner(graph).run()
    remove_dead(graph)
    graph.lint()


def remove_dead(graph: fx.Graph) -> None:
    """Removes calls that nobody reads, random ones aside: eager draws for them, too."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node.target))


class _Cleaner:
    """One sweep in graph order: when a node is met, everything that it reads has been replaced already."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.fakes = [
            node.meta.get("val") for node in graph.nodes
        ]  # keeps every storage alive, since storages are told apart by address
        self.returned = set(graph.output_node().all_input_nodes)
        self.held = {memory for node in self.returned for memory in storage_ids(node)}
        self.given = {
            memory
            for node in graph.nodes
            if node.op != "call_function"
            for memory in storage_ids(node)
        }
        self.parent = {
            node: parent for node in graph.nodes if (parent := _parent(node)) is not None
        }
        self.late = _late_nodes(graph)
        self.stale: set[fx.Node] = set()
        self.origin: dict[fx.Node, fx.Node] = {}
        self.number: dict[fx.Node, int] = {}
        self.numbers: dict[Hashable, int] = {}
        self.views: dict[Hashable, fx.Node] = {}
        self.calls: dict[int, fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.stale:
                self._renew(node)
            twin = self._view_twin(node) if self._is_view(node) else self._call_twin(node)
            if twin is not None:
                self._replace(node, twin)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether it lies in memory that an earlier node has brought in; an item of what an op makes is that op's own."""
        parent = self.parent.get(node)
        return parent is not None and (node.target is not operator.getitem or self._is_view(parent))

    def _view_twin(self, node: fx.Node) -> fx.Node | None:
        """The earlier node that is the same tensor; what the graph returns stays an object of its own."""
        origin = self.origin[node] = self.origin[self.parent[node]]
        if not isinstance(node.meta["val"], torch.Tensor):  # a split, known by its items
            self.number[node] = self._intern(node)
            return None
        layout = layout_of(node.meta["val"])
        first = self.views.setdefault((origin, layout), node)
        self.number[node] = (
            self._intern(("view", self.number[origin], layout))
            if first is node
            else self.number[first]
        )
        return None if first is node or node in self.returned else first

    def _call_twin(self, node: fx.Node) -> fx.Node | None:
        """The earlier node that an op's result copies or computes, too; the op may not be held outside, nor its twin."""
        is_pure = node.op == "call_function" and _is_pure(node.target)
        self.origin[node] = node
        self.number[node] = self._intern(self._call(node) if is_pure else node)
        if is_pure and self._is_free(node):
            source = _copied(node)
            if (
                source is not None
                and self._is_free(source)
                and self.given.isdisjoint(storage_ids(source))
                and _are_alike(source, node)
            ):
                return source
            if not _is_large_fill(node):
                first = self.calls.setdefault(self.number[node], node)
                if first is not node and _are_alike(first, node) and not {first, node} <= self.late:
                    self.late.discard(first)
                    return first
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.views[node, layout_of(node.meta["val"])] = node
        return None

    def _is_free(self, node: fx.Node) -> bool:
        """Whether nothing outside the graph holds its memory when the step has run: no output, no gradient, no update."""
        return self.held.isdisjoint(storage_ids(node))

    def _intern(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _call(self, node: fx.Node) -> Hashable:
        return str(node.target), self._freeze(node.args), self._freeze(node.kwargs)

    def _freeze(self, value: Any) -> Hashable:
        """Equal for equal arguments: nodes by number, constants by type and exact value, so that 1, 1.0 and True, 0.0 and -0.0 differ."""
        if isinstance(value, fx.Node):
            return "node", self.number[value]
        if isinstance(value, Mapping):
            return tuple((name, self._freeze(item)) for name, item in sorted(value.items()))
        if isinstance(value, tuple | list):
            return tuple(self._freeze(item) for item in value)
        return type(value).__name__, repr(value)

    def _replace(self, node: fx.Node, twin: fx.Node) -> None:
        for user in node.users:
            if self.parent.get(user) is node:
                self.parent[user] = twin
                if storage_ids(node) != storage_ids(twin):
                    self.stale.add(user)
        node.replace_all_uses_with(twin)
        self.graph.erase_node(node)

    def _renew(self, node: fx.Node) -> None:
        """Takes a view's fake tensor anew, since its parent lies in other memory now."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        assert callable(node.target)
        with torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)
        self.stale.update(user for user in node.users if self.parent.get(user) is node)


def _late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Calls of the backward that depend on no gradient: neither read tangents, nor are read by what the forward returns or draws."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or not backward.isdisjoint(
            node.all_input_nodes
        ):
            backward.add(node)
    ends = [node for node in graph.output_node().all_input_nodes if node not in backward]
    pending = ends + [node for node in graph.nodes if is_random(node.target)]
    forward: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in forward:
            forward.add(node)
            pending += node.all_input_nodes
    return set(graph.nodes) - backward - forward


def _parent(node: fx.Node) -> fx.Node | None:
    """The argument in whose memory the node's tensors lie, None if it makes its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    memories = set(storage_ids(node))
    return next(
        (
            argument
            for argument in node.all_input_nodes
            if not memories.isdisjoint(storage_ids(argument))
        ),
        None,
    )


def _copied(node: fx.Node) -> fx.Node | None:
    """The argument whose values the node's result has, bit for bit, if it is known to; its layout may be another.

    Negative zero is why adding zero passes for integers only, and infinity why multiplying by one does not for complex numbers.
    """
    target, (first, second) = node.target, (*node.args, None, None)[:2]
    value = node.meta["val"]
    is_copy = (
        target in _CLONES
        or (target is _aten.pow.Tensor_Scalar and _is_number(second, 1))
        or (target in _PRODUCTS and _is_number(second, 1) and not value.dtype.is_complex)
        or (target in _SUMS and _is_number(second, 0) and value.dtype in _INTEGERS)
        or (
            target is _aten.slice_backward.default
            and isinstance(first, fx.Node)
            and first.meta["val"].shape == value.shape
        )
    )
    source = second if target is _aten.copy.default else first if is_copy else None
    return source if isinstance(source, fx.Node) else None


def _is_number(value: Any, wanted: int) -> bool:
    return isinstance(value, int | float) and value == wanted


def _is_pure(target: Any) -> bool:
    """Whether equal calls of it give equal results and do nothing else."""
    if is_op(target):
        return (
            target.namespace in _NAMESPACES
            and not schema_of(target).is_mutable
            and not is_random(target)
        )
    return target is operator.getitem or target in _OWN


def _is_large_fill(node: fx.Node) -> bool:
    """Whether it makes much out of nothing."""
    return (
        not node.all_input_nodes
        and sum(t.untyped_storage().nbytes() for t in tensors_of(node)) > _LARGE_FILL_BYTES
    )


def _are_alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether one can stand in the other's place: tensors laid out alike, in as much memory."""
    one, other = (
        [(layout_of(t), t.untyped_storage().nbytes()) for t in tensors_of(node)]
        for node in (first, second)
    )
    return one == other and type(first.meta["val"]) is type(second.meta["val"])
