"""Tensors inside of tensors: what a subclass wraps, or holds in its attributes.

Three kinds of tensors stand in a model:

| kind | an example | in the graph |
|---|---|---|
| plain | `nn.Parameter` | one input |
| wrapper | torchao's `Int8Tensor`, `DTensor` | an input for each plain tensor that it wraps |
| class with attributes | bitsandbytes' `Params4bit` | an input, and one for each tensor held |

AOTAutograd takes wrappers apart, and passes a class with attributes on as if it were plain, without
the attributes. So, for the time of a capture, plain tensors stand in the places of the latter, and
get the attributes before the forward runs. The tensors among these are inputs of the trace.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rockmate._torch.fake import is_fake
from rockmate._torch.members import tensor_tables
from rockmate._torch.subclasses import is_subclassed, is_wrapper, without_class, wrapped_parts
from rockmate.capture.trace_state import tensors_kept
from rockmate.errors import UnsupportedModelError

Path = tuple[str, ...]

# Objects within objects that are looked into: a quantization state holds another one.
_MAX_DEPTH = 4
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.Size, tuple)


def has_attributes(tensor: Any) -> bool:
    """Whether a tensor is no wrapper and of a class of its own, which a trace would lose."""
    return (
        isinstance(tensor, torch.Tensor)
        and is_subclassed(tensor)
        and not is_wrapper(tensor)
        and not is_fake(tensor)
    )


def has_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of its own, with or without tensors inside."""
    return is_wrapper(tensor) or has_attributes(tensor)


def inner_tensors(tensor: torch.Tensor) -> dict[Path, torch.Tensor]:
    """The plain tensors inside of one, by the attributes that lead there; empty for a plain one."""
    found: dict[Path, torch.Tensor] = {}
    if is_wrapper(tensor):
        for name, part in wrapped_parts(tensor)[0].items():
            if isinstance(part, torch.Tensor):
                within = inner_tensors(part) or {(): part}
                found.update({(name, *path): inner for path, inner in within.items()})
    elif has_attributes(tensor):
        found.update(_held_by(tensor))
    return found


def description(tensor: torch.Tensor) -> str:
    """What a graph depends on beside the tensors inside: class, constants, layout of a mesh."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_wrapper(tensor):
        parts, context = wrapped_parts(tensor)
        others = {n: part for n, part in parts.items() if not isinstance(part, torch.Tensor)}
        tensors = [part for part in parts.values() if isinstance(part, torch.Tensor)]
        inner = map(description, filter(is_subclassed, tensors))
        text = f"{kind}({context}, {others}{''.join(inner)})"
    else:
        text = f"{kind}({_constants_of(tensor)})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


@contextlib.contextmanager
def plain_places(model: nn.Module) -> Iterator[None]:
    """Puts plain tensors into the places of those with attributes, with the same memory."""
    made: dict[int, torch.Tensor] = {}  # tied tensors stay tied
    with tensors_kept(model) as tables:
        for table in tables:
            for key, tensor in table.items():
                if has_attributes(tensor):
                    table[key] = made.setdefault(id(tensor), _plain(tensor))
        yield


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = without_class(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, requires_grad=tensor.requires_grad)
    return plain


class HeldTensors:
    """The attributes of a model's tensors, for a trace that sees plain tensors in their places.

    Attributes:
        inputs: name of an input of the trace -> name of a tensor of the model, and the attributes
            that lead from there to the one that the input stands for.
        tensors: those tensors, by the names of their inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        # Table, key and name of each of those tensors, and the tensor.
        self._places: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
        self.inputs: dict[str, tuple[str, Path]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._input_of = input_of = dict[int, str]()
        for prefix, module in model.named_modules():
            for table in tensor_tables(module):
                for key, tensor in table.items():
                    if not has_attributes(tensor):
                        continue
                    own_name = f"{prefix}.{key}".lstrip(".")
                    self._places.append((table, key, own_name, tensor))
                    for path, held in _held_by(tensor).items():
                        if id(held) not in input_of:
                            name = input_of[id(held)] = f"held_{len(input_of)}"
                            self.inputs[name] = own_name, path
                            self.tensors[name] = held.detach()

    def put(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Gives the attributes to what stands in the places now.

        Args:
            inputs: of the trace, by name.
        """
        replaced = {key: inputs[name] for key, name in self._input_of.items()}
        for table, key, _, tensor in self._places:
            for name, value in vars(tensor).items():
                setattr(table[key], name, _with_tensors(value, replaced, _MAX_DEPTH))

    def explained(self, error: Exception, path: str) -> Exception:
        """An error of a trace, with the class that was not there if that may be its cause.

        Args:
            error: that a user can act on.
            path: of the submodule that was running.
        """
        for _, _, name, tensor in self._places:
            if name.rpartition(".")[0] == path:
                return UnsupportedModelError(
                    f"{error} Its {name} is of class {type(tensor).__name__}. A capture puts a "
                    "plain tensor with the same attributes in its place, without properties and "
                    f'methods of that class. Run the submodule as it is: untraced=["{path}"].'
                )
        return error


def _held_by(owner: Any, depth: int = _MAX_DEPTH) -> dict[Path, torch.Tensor]:
    """The tensors in the attributes of a tensor, and of the objects there."""
    found: dict[Path, torch.Tensor] = {}
    for name, value in vars(owner).items():
        if isinstance(value, torch.Tensor):
            found[(name,)] = value
        elif depth and _is_opened(value):
            within = _held_by(value, depth - 1)
            found.update({(name, *path): inner for path, inner in within.items()})
    return found


def _with_tensors(value: Any, replaced: Mapping[int, torch.Tensor], depth: int) -> Any:
    """A value with other tensors in the places of some; the original is left as it is."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if not depth or not _is_opened(value) or not _held_by(value, depth - 1):
        return value
    copied = copy.copy(value)
    for name, inner in vars(value).items():
        vars(copied)[name] = _with_tensors(inner, replaced, depth - 1)
    return copied


def _constants_of(owner: Any, depth: int = _MAX_DEPTH) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, _CONSTANTS):
            found[name] = value
        elif depth and _is_opened(value):
            found[name] = _constants_of(value, depth - 1)
    return found


def _is_opened(value: Any) -> bool:
    """Whether the attributes of an object belong to the tensor that holds it."""
    has_own = hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor | nn.Module)
    return has_own and not callable(value)
