"""Values that the forward reads from tensors: known where they follow from the call alone.

A forward may branch on its input, as on whether a mask is causal. While it is traced, ops on the
call's tensors and on buffers are also run on the sample's values, and a read is answered with the
sample's value. The graph then holds for calls in which all reads give the same values. The ops
that lead to them are kept, so that each call is checked before its plan runs.

Results whose size follows from values, as of `unique_consecutive`, are constants of such a graph.
How many elements of a mask are true is such a value, too. `x[mask]`, `nonzero` and `masked_select`
then have fixed shapes, and where the elements are is computed in each step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import has_side_effect, map_aggregate
from torch.overrides import TorchFunctionMode

from rockmate._torch.dispatch import OpOverload, ops_observed, outside_of_modes, schema_of
from rockmate._torch.fake import functional_part, is_plain
from rockmate._torch.storage import storage_id
from rockmate.capture.deferred_values import Deferred
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
_READS = (torch.Tensor.item, torch.Tensor.tolist)  # whose results may be deferred
_NAMESPACES = ("aten", "prims")  # of ops that run on any values


class UnknownValueError(UnsupportedModelError):
    """The forward reads a value of a tensor, which the tracer does not have."""


class _OtherValueError(Exception):
    """A call reads another value than the sample."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadValues:
    """What a forward has read from the tensors of its call and from buffers.

    Attributes:
        check: takes the tensors of a call and the buffers; raises `_OtherValueError` where a value
            is not the sample's. None where nothing was read.
        buffers: names of the buffers that it takes.
        changes: whether it changes its arguments in place, so that it needs copies.
    """

    check: Callable[..., None] | None = None
    buffers: tuple[str, ...] = ()
    changes: bool = False

    def difference(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> str:
        """The first value that is another in this call, in words; empty if none is."""
        if self.check is None:
            return ""
        arguments = [*tensors, *map(model.get_buffer, self.buffers)]
        if self.changes:
            arguments = [argument.clone() for argument in arguments]
        try:
            with torch.no_grad():
                self.check(*arguments)
        except _OtherValueError as error:
            return str(error)
        return ""


NO_VALUES = ReadValues()
"""Those of a forward that reads none."""


@dataclass(frozen=True, slots=True)
class SampleValues:
    """The tensors of a sample and the model's buffers by name, as they are before the trace.

    Buffers on the meta device have no values.
    """

    inputs: Sequence[torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor that follows from the call: the tracer's, its node, and the sample's value.

    The tracer's tensor is held, so that its id stays its own.
    """

    traced: torch.Tensor
    node: fx.Node
    value: torch.Tensor


class ValueReader:
    """Answers the reads of one run of a forward, and keeps the ops that lead to them."""

    def __init__(self, *, defers: bool = False) -> None:
        """Begins with nothing known; may defer reads until their number is needed."""
        self._defers = defers
        self._deferred: list[weakref.ref[Deferred]] = []
        self._graph = fx.Graph()
        self._root = nn.Module()  # holds constants
        self._known: dict[int, _Known] = {}
        self._reads = 0
        self._names: list[str] = []
        self._changes = False

    def know_inputs(self, traced: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Takes the call's tensors, as the tracer passes them, and the sample's."""
        for index, (tensor, value) in enumerate(zip(traced, values, strict=True)):
            node = self._graph.placeholder(f"input_{index}")
            self._learn(tensor, node, _copy(value).to(tensor.device))

    def know_buffers(
        self, traced: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> None:
        """Takes the model's buffers by name, as the tracer passes them, and their values."""
        for name, value in values.items():
            node = self._graph.placeholder(f"buffer_{len(self._names)}")
            self._names.append(name)
            if not value.is_meta:
                self._learn(traced[name], node, _copy(value).to(traced[name].device))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answers the reads of what runs within."""
        with ops_observed(self._run), _CountedMasks(self):
            yield

    def read_values(self) -> ReadValues:
        """What has been read so far. The reader is used up."""
        if not self._reads:
            return NO_VALUES
        self._graph.output(None)
        self._graph.eliminate_dead_code()
        check = fx.GraphModule(self._root, self._graph).forward
        return ReadValues(check, tuple(self._names), self._changes)

    def true_elements(self, mask: Any) -> tuple[torch.Tensor, ...] | None:
        """The indices of a mask's true elements, one tensor a dim; None if it is not known."""
        known = self._known.get(id(mask))
        if known is None or known.traced.dtype is not torch.bool or not known.traced.ndim:
            return None
        with outside_of_modes():
            count = int(known.value.count_nonzero())
        node = self._graph.call_function(torch.ops.aten.count_nonzero.default, (known.node,))
        self._expect(self._graph.call_function(_ITEM, (node,)), count)
        return torch.nonzero_static(mask, size=count).unbind(1)

    def read(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """What `func` reads of a tensor; deferred if it may be."""
        if not self._defers or is_plain(tensor):
            return func(tensor)
        # As it is now: it may be changed in place.
        result = Deferred(func, tensor.detach().clone(), self._number_of)
        self._deferred.append(weakref.ref(result))
        return result

    def has_escaped(self, *, also_delivered: bool) -> bool:
        """Whether a number is held where no plan brings it, as in a queue."""

        def is_held() -> bool:
            found = [each() for each in self._deferred]
            held = [each for each in found if each is not None]
            return any(also_delivered or not each.is_delivered for each in held)

        return is_held() and gc.collect() >= 0 and is_held()

    def _number_of(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        self._defers, defers = False, self._defers
        try:
            return func(tensor)
        finally:
            self._defers = defers

    def _expect(self, node: fx.Node, value: complex) -> None:
        self._reads += 1
        self._graph.call_function(_expect, (node, value))

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
            return self._read(op, args, value)
        if value is not None and op in _SIZED_BY_VALUES and "output_size" not in kwargs:
            return self._of_known_size(op, args, kwargs, value)
        result = op(*args, **kwargs)
        if value is None:
            self._forget_changed(op, args, kwargs)
            return result
        node = self._call(op, args, kwargs)
        for path, traced in _paths(result):
            part = reduce(_item_of, path, value)
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
        return self._known[id(item)].value if isinstance(item, torch.Tensor) else item

    def _read(self, op: OpOverload, args: tuple[Any, ...], value: bool | float) -> bool | float:
        self._expect(self._call(op, args, {}), value)
        return value

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
                self._graph.call_function(_is_equal, (self._part(node, path), expected)), True
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
            node = self._graph.call_function(_item_of, (node, index))
        return node

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        def node(item: Any) -> Any:
            return self._known[id(item)].node if isinstance(item, torch.Tensor) else item

        args, kwargs = map_aggregate((args, kwargs), node)
        self._changes |= schema_of(op).is_mutable
        return self._graph.call_function(op, args, kwargs)

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


class _CountedMasks(TorchFunctionMode):
    """Has what depends on the number of a mask's true elements work with their indices.

    Reads may be deferred. It stands above autograd, so that backwards work with them, too.
    """

    def __init__(self, reader: ValueReader) -> None:
        super().__init__()
        self._reader = reader

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return self._reader.read(func, *args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *value = args
            return func(tensor, self._without_masks(index), *value, **kwargs)
        if func in (torch.masked_select, torch.Tensor.masked_select):
            return self._selected(func, *args, **kwargs)
        if func in (torch.nonzero, torch.Tensor.nonzero):
            return self._nonzero(func, *args, **kwargs)
        if func is torch.tensor and isinstance(args[0], list | tuple):
            return self._made_of_scalars(args[0], kwargs)
        return func(*args, **kwargs)

    def _made_of_scalars(self, data: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """`torch.tensor` of a list of tensors reads their memory, without an op."""
        dtypes = {item.dtype for item in data if isinstance(item, torch.Tensor)}
        if len(dtypes) == 1:
            kwargs = {"dtype": dtypes.pop(), **kwargs}
            data = [item.item() if isinstance(item, torch.Tensor) else item for item in data]
        return torch.tensor(data, **kwargs)

    def _without_masks(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        found = [self._reader.true_elements(part) for part in parts]
        if not any(found):
            return index
        pairs = zip(parts, found, strict=True)
        return tuple(chain.from_iterable(true or (part,) for part, true in pairs))

    def _selected(self, func: Any, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if input.shape != mask.shape:
            return func(input, mask)
        true = self._reader.true_elements(mask)
        return func(input, mask) if true is None else input[true]

    def _nonzero(self, func: Any, input: torch.Tensor, *, as_tuple: bool = False) -> Any:
        true = self._reader.true_elements(input)
        if true is None:
            return func(input, as_tuple=as_tuple)
        return true if as_tuple else torch.stack(true, 1)


@has_side_effect
def _expect(value: complex, expected: complex) -> None:
    """Raises `_OtherValueError` unless the values are equal or both not a number."""
    are_nan = value != value and expected != expected
    if value != expected and not are_nan:
        msg = f"a value that the forward reads from its inputs or buffers was {expected!r} and is "
        raise _OtherValueError(f"{msg}{value!r}")


def _is_equal(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return value.shape == expected.shape and bool(torch.equal(value, expected))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with outside_of_modes():
        return tensor.detach().clone()


def _item_of(items: Sequence[Any], index: int) -> Any:
    return items[index]


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
