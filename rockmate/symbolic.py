"""One capture for every size of the inputs: a joint graph whose sizes are symbols, and the graph at any numbers for them.

The model is traced once with `torch.fx.experimental.symbolic_shapes`: dimensions that have had the same size in every call so far share
a symbol, and what the model's code decides on sizes is recorded as a guard. *Instantiating* the result puts numbers for the symbols:
each symbolic number of the graph becomes the Python number that it is there, each fake tensor one of concrete sizes, strides and
storage, and the nodes that only compute sizes are gone. What is left is a `Capture` like one that was traced at those sizes, for the
cost of copying nodes.

Sizes of 0 and 1 are never symbols: broadcasting makes another graph of them. An instance is refused where a guard does not hold, so
where the model's code, or PyTorch's, might have gone another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate

from rockmate.capture import Capture, capture_joint
from rockmate.errors import UnsupportedModelError
from rockmate.signature import CallSignature

_LEAST_SIZE = 2  # that a symbol stands for
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
        everything = tuple((tensor, dim) for tensor, signature in enumerate(call.tensors) for dim in range(len(signature.shape)))
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
                raise SizesNotCoveredError(f"sizes {known} and {size} make different graphs, as one of them broadcasts or is empty")


class SymbolicCapture:
    """The joint graph of a model for one kind of call, whatever the sizes of its tensors."""

    def __init__(self, model: nn.Module, call: CallSignature, groups: SizeGroups, **options: Any) -> None:
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
        mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        sizes, self._symbols = _symbolic_sizes(self._environment, groups.sizes(call))
        self._capture = capture_joint(model, _symbolic_tensors(mode, call, groups, sizes), call.structure, **options)
        self._template = _Template(self._capture.joint.graph, mode)

    def instance(self, call: CallSignature) -> Capture:
        """The capture at the sizes of `call`.

        Raises:
            SizesNotCoveredError: the symbolic graph may not be the model's at these sizes.
        """
        self._groups.check_symbolic(self._call, call)
        sizes = self._groups.sizes(call)
        values = {symbol: sympy.Integer(size) for symbol, size in zip(self._symbols, sizes, strict=True) if symbol is not None}
        self._check_guards(values)
        graph, copies = self._template.at(values)
        with _use_lazy_graph_module(True):  # its code is never run
            joint = _make_graph_module(self._capture.joint, graph)
        inputs = tuple((copies[node], role) for node, role in self._capture.inputs)
        return replace(self._capture, joint=joint, inputs=inputs)

    def _check_guards(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        environment = self._environment
        for symbol, value in values.items():
            allowed = environment.var_to_range[symbol]
            if not allowed.lower <= value <= allowed.upper:
                raise SizesNotCoveredError(f"a size of {value} is not within {allowed.lower} and {allowed.upper}")
            fixed = environment.replacements.get(symbol, symbol)
            if fixed.xreplace(values) != value:
                raise SizesNotCoveredError(f"a size of {value}, where the model's code needs {fixed}")
        for guard in environment.guards:
            if guard.expr.xreplace(values) is not sympy.true:
                raise SizesNotCoveredError(f"the model's code branches on {guard.expr}")


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
    mode: FakeTensorMode, call: CallSignature, groups: SizeGroups, sizes: Sequence[int | torch.SymInt]
) -> list[torch.Tensor]:
    """The tensors of a call, contiguous ones of symbolic sizes."""
    size_at = {place: size for group, size in zip(groups.places, sizes, strict=True) for place in group}
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
    """A symbolic graph, read once so that copies at numbers are cheap.

    Fake kernels for symbolic sizes now and then give a view memory of its own, or a result more memory than it takes. So a view is
    taken to lie where its argument does, and a new tensor to take what its sizes and strides span.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mode = mode
        self._memories: dict[int, int] = {}  # by the identity of a storage
        self._fixed: list[bool] = []  # whether a storage and its first tensor have nothing symbolic
        self._values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            viewed = self._viewed_memory(node)
            self._values[node] = map_aggregate(node.meta.get("val"), lambda value, viewed=viewed: self._read(value, viewed))

    def _viewed_memory(self, node: fx.Node) -> int | None:
        """The storage of what the node is a view of, by its schema; None if it is no view."""
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view):
            return None
        viewed = self._values[node.all_input_nodes[0]]
        return viewed.memory if isinstance(viewed, _TensorTemplate) else None

    def _read(self, value: Any, viewed: int | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            msg = "the graph has a sparse, lazily conjugated or lazily negated tensor"
            raise UnsupportedModelError(msg)
        storage = value.untyped_storage()._cdata
        memory = self._memories.setdefault(storage, len(self._fixed)) if viewed is None else viewed
        self._memories[storage] = memory  # of a view: so that items and views of it are found there, too
        layout = tuple(map(_expression, (value.storage_offset(), *value.shape, *value.stride())))
        is_fixed = all(isinstance(item, int) for item in layout)
        if memory == len(self._fixed):
            self._fixed.append(is_fixed)
        fixed = value if is_fixed and self._fixed[memory] and viewed is None else None
        return _TensorTemplate(memory, layout, value.dtype, value.device, fixed)

    def at(self, values: Mapping[sympy.Symbol, sympy.Integer]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A copy of the graph at numbers for its symbols, and for each node that is left its copy."""
        return _Copier(self._mode, values).copy(self._graph, self._values)


class _Copier:
    """One copy of a template at numbers for its symbols."""

    def __init__(self, mode: FakeTensorMode, values: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        self._mode = mode
        self._symbols = values
        self._known: dict[sympy.Expr, int] = {}
        self._memories: dict[int, torch.UntypedStorage] = {}

    def copy(self, source: fx.Graph, values: Mapping[fx.Node, Any]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        graph = fx.Graph()
        present: dict[fx.Node, Any] = {}  # a node of the copy, or a number
        for node in source.nodes:
            value = values[node]
            args, kwargs = fx.map_arg((node.args, node.kwargs), present.__getitem__)
            if isinstance(value, _NUMBERS):
                present[node] = self._number(node, value, args, kwargs)
                continue
            copied = present[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copied.meta = {**node.meta, "val": map_aggregate(value, self._instance)} if "val" in node.meta else dict(node.meta)
        return graph, {node: copied for node, copied in present.items() if isinstance(copied, fx.Node)}

    def _number(self, node: fx.Node, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An integer by its expression; others as Python computes them, so that they are rounded the same."""
        if isinstance(value, torch.SymInt):
            return self._integer(value.node.expr)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _integer(self, value: sympy.Expr | int) -> int:
        if isinstance(value, int):
            return value
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = int(value.xreplace(self._symbols))  # pyright: ignore[reportArgumentType]
        return known

    def _instance(self, value: Any) -> Any:
        if not isinstance(value, _TensorTemplate):
            return value
        if value.fixed is not None:
            self._memories.setdefault(value.memory, value.fixed.untyped_storage())
            return value.fixed
        offset, *layout = map(self._integer, value.layout)
        sizes, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        memory = self._memories.get(value.memory)
        if memory is None:
            tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
            self._memories[value.memory] = tensor.untyped_storage()
        else:
            tensor = torch.empty(0, dtype=value.dtype, device="meta").set_(memory, offset, sizes, strides)  # pyright: ignore
        return FakeTensor(self._mode, tensor, value.device)


def _expression(value: Any) -> sympy.Expr | int:
    """A size as an expression in the symbols, a number if it has none."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    return int(expression) if expression.is_number else expression
