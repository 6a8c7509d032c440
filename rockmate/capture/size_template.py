"""A captured graph with expressions for its sizes, from which graphs at any sizes are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rockmate._torch.dispatch import is_op
from rockmate._torch.fake import FakeTensor, FakeTensorMode
from rockmate._torch.storage import storage_id
from rockmate.capture.roles import Role
from rockmate.capture.signature import CallSignature
from rockmate.errors import UnsupportedModelError
from rockmate.ops.kernel_layouts import CLONES, cloned

if TYPE_CHECKING:
    import sympy

TEMPLATE = "template"  # key in a node's meta


@dataclass(frozen=True, slots=True)
class SizedNumbers:
    """What a step's sizes come to in one call.

    Attributes:
        values: the number of any expression.
        num_bytes: of each kind of storage; those of two calls can be compared one by one.
        layouts: for each of the step's inputs a fake tensor with its sizes and strides.
    """

    values: SizeValues
    num_bytes: tuple[int, ...]
    layouts: Mapping[Role, torch.Tensor]

    def are_within(self, others: SizedNumbers) -> bool:
        """Whether no storage is larger than in another call."""
        return all(
            mine <= theirs for mine, theirs in zip(self.num_bytes, others.num_bytes, strict=True)
        )


class Size(int):
    """A number of a generic capture that stands for an expression.

    Generated code calls it by its name.
    """

    expression: sympy.Expr
    name: str

    def __repr__(self) -> str:
        return self.name


class SizeNames:
    """Names of expressions, in order of their coming."""

    def __init__(self, prefix: str = "size") -> None:
        self._prefix = prefix
        self._names: dict[sympy.Expr, str] = {}

    def size(self, value: int, expression: sympy.Expr | int) -> int:
        """A number with what it stands for; itself if that is a number."""
        if isinstance(expression, int):
            return expression
        size = Size(value)
        size.expression = expression
        size.name = self._names.setdefault(expression, f"{self._prefix}_{len(self._names)}")
        return size


@dataclass(frozen=True, slots=True)
class _TensorTemplate:
    """A fake tensor of symbolic sizes.

    Attributes:
        memory: which storage it lies in; the first tensor of a storage tells its size.
        layout: offset, then sizes, then strides.
        fixed: the fake tensor itself, if nothing in it or its storage is symbolic.
    """

    memory: int
    layout: tuple[sympy.Expr | int, ...]
    dtype: torch.dtype
    device: torch.device
    fixed: torch.Tensor | None


class GraphTemplate:
    """A graph with symbols for its sizes, read once so that copies at numbers are cheap.

    Fake kernels for symbolic sizes now and then give a view memory of its own, or a result more
    memory than it takes. So a view is taken to lie where its argument does, and a new tensor to
    take what its sizes and strides span.
    """

    def __init__(
        self,
        graph: fx.Graph,
        mode: FakeTensorMode,
        sizes: Mapping[int, sympy.Expr | int] = MappingProxyType({}),
    ) -> None:
        """Reads a graph.

        Args:
            graph: the graph.
            mode: of its fake tensors.
            sizes: of a graph at generic sizes, what each number stands for.
        """
        self._graph, self._mode, self._sizes = graph, mode, sizes
        self._memories: dict[int, int] = {}  # by the identity of a storage
        self._first: list[_TensorTemplate] = []  # tensor of each storage
        self._expressions: dict[sympy.Expr, sympy.Expr | int] = {}
        self._values: dict[fx.Node, Any] = {}  # tensors as templates, integers as expressions
        for node in graph.nodes:
            self._values[node] = self._read_node(node)

    def _read_node(self, node: fx.Node) -> Any:
        viewed = self._viewed_memory(node)
        value = map_aggregate(node.meta.get("val"), lambda value: self._read(value, viewed))
        if self._sizes:
            node.meta[TEMPLATE] = value
        return value

    def _viewed_memory(self, node: fx.Node) -> int | None:
        """The storage of what the node is a view of, by its schema; None if it is no view."""
        if not (is_op(node.target) and node.target.is_view):
            return None
        viewed = self._values[node.all_input_nodes[0]]
        return viewed.memory if isinstance(viewed, _TensorTemplate) else None

    def _read(self, value: Any, viewed: int | None) -> Any:
        if isinstance(value, torch.SymInt):
            return self._expression(value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            msg = "the graph has a sparse, lazily conjugated or lazily negated tensor"
            raise UnsupportedModelError(msg)
        storage = storage_id(value)
        memory = self._memories.setdefault(storage, len(self._first)) if viewed is None else viewed
        self._memories[storage] = (
            memory  # of a view: so that items and views of it are found there, too
        )
        layout = tuple(
            map(self._expression, (value.storage_offset(), *value.shape, *value.stride()))
        )
        is_new = memory == len(self._first)
        is_fixed = (
            all(isinstance(item, int) for item in layout)
            and (is_new or self._first[memory].fixed is not None)
            and viewed is None
            and not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
        )
        template = _TensorTemplate(
            memory, layout, value.dtype, value.device, value if is_fixed else None
        )
        if is_new:
            self._first.append(template)
        return template

    def _expression(self, value: int | torch.SymInt) -> sympy.Expr | int:
        """A size as an expression in the symbols, the same for all ways of writing it.

        A number if it has none. At generic sizes a number tells what it stands for.
        """
        if not isinstance(value, torch.SymInt):
            return self._sizes.get(value, value)
        written = value.node.expr
        known = self._expressions.get(written)
        if known is None:
            expression = value.node.shape_env.simplify(written).expand()
            known = self._expressions[written] = (
                int(expression) if expression.is_number else expression
            )
        return known

    def _tensors(self) -> Iterator[_TensorTemplate]:
        for value in self._values.values():
            yield from (
                item
                for item in (value if isinstance(value, tuple | list) else (value,))
                if isinstance(item, _TensorTemplate)
            )

    def sizes(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> dict[int, list[Any]]:
        """For each number in layouts the expressions that come to it at these values."""
        numbers, found = SizeValues(values), dict[int, list[Any]]()
        for item in dict.fromkeys(item for each in self._tensors() for item in each.layout):
            found.setdefault(numbers.of(item), []).append(item)
        return found

    def numbers(
        self, values: Mapping[sympy.Symbol, sympy.Integer], inputs: Sequence[tuple[fx.Node, Role]]
    ) -> SizedNumbers:
        """See `GenericCapture.numbers`."""
        numbers, copier = SizeValues(values), _Copier(self._mode, values)
        kinds = dict.fromkeys((first.dtype.itemsize, first.layout) for first in self._first)
        return SizedNumbers(
            values=numbers,
            num_bytes=tuple(itemsize * numbers.span(layout) for itemsize, layout in kinds),
            layouts={role: copier.tensor(self._values[node]) for node, role in inputs},
        )

    def copy(
        self, values: Mapping[sympy.Symbol, sympy.Integer], names: SizeNames | None
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A copy of the graph at numbers for its symbols, and for each node that is left its copy.

        Args:
            values: the numbers.
            names: given where the copy is to be a template itself: arguments become a `Size`, and
                nodes keep their expressions.
        """
        return _Copier(self._mode, values, names).copy(self._graph, self._values)


class SizeValues:
    """The numbers that expressions come to."""

    def __init__(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        self._symbols = values
        self._known: dict[sympy.Expr, int] = {}

    def of(self, value: sympy.Expr | int) -> int:
        """The number of an expression."""
        if isinstance(value, int):
            return value
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = int(value.xreplace(self._symbols))  # pyright: ignore[reportArgumentType]
        return known

    def span(self, layout: tuple[sympy.Expr | int, ...]) -> int:
        """Elements from the first to the last of a tensor without offset."""
        sizes, strides = ([self.of(item) for item in part] for part in _sizes_and_strides(layout))
        return (
            1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            if all(sizes)
            else 0
        )


def are_equal(sizes: Iterable[Sequence[Any]], values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether the expressions of each group are equal at some numbers for their symbols."""
    numbers = SizeValues(values)
    return all(len(set(map(numbers.of, group))) == 1 for group in sizes)


class _Copier:
    """One copy of a template at numbers for its symbols."""

    def __init__(
        self,
        mode: FakeTensorMode,
        values: Mapping[sympy.Symbol, sympy.Integer],
        names: SizeNames | None = None,
    ) -> None:
        self._mode, self._numbers, self._names = mode, SizeValues(values), names
        self._memories: dict[int, torch.UntypedStorage] = {}

    def copy(
        self, source: fx.Graph, values: Mapping[fx.Node, Any]
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        import sympy  # takes half a second, and a first plan needs none of it

        graph = fx.Graph()
        present: dict[fx.Node, Any] = {}  # a node of the copy, or a number
        for node in source.nodes:
            value = values[node]
            args, kwargs = map_aggregate(
                (node.args, node.kwargs), lambda item: self._argument(item, present)
            )  # pyright: ignore
            if isinstance(value, sympy.Expr | int):
                number = present[node] = self._numbers.of(value)
                if self._names is not None:
                    present[node] = self._names.size(number, value)
                continue
            if isinstance(value, torch.SymFloat | torch.SymBool):
                present[node] = self._computed(node, args, kwargs)
                continue
            copied = present[node] = graph.create_node(
                node.op, node.target, args, kwargs, node.name, node.type
            )
            copied.meta = dict(node.meta)
            copied.meta.pop(TEMPLATE, None)
            if "val" in node.meta:
                copied.meta["val"] = map_aggregate(value, self.tensor)
            if node.target in CLONES and isinstance(value, _TensorTemplate):
                self._lay_out_clone(copied, value)
        return graph, {
            node: copied for node, copied in present.items() if isinstance(copied, fx.Node)
        }

    def _lay_out_clone(self, node: fx.Node, value: _TensorTemplate) -> None:
        """Gives the clone of a memory as much of it as the memory has at these sizes."""
        given: Any = node.args[0]
        with self._mode:
            made = cloned(given.meta["val"], node.meta["val"])
        node.meta["val"], self._memories[value.memory] = made, made.untyped_storage()

    def _argument(self, item: Any, present: Mapping[fx.Node, Any]) -> Any:
        if isinstance(item, fx.Node):
            return present[item]
        return self._numbers.of(item.expression) if isinstance(item, Size) else item

    def _computed(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A number that is no integer, as Python computes it, so that it is rounded the same."""
        if self._names is not None:
            raise SizesNotCoveredError(
                f"{node.name} is a number that depends on sizes and is no integer"
            )
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def tensor(self, value: Any) -> Any:
        """A fake tensor for a template; anything else as it is."""
        if not isinstance(value, _TensorTemplate):
            return value
        if value.fixed is not None:
            self._memories.setdefault(value.memory, value.fixed.untyped_storage())
            return value.fixed
        sizes, strides = (
            [self._numbers.of(item) for item in part] for part in _sizes_and_strides(value.layout)
        )
        memory = self._memories.get(value.memory)
        if memory is None:
            tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
            self._memories[value.memory] = tensor.untyped_storage()
        else:
            offset = self._numbers.of(value.layout[0])
            tensor = torch.empty(0, dtype=value.dtype, device="meta").set_(
                memory, offset, sizes, strides
            )  # pyright: ignore
        return FakeTensor(self._mode, tensor, value.device)


def layout_of_node(node: fx.Node, names: SizeNames) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a node's tensor; in a generic capture each is a `Size`.

    Args:
        node: of a captured graph.
        names: gives the names of those.
    """
    fake, known = node.meta["val"], node.meta.get(TEMPLATE)
    if known is None:
        return tuple(fake.shape), tuple(fake.stride())
    sizes, strides = _sizes_and_strides(known.layout)
    return (
        tuple(map(names.size, fake.shape, sizes)),
        tuple(map(names.size, fake.stride(), strides)),
    )


def _sizes_and_strides(layout: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    num_dims = len(layout) // 2
    return layout[1 : 1 + num_dims], layout[1 + num_dims :]


MIN_SYMBOLIC_SIZE = 2  # that a symbol stands for


class SizesNotCoveredError(Exception):
    """A symbolic capture says nothing of a call's sizes; the text says why."""


@dataclass(frozen=True, slots=True)
class SizeGroups:
    """Which dimensions of a call's tensors have one size together.

    Attributes:
        places: of each group the (tensor, dimension) pairs that share its size.
    """

    places: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, call: CallSignature) -> SizeGroups:
        """The dimensions that have one size in `call`."""
        everything = tuple(
            (tensor, dim)
            for tensor, signature in enumerate(call.tensors)
            for dim in range(len(signature.shape))
        )
        return cls((everything,)).refined(call)

    def refined(self, call: CallSignature) -> SizeGroups:
        """These groups, each split into those of one size in `call`."""
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, group in enumerate(self.places):
            for tensor, dim in group:
                parts.setdefault((index, call.tensors[tensor].shape[dim]), []).append((tensor, dim))
        return SizeGroups(tuple(map(tuple, parts.values())))

    def sizes(self, call: CallSignature) -> tuple[int, ...]:
        """The size of each group in `call`, which `refined` does not split."""
        return tuple(call.tensors[group[0][0]].shape[group[0][1]] for group in self.places)

    def check_symbolic(self, first: CallSignature, call: CallSignature) -> None:
        """Raises `SizesNotCoveredError` if calls differ in a size that no symbol can stand for."""
        for known, size in zip(self.sizes(first), self.sizes(call), strict=True):
            if known != size and min(known, size) < MIN_SYMBOLIC_SIZE:
                raise SizesNotCoveredError(
                    f"sizes {known} and {size} make different graphs, as one of them broadcasts or "
                    "is empty"
                )
