"""The backward of a step whose loss leaves outputs out.

Autograd gives an output outside the loss an undefined tangent, None. What depends on such tangents
alone stays undefined: its ops do not run, and its parameters keep their `.grad`. Zeros in place of
the tangent would not be the same. An optimizer moves a parameter with a zero gradient, and zero
times infinity is no number.

An op that reads undefined and defined gradients is

- a sum of two gradients: its result is the defined one;
- the backward of an opaque module: it takes None for an undefined gradient;
- any other op, such as the concatenation behind a split: it reads zeros, as in autograd.

The variant needs no more memory than the backward with all tangents. A copy of the defined operand
takes the place of a sum's result. Zeros exist during the one op that reads them, in place of the
value that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from rockmate.capture.opaque_call import OpaqueBackward
from rockmate.capture.roles import Role
from rockmate.capture.size_template import SizeNames, layout_of_node
from rockmate.errors import BackwardError
from rockmate.ops.rng import exchange_random_state
from rockmate.runtime.direct_call import compiled
from rockmate.runtime.program import Argument, ArgumentKind, EmittedFunction

_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.add.out}
_CALLS = ("call_function", "call_method")
# Methods of the sink that take a gradient.
_ACCUMULATIONS = {"accumulate", "accumulate_matmul", "accumulate_embedding"}
# Calls with an effect beside their result.
_EFFECTS = {*_ACCUMULATIONS, "skip", "fire_hooks", "send", "sent", exchange_random_state}


def variants_of(
    graph: fx.Graph, arguments: Sequence[Argument], sources: Mapping[fx.Node, fx.Node]
) -> Callable[[frozenset[int]], EmittedFunction]:
    """Writes a backward without the tangents of some outputs, each variant at its first use.

    Args:
        graph: the backward with all tangents, whose ops direct calls may replace afterwards.
        arguments: its arguments, in order.
        sources: node of `graph` -> node of the joint graph whose value it holds.
    """
    targets = {node: node.target for node in graph.nodes}

    @cache
    def without(undefined: frozenset[int]) -> EmittedFunction:
        variant, copies = fx.Graph(), {}
        variant.output(variant.graph_copy(graph, copies))
        for node, copied in copies.items():
            copied.target = targets[node]
        of_copies = {copies[node]: of for node, of in sources.items()}
        _VariantWriter(variant, of_copies).leave_out(arguments, undefined)
        inputs, kept = variant.find_nodes(op="placeholder"), list[Argument]()
        for node, argument in zip(inputs, arguments, strict=True):
            if node.users:
                kept.append(argument)
            else:
                variant.erase_node(node)
        return compiled(variant, kept)

    return without


class _VariantWriter:
    """Takes out of a backward what depends on undefined tangents alone.

    A value that depends on no tangent is neither defined nor undefined.
    """

    def __init__(self, graph: fx.Graph, sources: Mapping[fx.Node, fx.Node]) -> None:
        self._graph, self._sources = graph, dict(sources)
        self._names = SizeNames("gradient_size")
        self._defined, self._undefined = set[fx.Node](), set[fx.Node]()

    def leave_out(self, arguments: Sequence[Argument], undefined: frozenset[int]) -> None:
        """Removes what depends on the tangents of these outputs alone."""
        for node, argument in zip(self._graph.find_nodes(op="placeholder"), arguments, strict=True):
            if argument.kind is ArgumentKind.TANGENT:
                assert isinstance(argument.source, Role)
                is_undefined = argument.source.index in undefined
                (self._undefined if is_undefined else self._defined).add(node)
        for node in list(self._graph.nodes):
            if node.op in _CALLS:
                self._visit(node)
            elif node.op == "output":
                self._replace_undefined(node, lambda _: None)
        for node in reversed(list(self._graph.nodes)):
            has_effect = node.target in _EFFECTS and node not in self._undefined
            if node.op in _CALLS and not node.users and not has_effect:
                self._graph.erase_node(node)

    def _visit(self, node: fx.Node) -> None:
        """Changes one call, and notes whether its result is defined."""
        is_defined = not self._defined.isdisjoint(node.all_input_nodes)
        if self._undefined.isdisjoint(node.all_input_nodes):
            if is_defined:
                self._defined.add(node)
            return
        is_accumulation = node.target in _ACCUMULATIONS
        if is_accumulation:
            is_final: Any = {"is_final": node.kwargs["is_final"]}
            with self._graph.inserting_before(node):  # a partial gradient is undefined
                self._graph.call_method("skip", node.args[:2], is_final)
        if is_accumulation or not is_defined:
            self._undefined.add(node)
            return
        self._defined.add(node)
        if isinstance(node.target, OpaqueBackward):
            self._replace_undefined(node, lambda _: None)
        elif (
            node.target in _SUMS  # of gradients, as autograd adds up those of several readers
            and len(node.all_input_nodes) == len(node.args) == 2
            and node.kwargs.keys() <= {"out"}
        ):
            self._replace_sum(node)
        else:
            zeros: dict[fx.Node, fx.Node] = {}
            self._replace_undefined(
                node, lambda value: zeros.get(value) or self._zeros(value, node, zeros)
            )

    def _replace_sum(self, node: fx.Node) -> None:
        """Replaces a sum of two gradients by the defined one, or by a copy of it."""
        (operand,) = (each for each in node.all_input_nodes if each not in self._undefined)
        if node.kwargs.get("out") is operand:
            node.replace_all_uses_with(operand)
            return
        with self._graph.inserting_before(node):
            copy = self._graph.call_function(_copied_like, (operand, *self._layout(node)))
        copy.meta["val"], self._sources[copy] = node.meta["val"], self._sources[node]
        self._defined.add(copy)
        node.replace_all_uses_with(copy)

    def _zeros(self, value: fx.Node, reader: fx.Node, zeros: dict[fx.Node, fx.Node]) -> fx.Node:
        fake = value.meta["val"]
        with self._graph.inserting_before(reader):
            zeros[value] = self._graph.call_function(
                _zeros, (*self._layout(value), fake.dtype, fake.device)
            )
        zeros[value].meta["val"] = fake
        return zeros[value]

    def _layout(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return layout_of_node(self._sources.get(node, node), self._names)

    def _replace_undefined(
        self, node: fx.Node, replacement: Callable[[fx.Node], fx.Node | None]
    ) -> None:
        def replaced(operand: fx.Node) -> Any:
            return replacement(operand) if operand in self._undefined else operand

        node.args = fx.map_arg(node.args, replaced)
        node.kwargs = fx.map_arg(node.kwargs, replaced)


def _zeros(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros in a layout; called from an emitted backward."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).zero_()


def _copied_like(value: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A copy of a value in another layout; called from an emitted backward."""
    copied = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return copied.copy_(value)


# Makes outputs require grad. Its own gradient stays None.
_LEAF = torch.empty(0, requires_grad=True)


class NonDifferentiableOutput(torch.autograd.Function):
    """A tensor that requires grad, as in eager, and refuses a gradient that is not zero."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, output: torch.Tensor) -> torch.Tensor:  # noqa: D102
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[None, None]:  # noqa: D102
        if tangents[0] is not None and bool(tangents[0].any()):
            msg = (
                f"the loss uses an output of shape {tuple(tangents[0].shape)} beside the model's "
                "own loss, and the plan has no gradient for it. Make the module with "
                'differentiable="all", or detach that output.'
            )
            raise BackwardError(msg)
        return None, None


def forbid_gradient(output: torch.Tensor) -> torch.Tensor:
    """The output in the same memory, as a tensor whose backward raises for a nonzero gradient.

    With `differentiable="loss"` the plan has a gradient for the model's own loss alone. A term that
    a script computes of another output, as for distillation, would silently be left out.
    """
    return NonDifferentiableOutput.apply(_LEAF, output)
