"""Dynamo's graph as a module that can be planned.

Dynamo lifts parameters and buffers: they are inputs of its graph beside the tensors of the call,
and sizes that vary are further inputs, as integers. Here the parameters and buffers become members
of a module again, under the names that they have in the user's. So gradients are accumulated, and
hooks fire, as for any module. Sizes are read from the tensors that have them. So one capture with
symbolic sizes serves the calls of all sizes.

One graph may serve several modules of the same class: Dynamo compiles their code once. So
parameters and buffers are those of the call at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.utils.checkpoint import checkpoint

from rockmate._torch.dynamo import (
    Placeholder,
    checkpoint_contexts,
    checkpointed_bodies,
    checkpointed_call,
    evaluated,
    module_path,
    placeholders_of,
)
from rockmate._torch.members import is_member, submodule_table, tensor_tables


class Place(nn.Module):
    """Stands for a submodule of the user's: it has its parameters and buffers.

    While an op of that submodule is traced, this one is called. So the plan has its path.
    """

    def forward(self, run: Callable[[], Any]) -> Any:
        """Runs one op."""
        return run()


class _InPlaces(fx.Interpreter):
    """Runs a graph of Dynamo's, each op inside of the submodule that it comes from."""

    def __init__(self, graph: fx.GraphModule, places: Mapping[str, Place]) -> None:
        super().__init__(graph)
        self._places = places

    def run_node(self, n: fx.Node) -> Any:
        place = self._places.get(module_path(n)) if n.op.startswith("call") else None
        run = partial(super().run_node, n)
        return run() if place is None else place(run)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one call; a checkpointed one as the model's code makes it.

        In Dynamo's graph it is a call of an operator for compilers, which has every checkpoint
        select what it saves, and leave the random state.
        """
        if target is not checkpointed_call:
            return super().call_function(target, args, kwargs)
        body, *operands = args
        options = {**kwargs, "use_reentrant": False, **checkpoint_contexts(body)}
        return checkpoint(_InPlaces(body, self._places).run, *operands, **options)


class GraphModule(nn.Module):
    """A graph of Dynamo's whose inputs are the tensors of the call alone.

    Attributes:
        graph: Dynamo's graph.
        constants: inputs that are neither tensors nor their sizes, by position: a plan is for them.
    """

    def __init__(
        self, graph: fx.GraphModule, arguments: Sequence[Any], *, loss: int | None = None
    ) -> None:
        """With `loss`, that one of the output tensors alone is differentiated, else all."""
        super().__init__()
        self._loss = loss
        self.graph = graph
        placeholders = placeholders_of(graph)
        # Input -> the module that has a parameter or buffer, and its name there.
        self._members: dict[int, tuple[nn.Module, str]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}  # input -> the input and dim of that size
        self._inputs: list[int] = []
        self.constants: dict[int, Any] = {}
        for place, (placeholder, value) in enumerate(zip(placeholders, arguments, strict=True)):
            if _is_member(placeholder, value):
                self._members[place] = self._register(placeholder, value)
            elif isinstance(value, torch.Tensor):
                self._inputs.append(place)
            else:
                size = _size_among(placeholders, placeholder)
                if size is None:
                    self.constants[place] = value
                else:
                    self._sizes[place] = size
        self._num_arguments = len(placeholders)
        for each in (graph, *checkpointed_bodies(graph)):
            for node in each.graph.nodes:
                if node.op.startswith("call"):
                    self._place(module_path(node))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...] | dict[Any, Any]:
        """The graph's output tensors for the tensors of a call, in order.

        If one is the loss, they are the values of a dictionary that names it.
        """
        arguments: list[Any] = [None] * self._num_arguments
        for place, tensor in zip(self._inputs, tensors, strict=True):
            arguments[place] = tensor
        for place, (owner, name) in self._members.items():
            arguments[place] = getattr(owner, name)
        for place, value in self.constants.items():
            arguments[place] = value
        for place, (tensor, dim) in self._sizes.items():
            arguments[place] = arguments[tensor].shape[dim]
        places = {path: each for path, each in self.named_modules() if isinstance(each, Place)}
        with traceback.preserve_node_meta():
            outputs = _InPlaces(self.graph, places).run(*arguments)
        found = [each for each in outputs if isinstance(each, torch.Tensor)]
        if self._loss is None:
            return tuple(found)
        return {"loss" if place == self._loss else place: each for place, each in enumerate(found)}

    def take(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Puts the parameters and buffers of a call in their places.

        Returns:
            The other tensors of the call.
        """
        for place, (owner, name) in self._members.items():
            if getattr(owner, name) is not arguments[place]:
                _put(owner, name, arguments[place])
        return [arguments[place] for place in self._inputs]

    def _register(self, placeholder: Placeholder, value: torch.Tensor) -> tuple[nn.Module, str]:
        """Makes a tensor a member of a submodule, under its path if that is free."""
        path, _, name = placeholder.path.rpartition(".")
        owner = self._place(path) if name else None
        if owner is None or is_member(owner, name) or hasattr(owner, name):
            owner, name = self, placeholder.name
        _put(owner, name, value)
        return owner, name

    def _place(self, path: str) -> nn.Module | None:
        """The module at a path, which is made if it is not there; None if another one is there."""
        module: nn.Module = self
        for name in filter(None, path.split(".")):
            if not is_member(module, name) and not hasattr(module, name):
                submodule_table(module)[name] = Place()
            child = submodule_table(module).get(name)
            if not isinstance(child, Place):
                return None
            module = child
        return module


def _put(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    tensor_tables(owner)[not isinstance(value, nn.Parameter)][name] = value


def _is_member(placeholder: Placeholder, value: Any) -> bool:
    """Whether an input is a parameter, whose gradient goes to `.grad`, or a module's buffer."""
    if isinstance(value, nn.Parameter):
        return value.is_leaf
    return placeholder.is_buffer and isinstance(value, torch.Tensor) and not value.requires_grad


def _size_among(placeholders: Sequence[Placeholder], wanted: Placeholder) -> tuple[int, int] | None:
    """An input tensor and a dim of it that has the wanted size; None if no tensor has it."""
    if wanted.size is None:
        return None
    for place, each in enumerate(placeholders):
        for dim, size in enumerate(each.shape):
            if size == wanted.size:
                return place, dim
    return None


class Outputs:
    """Puts a graph's outputs together: its tensors, and what is none.

    Attributes:
        loss: which of the output tensors is the loss: the only scalar that requires a gradient,
            where others do, too. None if there is no such one.
    """

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self._examples = list(examples)
        tensors = [each for each in self._examples if isinstance(each, torch.Tensor)]
        trained = [place for place, each in enumerate(tensors) if each.requires_grad]
        scalars = [place for place in trained if tensors[place].ndim == 0]
        self.loss = scalars[0] if len(scalars) == 1 and len(trained) > 1 else None
        self._symbols = {
            placeholder.size: place
            for place, placeholder in enumerate(placeholders_of(graph))
            if placeholder.size is not None
        }

    def rebuild(self, returned: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a call, in the graph's order."""
        left = iter(returned.values() if isinstance(returned, dict) else returned)
        return tuple(
            next(left) if isinstance(each, torch.Tensor) else self._constant(each, arguments)
            for each in self._examples
        )

    def _constant(self, example: Any, arguments: Sequence[Any]) -> Any:
        sizes: Mapping[Any, int] = {
            symbol: arguments[place] for symbol, place in self._symbols.items()
        }
        return evaluated(example, dict(sizes))
