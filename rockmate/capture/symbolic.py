"""One capture for every size of the inputs.

A joint graph whose sizes are symbols, and the graph at any numbers for them.

The model is traced once with `torch.fx.experimental.symbolic_shapes`: dimensions that have had the
same size in every call so far share a symbol, and what the model's code decides on sizes is
recorded as a guard. *Instantiating* the result puts numbers for the symbols: each symbolic number
of the graph becomes the Python number that it is there, each fake tensor one of concrete sizes,
strides and storage, and the nodes that only compute sizes are gone. What is left is a `Capture`
like one that was traced at those sizes, for the cost of copying nodes.

A *generic* capture goes one step further: at sizes of which no two expressions are equal by chance,
what the rewrites of the graph find equal is equal at all sizes. So the graph is rewritten once, and
its numbers, which bear names, can be put in afterwards. Expressions that guards make equal are
found by their numbers, at several sizes, and compared again at those of each call.

Sizes of 0 and 1 are never symbols: broadcasting makes another graph of them. An instance is refused
where a guard does not hold, so where the model's code, or PyTorch's, might have gone another way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from rockmate._torch.fake import FakeTensorMode
from rockmate._torch.symbolic_sizes import ConstantSource, DimDynamic, ShapeEnv
from rockmate.capture.fake_device import fake_device_tensors, move_to
from rockmate.capture.joint import capture_joint
from rockmate.capture.read_values import SampleValues
from rockmate.capture.roles import Capture, Role, RoleKind, traced_calls, with_graph
from rockmate.capture.signature import CallSignature
from rockmate.capture.size_template import (
    MIN_SYMBOLIC_SIZE,
    GraphTemplate,
    SizedNumbers,
    SizeGroups,
    SizeNames,
    SizesNotCoveredError,
    are_equal,
    layout_of_node,
)
from rockmate.ops.convolutions import MADE_BY_LAYOUT
from rockmate.state.call_state import lengths_as_sizes

_MAX_DISTANCE = 64  # of generic sizes from those of the sample


class SymbolicCapture:
    """The joint graph of a model for one kind of call, whatever the sizes of its tensors.

    Attributes:
        mode: of its fake tensors.
        capture: with symbols for sizes; the values that it reads are those of the call traced.
        template: its graph.
    """

    def __init__(
        self,
        model: nn.Module,
        call: CallSignature,
        groups: SizeGroups,
        *,
        device: torch.device | None = None,
        values: SampleValues | None = None,
        **options: Any,
    ) -> None:
        """Traces the model.

        Args:
            model: the module, in the mode that it will be trained in.
            call: a call whose sizes decide wherever the model's code branches on them; its tensors
                are contiguous. Carriers of numbers that are read stand behind those of `values`.
            groups: its dimensions that share a symbol; those in no group are numbers.
            device: that the step is planned for, if the model is on another kind of device.
            values: what the forward may read values of; None if it reads none.
            **options: as for `capture_joint`.

        Raises:
            InvalidSampleError, UnsupportedModelError: as for `capture_joint`.
        """
        self._call, self._groups = call, groups
        self._environment = ShapeEnv()
        self.mode = mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        numbers = enumerate(groups.sizes(call))
        sizes = [_symbolic_size(self._environment, index, size) for index, size in numbers]
        self._symbols = [
            each.node.expr if isinstance(each, torch.SymInt) else None for each in sizes
        ]
        traced = call if device is None else call.on(torch.device("cpu"))
        tensors = _symbolic_tensors(mode, traced, groups, sizes)
        fakes = fake_device_tensors(model, [], device, mode) if device else nullcontext()
        self._num_inputs = len(tensors) - (values.num_carriers if values else 0)
        with fakes, lengths_as_sizes(model):
            self.capture = capture_joint(model, tensors, call.structure, values=values, **options)
        if device is not None:
            move_to(self.capture.joint, device)
        self.template = GraphTemplate(self.capture.joint.graph, mode)

    def instance(self, call: CallSignature) -> Capture:
        """The capture at the sizes of `call`, not rewritten yet.

        Raises:
            SizesNotCoveredError: the symbolic graph may not be the model's at these sizes.
        """
        capture = self.copied(self.capture, self.template, self.values(call))
        values = [node.meta.get("val") for node in capture.joint.graph.nodes]
        for each in filter(lambda value: isinstance(value, torch.Tensor), values):
            if any(not isinstance(size, int) for size in (*each.shape, *each.stride())):
                raise SizesNotCoveredError("sizes that coincide in the sample do not in general")
        return capture

    def copied(
        self,
        capture: Capture,
        template: GraphTemplate,
        values: Mapping[sympy.Symbol, sympy.Integer],
        names: SizeNames | None = None,
    ) -> Capture:
        """A copy of a capture at numbers for its symbols, without carriers."""
        graph, copies = template.copy(values, names)
        capture = replace(with_graph(capture, graph, copies), traced=traced_calls(graph))
        inputs = list[tuple[fx.Node, Role]]()
        for node, role in capture.inputs:
            if role.kind is RoleKind.INPUT and role.index >= self._num_inputs:
                graph.erase_node(node)
            else:
                inputs.append((node, role))
        return replace(capture, inputs=tuple(inputs))

    def generic(
        self, passes: Callable[[Capture], Capture], call: CallSignature | None = None
    ) -> GenericCapture:
        """The capture at generic sizes, rewritten.

        Args:
            passes: rewrites the captured graph; nodes that it adds have sizes and strides that
                others have, too, or that are the same in all calls.
            call: of other sizes, as they go together.

        Raises:
            SizesNotCoveredError: no such sizes were found near those that it was traced at, or a
                number in it is no integer.
        """
        given = self.values(self._call)
        other = given if call is None else self.values(call)
        replaced = _solved(self._environment, given)
        free = {symbol: given[symbol] for symbol in given if replaced[symbol] == symbol}
        for nearby in _sizes_nearby(free, [int(other[each] - size) for each, size in free.items()]):
            values = {
                symbol: sympy.Integer(size.xreplace(nearby)) for symbol, size in replaced.items()
            }
            try:
                self._check_guards(values)
            except SizesNotCoveredError:
                continue
            sizes = self.template.sizes(values)
            if are_equal(sizes.values(), given) and are_equal(sizes.values(), other):
                return GenericCapture(self, values, passes)
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
        values: Mapping[sympy.Symbol, sympy.Integer],
        passes: Callable[[Capture], Capture],
    ) -> None:
        """Copies a capture at generic `values`, and rewrites the copy.

        For `passes` see `SymbolicCapture.generic`.
        """
        self._symbolic = symbolic
        sizes = symbolic.template.sizes(values)
        self._equal = [group for group in sizes.values() if len(group) > 1]
        names = SizeNames()
        # The template is read after the passes, since it has to know every node.
        self.capture = passes(symbolic.copied(symbolic.capture, symbolic.template, values, names))
        self._template = GraphTemplate(
            self.capture.joint.graph,
            symbolic.mode,
            {number: group[0] for number, group in sizes.items()},
        )
        for node in self.capture.joint.graph.nodes:
            if node.target in MADE_BY_LAYOUT:  # written by the rewrite, with the sizes that it saw
                node.args = (*map(list, layout_of_node(node, names)), *node.args[2:])

    def instance(self, call: CallSignature) -> Capture:
        """The rewritten capture at the sizes of `call`.

        `SizesNotCoveredError` as for `SymbolicCapture.instance`.
        """
        return self._symbolic.copied(self.capture, self._template, self._values(call))

    def numbers(self, call: CallSignature) -> SizedNumbers:
        """All that depends on the sizes of `call`.

        `SizesNotCoveredError` as for `SymbolicCapture.instance`.
        """
        return self._template.numbers(self._values(call), self.capture.inputs)

    def _values(self, call: CallSignature) -> dict[sympy.Symbol, sympy.Integer]:
        values = self._symbolic.values(call)
        if not are_equal(self._equal, values):
            raise SizesNotCoveredError("sizes differ that were equal in every call before")
        return values


def _solved(environment: ShapeEnv, symbols: Iterable[sympy.Symbol]) -> dict[sympy.Symbol, Any]:
    """Symbols that linear guards leave no choice as expressions in others, which stand as such."""
    solved: dict[sympy.Symbol, Any] = {each: environment.simplify(each) for each in symbols}
    equal: list[Any] = [each.expr for each in environment.guards if isinstance(each.expr, sympy.Eq)]
    for each in equal:
        difference: Any = environment.simplify(each.lhs - each.rhs).xreplace(solved).expand()
        for symbol in sorted(difference.free_symbols, key=str):
            factor = difference.coeff(symbol)
            rest = sympy.expand(symbol - difference / (factor or 1))
            is_whole = all(part.is_integer for part in rest.as_coefficients_dict().values())
            if factor.is_Integer and is_whole and not rest.has(symbol):
                solved = {name: size.xreplace({symbol: rest}) for name, size in solved.items()}
                break
    return solved


def _sizes_nearby(
    values: Mapping[sympy.Symbol, sympy.Integer], way: Sequence[int]
) -> Iterator[dict[sympy.Symbol, sympy.Integer]]:
    """Sizes near the given ones, nearest first: each by another distance, or on the way of a call.

    On that way, what sizes have in common stays so: sums, products with constants, divisors. Sizes
    that do not differ in the call stay as they are at last.
    """
    along = [step // (math.gcd(*way) or 1) for step in way]
    ways = itertools.product((1, 0), range(1, _MAX_DISTANCE), (1, -1), ([0] * len(along), along))
    for apart, distance, sign, steps in ways:
        moved = [
            int(value) + sign * (distance * step or apart * (distance + 2 * index))
            for index, (value, step) in enumerate(zip(values.values(), steps, strict=True))
        ]
        if (apart or any(steps)) and min(moved, default=MIN_SYMBOLIC_SIZE) >= MIN_SYMBOLIC_SIZE:
            yield {symbol: sympy.Integer(size) for symbol, size in zip(values, moved, strict=True)}


def _symbolic_size(environment: ShapeEnv, index: int, size: int) -> int | torch.SymInt:
    """The size of a group as a symbol; 0 and 1 stay numbers."""
    if size < MIN_SYMBOLIC_SIZE:
        return size
    source = ConstantSource(f"size_{index}")
    symbol = environment.create_symbol(size, source, DimDynamic.DYNAMIC)
    number = environment.create_symintnode(symbol, hint=size, source=source)
    assert isinstance(number, torch.SymInt)
    return number


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
            shape = [size_at.get((index, dim), size) for dim, size in enumerate(signature.shape)]
            tensor = torch.empty(shape, dtype=signature.dtype, device=signature.device)
            tensors.append(tensor.requires_grad_(signature.requires_grad))
    return tensors
