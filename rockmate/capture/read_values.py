"""Values that the forward reads from tensors: known where they follow from the call alone.

A forward may branch on its input, as on whether a mask is causal. While it is traced, ops on the
call's tensors and on buffers are also run on the sample's values, and a read is answered with the
sample's value. The graph then holds for calls in which all reads give the same values. The ops
that lead to them are kept, so that each call is checked before its plan runs.

Results whose size follows from values, as of `unique_consecutive`, are constants of such a graph.
How many elements of a mask are true is such a value, too. `x[mask]`, `nonzero` and `masked_select`
then have fixed shapes, and where the elements are is computed in each step.

In a symbolic capture, each number that is read is the size of a further input, the *carrier* of
that number, and thereby a symbol as sizes are. A call of other numbers is then one of other sizes.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from rockmate._torch.dispatch import OpOverload, ops_observed, outside_of_modes, schema_of
from rockmate._torch.fake import functional_part, hint_of, is_plain
from rockmate._torch.storage import storage_id
from rockmate.capture.counted_masks import CountedMasks
from rockmate.capture.deferred_values import Deferred
from rockmate.capture.input_functions import InputFunction, meets
from rockmate.capture.signature import CallSignature, TensorSignature
from rockmate.errors import UnsupportedModelError

_ITEM, _EQUAL = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default
_REPEATED = torch.ops.aten.repeat_interleave.Tensor
_SIZED_BY_VALUES = {
    _REPEATED,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_consecutive.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten.bincount.default,
}
_SIZE = torch.ops.aten.sym_size.int
_NAMESPACES = ("aten", "prims")  # of ops that run on any values


class UnknownValueError(UnsupportedModelError):
    """The forward reads a value of a tensor, which the tracer does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadValues:
    """What a forward has read from the tensors of its call and from buffers.

    Attributes:
        read: takes the tensors of a call and the buffers; returns the values in order. None where
            nothing was read.
        expected: the values of the calls that the graph holds for.
        buffers: names of the buffers that it takes.
        changes: whether it changes its arguments in place, so that it needs copies.
        sample: the tensors of the sample's call; None for those of floating point numbers.
    """

    read: Callable[..., tuple[Any, ...]] | None = None
    expected: tuple[Any, ...] = ()
    buffers: tuple[str, ...] = ()
    changes: bool = False
    sample: tuple[torch.Tensor | None, ...] = ()

    def values(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
        """What the forward reads in a call; None if ops that lead there fail on its values."""
        assert self.read is not None
        arguments = [*tensors, *map(model.get_buffer, self.buffers)]
        if self.changes:
            arguments = [argument.clone() for argument in arguments]
        try:
            with torch.no_grad():
                return self.read(*arguments)
        except Exception:  # noqa: BLE001 (of the model's own functions, too)
            return None

    def difference(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> str:
        """The first value that is another in this call, in words; empty if none is."""
        values = () if self.read is None else self.values(model, tensors)
        if values is None:
            return "what the forward reads from its inputs or buffers follows in another way"
        pairs = zip(values, self.expected, strict=True)
        different = (pair for pair in pairs if not _is_same(*pair))
        text = "a value that the forward reads from its inputs or buffers was {1!r} and is {0!r}"
        return next((text.format(*pair) for pair in different), "")

    def sized(
        self, call: CallSignature, values: Sequence[Any] | None = None
    ) -> CallSignature | None:
        """A call with the carriers of the numbers that the forward reads behind its tensors.

        The values are those expected, unless others are given. None if one differs that is no size.
        """
        pairs = [*zip(self.expected if values is None else values, self.expected, strict=True)]
        if not all(all(map(_is_size, pair)) or _is_same(*pair) for pair in pairs):
            return None
        like = partial(TensorSignature, dtype=torch.uint8, requires_grad=False)
        device = call.tensors[0].device if call.tensors else torch.device("cpu")
        carriers = (like(shape=(each,), device=device) for each, _ in pairs if _is_size(each))
        return replace(call, tensors=(*call.tensors, *carriers))


NO_VALUES = ReadValues()
"""Those of a forward that reads none."""


@dataclass(frozen=True, slots=True)
class SampleValues:
    """The tensors of a sample and the model's buffers by name, as they are before the trace.

    Buffers on the meta device have no values, nor have inputs that are None. With `defers`, a read
    is deferred until its number is needed.
    """

    inputs: Sequence[torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    num_carriers: int = 0  # behind the inputs of the trace
    defers: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor that follows from the call: the tracer's, its node, and the sample's value.

    The tracer's tensor is held, so that its id stays its own.
    """

    traced: torch.Tensor
    node: fx.Node
    value: torch.Tensor


class ValueReader:
    """Answers the reads of one run of a forward, and keeps the ops that lead to them.

    Attributes:
        values: those that it has read.
    """

    def __init__(self, sample: SampleValues | None, carriers: Sequence[torch.Tensor] = ()) -> None:
        """Begins with nothing known.

        Args:
            sample: whose values answer reads; None answers none.
            carriers: of the numbers that it will read, in order; none without symbols.
        """
        self._sample, self.values = sample, NO_VALUES
        self._defers, self._has_escaped = sample is not None and sample.defers, False
        self._carriers = iter(carriers) if carriers else None
        self._sizes: list[tuple[torch.SymInt, fx.Node]] = []  # each with what gives its number
        self._deferred: list[weakref.ref[Deferred]] = []
        self._graph = fx.Graph()
        self._root = nn.Module()  # holds constants
        self._known: dict[int, _Known] = {}
        self._reads: list[tuple[fx.Node, Any]] = []
        self._changes = False

    def _know(self, tensor: torch.Tensor, value: torch.Tensor | None, name: str) -> None:
        """Takes a tensor of the call or a buffer, as the tracer passes it, and the sample's."""
        node = self._graph.placeholder(name)
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                self._sizes.append((size, self._graph.call_function(_SIZE, (node, dim))))
        if value is not None and not value.is_meta:
            self._learn(tensor, node, _copy(value).to(tensor.device))

    @contextmanager
    def answering(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Answers the reads of what runs within that follow from the sample, if there is one."""
        if self._sample is None:
            yield
            return
        for index, pair in enumerate(zip(tensors, self._sample.inputs, strict=True)):
            self._know(*pair, name=f"input_{index}")
        buffers = dict(model.named_buffers())
        for index, (name, value) in enumerate(self._sample.buffers.items()):
            self._know(buffers[name], value, name=f"buffer_{index}")
        meets.append(self)
        try:
            with ops_observed(self._run), CountedMasks(self):
                yield
        finally:
            meets.pop()
        if self._reads:
            self.values = self._read_values(self._sample)

    def _read_values(self, sample: SampleValues) -> ReadValues:
        nodes, expected = zip(*self._reads, strict=True)
        self._graph.output(nodes)
        self._graph.eliminate_dead_code()
        read = fx.GraphModule(self._root, self._graph).forward
        inputs = (
            None if each is None or each.is_floating_point() else _copy(each)
            for each in sample.inputs
        )
        return ReadValues(read, expected, tuple(sample.buffers), self._changes, tuple(inputs))

    def true_elements(self, mask: Any) -> tuple[torch.Tensor, ...] | None:
        """The indices of a mask's true elements, one tensor a dim; None if it is not known."""
        known = self._known.get(id(mask))
        if known is None or known.traced.dtype is not torch.bool or not known.traced.ndim:
            return None
        with outside_of_modes():
            count = int(known.value.count_nonzero())
        node = self._graph.call_function(torch.ops.aten.count_nonzero.default, (known.node,))
        size = self._expect(self._graph.call_function(_ITEM, (node,)), count)
        return torch.nonzero_static(mask, size=size).unbind(1)

    def result_of(
        self, function: InputFunction, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """The results of a function of the call's tensors; None where those are not known."""
        if any(id(each) not in self._known for each in tensors):
            return None
        known = [self._known[id(each)] for each in tensors]
        with outside_of_modes(), torch.no_grad():
            values = function.on_values([_copy(each.value) for each in known])
        if values is None:
            return None
        node = self._graph.call_function(function, ([each.node for each in known],))
        parts = [self._part(node, (index,)) for index in range(len(values))]
        sizes = [
            self._expect(self._graph.call_function(_SIZE, (part, dim)), size)
            for part, value in zip(parts, values, strict=True)
            for dim, size in enumerate(value.shape)
        ]
        results = function.traced(tensors, sizes)
        for result, part, value in zip(results, parts, values, strict=True):
            self._learn(result, part, value)
        return results

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The sample's value of a tensor; None where it is not known."""
        known = self._known.get(id(tensor))
        return None if known is None else _copy(known.value)

    def read(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """What `func` reads of a tensor; deferred if it may be."""
        if not self._defers or is_plain(tensor):
            return func(tensor)
        # As it is now: it may be changed in place.
        result = Deferred(func, tensor.detach().clone(), self._number_of)
        self._deferred.append(weakref.ref(result))
        return result

    def note_escapes(self, *, also_delivered: bool) -> bool:
        """Whether a number is, or was before, held where no plan brings it, as in a queue."""

        def is_held() -> bool:
            found = [each() for each in self._deferred]
            held = [each for each in found if each is not None]
            return any(also_delivered or not each.is_delivered for each in held)

        self._has_escaped |= is_held() and gc.collect() >= 0 and is_held()
        return self._has_escaped

    def _number_of(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        self._defers, defers = False, self._defers
        try:
            return func(tensor)
        finally:
            self._defers = defers

    def _expect(self, node: fx.Node, value: Any) -> Any:
        """Notes a value that is read; returns it, or the symbol that stands for it."""
        self._reads.append((node, value))
        if self._carriers is None or not _is_size(value):
            return value
        size = next((each.shape[0] for each in self._carriers), -1)
        if hint_of(size) != value:
            raise UnsupportedModelError("the forward reads other values where sizes are symbols")
        if isinstance(size, torch.SymInt):
            self._sizes.append((size, node))
        return size

    def _learn(self, traced: torch.Tensor, node: fx.Node, value: torch.Tensor) -> None:
        for tensor in (traced, functional_part(traced)):
            if tensor is not None:
                self._known[id(tensor)] = _Known(tensor, node, value)

    def _run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op on the tracer's tensors, and on the sample's where they are known."""
        for operand in _tensors_in((args, kwargs)):
            if is_plain(operand) and id(operand) not in self._known:
                self._learn_constant(operand)
        value = self._evaluated(op, args, kwargs)
        if value is not None and op in (_ITEM, _EQUAL):
            return self._expect(self._call(op, args, {}), value)
        if value is not None and op in _SIZED_BY_VALUES and "output_size" not in kwargs:
            return self._of_known_size(op, args, kwargs, value)
        result = op(*args, **kwargs)
        if value is None:
            self._forget_changed(op, args, kwargs)
            return result
        node = self._call(op, args, kwargs)
        for path, traced in _paths(result):
            part = reduce(operator.getitem, path, value)
            self._learn(traced, self._part(node, path), part)
        return result

    def _learn_constant(self, tensor: torch.Tensor) -> None:
        """A tensor that the model's code makes of Python numbers; the tracer passes it as it is."""
        name = f"constant_{len(self._known)}"
        self._root.register_buffer(name, _copy(tensor))
        # Each check has a copy of its own, since an op may change it.
        constant = self._graph.get_attr(name)
        node = self._graph.call_function(torch.ops.aten.clone.default, (constant,))
        self._learn(tensor, node, _copy(tensor))

    def _evaluated(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result on the sample's values; None where they are not known."""
        operands = _tensors_in((args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        is_known = all(id(operand) in self._known for operand in operands)
        if is_random or not is_known or op.namespace not in _NAMESPACES:
            return None
        args, kwargs = map_aggregate((args, kwargs), self._value)
        with outside_of_modes(), torch.no_grad():
            return op(*args, **kwargs)

    def _value(self, item: Any) -> Any:
        if isinstance(item, torch.SymInt):
            return hint_of(item)
        return self._known[id(item)].value if isinstance(item, torch.Tensor) else item

    def _of_known_size(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Any:
        """The result of an op whose operands' values decide on its size.

        Repetitions are computed in each step, and their number is read. Other results are the
        sample's, as constants; a call with others is another one.
        """
        if op is _REPEATED:
            return self._repeated(*args)
        node = self._call(op, args, kwargs)
        results = []
        for path, part in _paths(value):
            self._learn_constant(constant := _copy(part))
            expected = self._known[id(constant)].node
            self._expect(
                self._graph.call_function(torch.equal, (self._part(node, path), expected)), True
            )
            results.append(torch.ops.aten.lift_fresh.default(constant))
            self._learn(results[-1], expected, _copy(part))
        return results[0] if isinstance(value, torch.Tensor) else tuple(results)

    def _repeated(self, repeats: torch.Tensor) -> torch.Tensor:
        """Each index as often as `repeats` says, by ops that take any values when measured."""
        aten = torch.ops.aten
        ends = self._run(aten.cumsum.default, (repeats, 0), {})
        number = self._run(_ITEM, (self._run(aten.sum.default, (repeats,), {}),), {})
        places = self._run(aten.arange.default, (number,), {"device": repeats.device})
        is_int32 = repeats.dtype is torch.int32
        options = {"right": True, "out_int32": is_int32}
        return self._run(aten.searchsorted.Tensor, (ends, places), options)

    def _part(self, node: fx.Node, path: Sequence[Any]) -> fx.Node:
        for index in path:
            node = self._graph.call_function(operator.getitem, (node, index))
        return node

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        args, kwargs = map_aggregate((args, kwargs), self._node)
        self._changes |= schema_of(op).is_mutable
        return self._graph.call_function(op, args, kwargs)

    def _node(self, item: Any) -> Any:
        if isinstance(item, torch.SymInt):
            expression = item.node.expr
            # A trace that finds sizes equal, or one the sum of others, writes it in the others'
            # symbols from then on, of which some may not have been read yet.
            nodes = {size.node.expr: node for size, node in reversed(self._sizes)}
            whole = expression in nodes
            symbols = [expression] if whole else sorted(expression.free_symbols, key=str)

            def number(sizes: Sequence[int]) -> int:
                return int(expression.xreplace(dict(zip(symbols, sizes, strict=True))))

            return self._graph.call_function(number, ([nodes[each] for each in symbols],))
        return self._known[id(item)].node if isinstance(item, torch.Tensor) else item

    def _forget_changed(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Forgets what an op writes to that has no known result, and what shares its memory."""
        if not schema_of(op).is_mutable:
            return
        operands = [item for item in _tensors_in((args, kwargs)) if id(item) in self._known]
        changed = {storage_id(self._known[id(operand)].value) for operand in operands}
        self._known = {
            key: known
            for key, known in self._known.items()
            if storage_id(known.value) not in changed
        }


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_same(value: Any, expected: Any) -> bool:
    """Whether values are equal or both not a number."""
    return value == expected or (value != value and expected != expected)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with outside_of_modes():
        return tensor.detach().clone()


def _tensors_in(item: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in _paths(item)]


def _paths(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Each tensor within tuples, lists and dicts, with the indices that lead to it."""
    if isinstance(item, torch.Tensor):
        yield path, item
    elif isinstance(item, tuple | list):
        for index, part in enumerate(item):
            yield from _paths(part, (*path, index))
    elif isinstance(item, dict):
        for key, part in item.items():
            yield from _paths(part, (*path, key))
