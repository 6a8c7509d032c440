"""Value numbering: merges equal calls of a joint graph and removes copies, bitwise.

Hugging Face models build masks, position ids and rotary tables anew in each layer. Autograd writes
the derivative of a square as 2 * pow(x, 1). Dropout that drops nothing is captured as a copy. Half
of a graph's nodes are views of views. Value numbering (Alpern, Wegman and Zadeck, POPL 1988) finds
them in one sweep over the graph. The graph mutates nothing, so equal calls on equal arguments are
equal values:

* a *view* is known by the node that it views, dtype, shape, strides and offset; the first of equal
  views replaces the others;
* a *call* is known by its target and arguments, Python constants by type and exact value; the first
  of equal calls replaces the others;
* a *copy* (a clone in the same layout, a power of one, a product with one, the gradient of a slice
  that takes all) is replaced by its source.

Three kinds of calls stay: calls that draw random numbers, calls that are not PyTorch's own, and
calls whose memory is held outside the graph. The user may write into an output, so it shares no
memory that it does not share in eager.

A call that only the backward needs (a *late* call) merges into its equal in the forward. A schedule
loses nothing: it can recompute the forward's call where the late one ran, and can now save it
instead. Two late calls do not merge: each runs where it is read, and one call for both would be
live in between. A large constant does not merge: filling it again is cheaper than saving it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op, schema_of
from rockmate.capture.nodes import ancestors, is_tangent, layout_of, storage_ids, tensors_of
from rockmate.graph.fake_values import refresh
from rockmate.graph.node_marks import are_at_odds, joined_marks
from rockmate.ops.kernel_layouts import frozen
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply
from rockmate.ops.rng import is_random

_aten = torch.ops.aten

# Kernels of this library whose equal calls give equal results.
_PURE_KERNELS = {cross_entropy_backward, dropout_apply}

# Namespaces whose ops say whether they draw; an op of another library may draw or count unsaid.
_NAMESPACES = {"aten", "prims"}

# A constant of more bytes is filled again rather than saved.
_LARGE_FILL_BYTES = 1 << 16

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_CLONES = {_aten.clone.default, _aten._to_copy.default}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_SUMS = {_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar}


def merge_equal_values(graph: fx.Graph) -> None:
    """Merges equal values and removes copies and views that change nothing, in place.

    The graph is functional. What it returns and its placeholders stay.
    """
    _ValueNumbering(graph).run()


def remove_dead_calls(graph: fx.Graph) -> None:
    """Removes calls that nothing reads. Random ones stay, since eager draws for them, too."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or is_random(node.target))


class _ValueNumbering:
    """One sweep in graph order: a node's arguments are replaced before the node is met.

    Attributes:
        _fakes: keeps every storage live, since its identity is an address.
        _returned: nodes that the graph returns.
        _held: storages of returned nodes.
        _given: storages of placeholders and constants.
        _parent: the argument in whose memory a node lies; see `_parent_of`.
        _late: calls that only the backward needs.
        _stale: views whose fake tensor lies in memory that their parent has left.
        _origin: the first node in a view's memory.
        _number: the value number of each node.
        _numbers: the value number of each key.
        _views: the first view of each (origin, layout).
        _calls: the first call of each value number.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        nodes = list(graph.nodes)
        self._fakes = [node.meta.get("val") for node in nodes]
        self._returned = set(graph.output_node().all_input_nodes)
        self._held = {storage for node in self._returned for storage in storage_ids(node)}
        given = [node for node in nodes if node.op != "call_function"]
        self._given = {storage for node in given for storage in storage_ids(node)}
        parents = {node: _parent_of(node) for node in nodes}
        self._parent = {node: parent for node, parent in parents.items() if parent is not None}
        self._late = _late_calls(graph)
        self._stale: set[fx.Node] = set()
        self._origin: dict[fx.Node, fx.Node] = {}
        self._number: dict[fx.Node, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._views: dict[Hashable, fx.Node] = {}
        self._calls: dict[int, fx.Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node in self._stale:
                refresh(node)  # its parent lies in other memory now
                self._stale.update(self._views_of(node))
            is_view = self._is_view(node)
            twin = self._view_twin(node) if is_view else self._call_twin(node)
            if twin is not None:
                if not is_view:
                    joined_marks(twin, node)
                self._replace(node, twin)

    def _is_view(self, node: fx.Node) -> bool:
        """Whether it lies in the memory of an earlier op; an item of a result is the op's own."""
        parent = self._parent.get(node)
        if parent is None:
            return False
        return node.target is not operator.getitem or self._is_view(parent)

    def _view_twin(self, node: fx.Node) -> fx.Node | None:
        """The earlier node that is the same tensor; a returned node stays an object of its own."""
        origin = self._origin[node] = self._origin[self._parent[node]]
        # A split is known by its items.
        if not isinstance(node.meta["val"], torch.Tensor):
            self._number[node] = self._intern(node)
            return None
        layout = layout_of(node.meta["val"])
        first = self._views.setdefault((origin, layout), node)
        if first is node:
            self._number[node] = self._intern(("view", self._number[origin], layout))
            return None
        self._number[node] = self._number[first]
        return None if node in self._returned else first

    def _call_twin(self, node: fx.Node) -> fx.Node | None:
        """The earlier node with the values of a call; neither of them may be held outside."""
        is_pure = node.op == "call_function" and _is_pure(node.target)
        self._origin[node] = node
        key = str(node.target), *(frozen(each, self._leaf) for each in (node.args, node.kwargs))
        self._number[node] = self._intern(key if is_pure else node)
        if is_pure and self._is_free(node):
            twin = self._copy_source(node) or self._equal_call(node)
            if twin is not None:
                return twin
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._views[node, layout_of(node.meta["val"])] = node
        return None

    def _copy_source(self, node: fx.Node) -> fx.Node | None:
        source = _copied(node)
        if source is None or not self._is_free(source):
            return None
        is_given = not self._given.isdisjoint(storage_ids(source))
        is_kept = is_given or not _are_alike(source, node) or are_at_odds(source, node)
        return None if is_kept else source

    def _equal_call(self, node: fx.Node) -> fx.Node | None:
        if _is_large_fill(node):
            return None
        first = self._calls.setdefault(self._number[node], node)
        if first is node or not _are_alike(first, node) or {first, node} <= self._late:
            return None
        if are_at_odds(first, node):
            return None
        self._late.discard(first)
        return first

    def _is_free(self, node: fx.Node) -> bool:
        """Whether nothing outside the graph holds its memory when the step has run."""
        return self._held.isdisjoint(storage_ids(node))

    def _intern(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _leaf(self, value: Any) -> Hashable:
        """The value number of a node; type and exact value of a constant.

        1, 1.0 and True differ, and so do 0.0 and -0.0.
        """
        is_node = isinstance(value, fx.Node)
        return ("node", self._number[value]) if is_node else (type(value).__name__, repr(value))

    def _replace(self, node: fx.Node, twin: fx.Node) -> None:
        has_moved = storage_ids(node) != storage_ids(twin)
        for view in self._views_of(node):
            self._parent[view] = twin
            if has_moved:
                self._stale.add(view)
        node.replace_all_uses_with(twin)
        self._graph.erase_node(node)

    def _views_of(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._parent.get(user) is node]


def _late_calls(graph: fx.Graph) -> set[fx.Node]:
    """Calls that depend on no tangent, and on which neither the forward's ends nor draws depend."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    ends = [node for node in graph.output_node().all_input_nodes if node not in backward]
    draws = [node for node in graph.nodes if is_random(node.target)]
    return set(graph.nodes) - backward - ancestors([*ends, *draws])


def _parent_of(node: fx.Node) -> fx.Node | None:
    """The argument in whose memory the node's tensors lie; None if it makes its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    own = set(storage_ids(node))
    shared = (
        operand for operand in node.all_input_nodes if not own.isdisjoint(storage_ids(operand))
    )
    return next(shared, None)


def _copied(node: fx.Node) -> fx.Node | None:
    """The argument whose values the node's result is known to have, bitwise, in any layout.

    Adding zero counts for integers only, because of negative zero. Multiplying by one does not
    count for complex numbers, because of infinity.
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
    is_overwritten = target is _aten.copy.default or (
        target is _aten.slice_scatter.default
        and isinstance(second, fx.Node)
        and second.meta["val"].shape == value.shape
    )
    source = second if is_overwritten else first if is_copy else None
    return source if isinstance(source, fx.Node) else None


def _is_number(value: Any, wanted: int) -> bool:
    return isinstance(value, int | float) and value == wanted


def _is_pure(target: Any) -> bool:
    """Whether its equal calls give equal results and do nothing else."""
    if not is_op(target):
        return target is operator.getitem or target in _PURE_KERNELS
    is_functional = target.namespace in _NAMESPACES and not schema_of(target).is_mutable
    return is_functional and not is_random(target)


def _is_large_fill(node: fx.Node) -> bool:
    """Whether it makes a large tensor of no tensor."""
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(node))
    return not node.all_input_nodes and num_bytes > _LARGE_FILL_BYTES


def _are_alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether one can replace the other: tensors of one layout, in storages of one size."""
    one, other = (
        [(layout_of(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors_of(node)]
        for node in (first, second)
    )
    return one == other and type(first.meta["val"]) is type(second.meta["val"])
