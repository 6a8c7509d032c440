"""One capture for every size of the inputs: a joint graph whose sizes are symbols, and the graph at any numbers for them.

The model is traced once with `torch.fx.experimental.symbolic_shapes`: dimensions that have had the same size in every call so far share
a symbol, and what the model's code decides on sizes is recorded as a guard. *Instantiating* the result puts numbers for the symbols:
each symbolic number of the graph becomes the Python number that it is there, each fake tensor one of concrete sizes, strides and
storage, and the nodes that only compute sizes are gone. What is left is a `Capture` like one that was traced at those sizes, for the
cost of copying nodes.

A *generic* capture goes one step further: at sizes of which no two expressions are equal by chance, what the rewrites of the graph find
equal is equal at all sizes. So the graph is rewritten once, and its numbers, which bear names, can be put in afterwards.

Sizes of 0 and 1 are never symbols: broadcasting makes another graph of them. An instance is refused where a guard does not hold, so
where the model's code, or PyTorch's, might have gone another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from rockmate._torch.fake import ConstantSource, DimDynamic, FakeTensor, FakeTensorMode, ShapeEnv
from rockmate._torch.ops import is_op
from rockmate._torch.storage import storage_id
from rockmate.capture.joint import capture_joint
from rockmate.capture.roles import Capture, Role, with_graph
from rockmate.capture.signature import CallSignature
from rockmate.errors import UnsupportedModelError
from rockmate.ops.kernels import dropout_mask

_LEAST_SIZE = 2  # that a symbol stands for
_MAX_DISTANCE = 64  # of generic sizes from those of the sample
_TEMPLATE = "template"  # key in a node's meta


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
        """Raises `SizesNotCoveredError` if the calls differ in a size that no symbol can stand for."""
        for known, size in zip(self.sizes(first), self.sizes(call), strict=True):
            if known != size and min(known, size) < _LEAST_SIZE:
                raise SizesNotCoveredError(
                    f"sizes {known} and {size} make different graphs, as one of them broadcasts or is empty"
                )


class SymbolicCapture:
    """The joint graph of a model for one kind of call, whatever the sizes of its tensors."""

    def __init__(
        self, model: nn.Module, call: CallSignature, groups: SizeGroups, **options: Any
    ) -> None:
        """Traces the model.

        Args:
            model: the module, in the mode that it will be trained in.
            call: a call whose sizes decide wherever the model's code branches on them; its tensors are contiguous.
            groups: its dimensions that share a symbol.
            **options: as for `capture_joint`.

        Raises:
            InvalidSampleError, UnsupportedModelError: as for `capture_joint`.
        """
        self._call, self._groups = call, groups
        self._environment = ShapeEnv()
        self.mode = mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        sizes, self._symbols = _symbolic_sizes(self._environment, groups.sizes(call))
        self._capture = capture_joint(
            model, _symbolic_tensors(mode, call, groups, sizes), call.structure, **options
        )
        self._template = _Template(self._capture.joint.graph, mode)

    def instance(self, call: CallSignature) -> Capture:
        """The capture at the sizes of `call`, not rewritten yet.

        Raises:
            SizesNotCoveredError: the symbolic graph may not be the model's at these sizes.
        """
        return _copied(self._capture, self._template, self.values(call))

    def generic(self, passes: Callable[[Capture], Capture]) -> GenericCapture:
        """The capture at generic sizes, rewritten.

        Args:
            passes: rewrites the captured graph; nodes that it adds have no size that depends on
                the call, dropout masks excepted.

        Raises:
            SizesNotCoveredError: no such sizes were found near those that it was traced at, or a number in it is no integer.
        """
        given, replaced = self.values(self._call), self._environment.replacements
        for nearby in _sizes_nearby(
            {
                symbol: value
                for symbol, value in given.items()
                if replaced.get(symbol, symbol) == symbol
            }
        ):
            values = {
                symbol: sympy.Integer(replaced.get(symbol, symbol).xreplace(nearby))
                for symbol in given
            }
            try:
                self._check_guards(values)
            except SizesNotCoveredError:
                continue
            if self._template.is_generic(values):
                return GenericCapture(self, self._capture, self._template, values, passes)
        raise SizesNotCoveredError("no sizes near the sample's keep all expressions apart")

    def values(self, call: CallSignature) -> dict[sympy.Symbol, sympy.Integer]:
        """The number of each symbol at the sizes of `call`.

        Raises:
            SizesNotCoveredError: the symbolic graph may not be the model's at these sizes.
        """
        self._groups.check_symbolic(self._call, call)
        sizes = self._groups.sizes(call)
        values = {
            symbol: sympy.Integer(size)
            for symbol, size in zip(self._symbols, sizes, strict=True)
            if symbol is not None
        }
        self._check_guards(values)
        return values

    def _check_guards(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        environment = self._environment
        for symbol, value in values.items():
            allowed = environment.var_to_range[symbol]
            if not allowed.lower <= value <= allowed.upper:
                raise SizesNotCoveredError(
                    f"a size of {value} is not within {allowed.lower} and {allowed.upper}"
                )
            fixed = environment.replacements.get(symbol, symbol)
            if fixed.xreplace(values) != value:
                raise SizesNotCoveredError(
                    f"a size of {value}, where the model's code needs {fixed}"
                )
        for guard in environment.guards:
            if guard.expr.xreplace(values) is not sympy.true:
                raise SizesNotCoveredError(f"the model's code branches on {guard.expr}")


class GenericCapture:
    """A symbolic capture at generic sizes, rewritten, whose numbers can be exchanged.

    Attributes:
        capture: at the generic sizes; an argument that is a size is a `Size`.
    """

    def __init__(
        self,
        symbolic: SymbolicCapture,
        capture: Capture,
        template: _Template,
        values: Mapping[sympy.Symbol, sympy.Integer],
        passes: Callable[[Capture], Capture],
    ) -> None:
        """Copies a capture and its template at generic `values`, and rewrites the copy; for `passes` see `SymbolicCapture.generic`."""
        self._symbolic = symbolic
        names, numbers = _SizeNames(), _Numbers(values)
        # The template is read after the passes, since it has to know every node.
        self.capture = passes(_copied(capture, template, values, names))
        self._template = _Template(self.capture.joint.graph, symbolic.mode)
        for node in self.capture.joint.graph.nodes:
            if node.target is dropout_mask:  # written by the rewrite, with the sizes that it saw
                drawn = self._template.layout(node)
                node.args = (
                    *([names.size(numbers.of(item), item) for item in part] for part in drawn),
                    *node.args[2:],
                )

    def instance(self, call: CallSignature) -> Capture:
        """The rewritten capture at the sizes of `call`; `SizesNotCoveredError` as for `SymbolicCapture.instance`."""
        return _copied(self.capture, self._template, self._symbolic.values(call))

    def numbers(self, call: CallSignature) -> SizedNumbers:
        """All that depends on the sizes of `call`; `SizesNotCoveredError` as for `SymbolicCapture.instance`."""
        return self._template.numbers(self._symbolic.values(call), self.capture.inputs)


@dataclass(frozen=True, slots=True)
class SizedNumbers:
    """What a step's sizes come to in one call.

    Attributes:
        by_name: the number of each `Size`.
        num_bytes: of each kind of storage; those of two calls can be compared one by one.
        layouts: for each of the step's inputs a fake tensor with its sizes and strides.
    """

    by_name: Mapping[str, int]
    num_bytes: tuple[int, ...]
    layouts: Mapping[Role, torch.Tensor]

    def are_within(self, others: SizedNumbers) -> bool:
        """Whether no storage is larger than in another call."""
        return all(
            mine <= theirs for mine, theirs in zip(self.num_bytes, others.num_bytes, strict=True)
        )


class Size(int):
    """A number of a generic capture that stands for an expression; generated code calls it by its name."""

    expression: sympy.Expr
    name: str

    def __repr__(self) -> str:
        return self.name


class _SizeNames:
    """Names of expressions, in order of their coming."""

    def __init__(self) -> None:
        self._names: dict[sympy.Expr, str] = {}

    def size(self, value: int, expression: sympy.Expr | int) -> int:
        """A number with what it stands for; itself if that is a number."""
        if isinstance(expression, int):
            return expression
        size = Size(value)
        size.expression = expression
        size.name = self._names.setdefault(expression, f"size_{len(self._names)}")
        return size


def _sizes_nearby(
    values: Mapping[sympy.Symbol, sympy.Integer],
) -> Iterator[dict[sympy.Symbol, sympy.Integer]]:
    """Sizes near the given ones, each moved by another distance, nearest first."""
    for distance in range(1, _MAX_DISTANCE):
        for sign in (1, -1):
            moved = [
                int(value) + sign * (distance + 2 * index)
                for index, value in enumerate(values.values())
            ]
            if min(moved, default=_LEAST_SIZE) >= _LEAST_SIZE:
                yield {
                    symbol: sympy.Integer(size) for symbol, size in zip(values, moved, strict=True)
                }


def _copied(
    capture: Capture,
    template: _Template,
    values: Mapping[sympy.Symbol, sympy.Integer],
    names: _SizeNames | None = None,
) -> Capture:
    graph, copies = template.copy(values, names)
    return with_graph(capture, graph, copies)


def _symbolic_sizes(
    environment: ShapeEnv, sizes: Sequence[int]
) -> tuple[list[int | torch.SymInt], list[sympy.Symbol | None]]:
    """For each size a symbolic one with its symbol; 0 and 1 stay numbers."""
    numbers: list[int | torch.SymInt] = []
    symbols: list[sympy.Symbol | None] = []
    for index, size in enumerate(sizes):
        if size < _LEAST_SIZE:
            numbers.append(size)
            symbols.append(None)
            continue
        source = ConstantSource(f"size_{index}")
        symbol = environment.create_symbol(size, source, DimDynamic.DYNAMIC)
        number = environment.create_symintnode(symbol, hint=size, source=source)
        assert isinstance(symbol, sympy.Symbol)
        assert isinstance(number, torch.SymInt)
        numbers.append(number)
        symbols.append(symbol)
    return numbers, symbols


def _symbolic_tensors(
    mode: FakeTensorMode,
    call: CallSignature,
    groups: SizeGroups,
    sizes: Sequence[int | torch.SymInt],
) -> list[torch.Tensor]:
    """The tensors of a call, contiguous ones of symbolic sizes."""
    size_at = {
        place: size for group, size in zip(groups.places, sizes, strict=True) for place in group
    }
    tensors = []
    with mode:
        for index, signature in enumerate(call.tensors):
            shape = [size_at[index, dim] for dim in range(len(signature.shape))]
            tensor = torch.empty(shape, dtype=signature.dtype, device=signature.device)
            tensors.append(tensor.requires_grad_(signature.requires_grad))
    return tensors


@dataclass(frozen=True, slots=True)
class _TensorTemplate:
    """A fake tensor of symbolic sizes.

    Attributes:
        memory: which storage it lies in; the first tensor of a storage tells its size.
        layout: offset, then sizes, then strides.
        dtype: its dtype.
        device: its device.
        fixed: the fake tensor itself, if nothing in it or its storage is symbolic.
    """

    memory: int
    layout: tuple[sympy.Expr | int, ...]
    dtype: torch.dtype
    device: torch.device
    fixed: torch.Tensor | None


class _Template:
    """A graph with symbols for its sizes, read once so that copies at numbers are cheap.

    Fake kernels for symbolic sizes now and then give a view memory of its own, or a result more memory than it takes. So a view is
    taken to lie where its argument does, and a new tensor to take what its sizes and strides span.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mode = mode
        self._memories: dict[int, int] = {}  # by the identity of a storage
        self._first: list[_TensorTemplate] = []  # tensor of each storage
        self._expressions: dict[sympy.Expr, sympy.Expr | int] = {}
        self._values: dict[fx.Node, Any] = {}  # tensors as templates, integers as expressions
        for node in graph.nodes:
            self._values[node] = self._read_node(node)

    def _read_node(self, node: fx.Node) -> Any:
        known = node.meta.get(
            _TEMPLATE
        )  # of a copy at generic sizes: its expressions, where its fake tensors have numbers
        if isinstance(known, tuple | list):
            return type(known)(
                self._read(*pair, None) for pair in zip(known, node.meta["val"], strict=True)
            )
        if known is not None:
            return self._read(known, node.meta["val"], None)
        viewed = self._viewed_memory(node)
        return map_aggregate(node.meta.get("val"), lambda value: self._read(None, value, viewed))

    def _viewed_memory(self, node: fx.Node) -> int | None:
        """The storage of what the node is a view of, by its schema; None if it is no view."""
        if not (is_op(node.target) and node.target.is_view):
            return None
        viewed = self._values[node.all_input_nodes[0]]
        return viewed.memory if isinstance(viewed, _TensorTemplate) else None

    def _read(self, known: Any, value: Any, viewed: int | None) -> Any:
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
        layout = (
            known.layout
            if known
            else tuple(
                map(self._expression, (value.storage_offset(), *value.shape, *value.stride()))
            )
        )
        is_new = memory == len(self._first)
        is_fixed = (
            all(isinstance(item, int) for item in layout)
            and (is_new or self._first[memory].fixed is not None)
            and viewed is None
        )
        template = _TensorTemplate(
            memory, layout, value.dtype, value.device, value if is_fixed else None
        )
        if is_new:
            self._first.append(template)
        return template

    def _expression(self, value: int | torch.SymInt) -> sympy.Expr | int:
        """A size as an expression in the symbols, the same for all ways of writing it; a number if it has none."""
        if not isinstance(value, torch.SymInt):
            return value
        written = value.node.expr
        known = self._expressions.get(written)
        if known is None:
            expression = sympy.expand(value.node.shape_env.simplify(written))
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

    def is_generic(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
        """Whether at these numbers no two expressions of the tensors' layouts are equal that are not always equal."""
        numbers = _Numbers(values)
        items = {item for tensor in self._tensors() for item in tensor.layout}
        return len({numbers.of(item) for item in items}) == len(items)

    def layout(
        self, node: fx.Node
    ) -> tuple[tuple[sympy.Expr | int, ...], tuple[sympy.Expr | int, ...]]:
        """Sizes and strides of a node's tensor."""
        return _sizes_and_strides(self._values[node].layout)

    def numbers(
        self, values: Mapping[sympy.Symbol, sympy.Integer], inputs: Sequence[tuple[fx.Node, Role]]
    ) -> SizedNumbers:
        """See `GenericCapture.numbers`."""
        numbers, copier = _Numbers(values), _Copier(self._mode, values)
        kinds = dict.fromkeys((first.dtype.itemsize, first.layout) for first in self._first)
        return SizedNumbers(
            by_name={size.name: numbers.of(size.expression) for size in self._named_sizes},
            num_bytes=tuple(itemsize * numbers.span(layout) for itemsize, layout in kinds),
            layouts={role: copier.tensor(self._values[node]) for node, role in inputs},
        )

    @cached_property
    def _named_sizes(self) -> tuple[Size, ...]:
        """One of each `Size` among the arguments of nodes."""
        found: dict[sympy.Expr, Size] = {}

        def note(value: Any) -> Any:
            if isinstance(value, Size):
                found[value.expression] = value
            return value

        for node in self._graph.nodes:
            map_aggregate((node.args, node.kwargs), note)
        return tuple(found.values())

    def copy(
        self, values: Mapping[sympy.Symbol, sympy.Integer], names: _SizeNames | None
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A copy of the graph at numbers for its symbols, and for each node that is left its copy.

        Args:
            values: the numbers.
            names: given where the copy is to be a template itself: arguments become a `Size`, and nodes keep their expressions.
        """
        return _Copier(self._mode, values, names).copy(self._graph, self._values)


class _Numbers:
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


class _Copier:
    """One copy of a template at numbers for its symbols."""

    def __init__(
        self,
        mode: FakeTensorMode,
        values: Mapping[sympy.Symbol, sympy.Integer],
        names: _SizeNames | None = None,
    ) -> None:
        self._mode = mode
        self._numbers = _Numbers(values)
        self._names = names
        self._memories: dict[int, torch.UntypedStorage] = {}

    def copy(
        self, source: fx.Graph, values: Mapping[fx.Node, Any]
    ) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
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
            copied.meta.pop(_TEMPLATE, None)
            if "val" in node.meta:
                copied.meta["val"] = map_aggregate(value, self.tensor)
            if self._names is not None:
                copied.meta[_TEMPLATE] = value
        return graph, {
            node: copied for node, copied in present.items() if isinstance(copied, fx.Node)
        }

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


def _sizes_and_strides(layout: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    num_dims = len(layout) // 2
    return layout[1 : 1 + num_dims], layout[1 + num_dims :]
