"""The class of a module with sharded parameters: it reads them whole inside of a forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rockmate._torch.pytree import tree_map_only
from rockmate.errors import UnsupportedModelError
from rockmate.sharding.mark import MARK, sharded_model_of
from rockmate.sharding.unit import Place, Unit


def put_sharded_class(
    module: nn.Module,
    unit: Unit,
    readers: Mapping[str, tuple[Unit, Place]],
    *,
    is_head: bool,
    is_root: bool,
) -> None:
    """Gives a module a class of its own, derived from the one that it has.

    Args:
        module: with parameters that are sharded, or the head of a unit.
        unit: to which it belongs.
        readers: name of a parameter -> the unit that gathers it, and its first place.
        is_head: whether the unit begins and ends with its forward.
        is_root: whether it is the model.
    """
    kind = type(module)
    members: dict[str, Any] = {
        name: _property(owner, place) for name, (owner, place) in readers.items()
    }
    members["__deepcopy__"] = _refuse_copy
    if is_root:
        members |= {"no_sync": _no_sync, "set_requires_gradient_sync": _set_sync}
    members["forward"] = _forward(kind.forward, unit, is_head=is_head, is_root=is_root)
    members.update({MARK: unit.model, "__module__": kind.__module__, "__doc__": kind.__doc__})
    made: Any = type(f"Sharded{kind.__name__}", (kind,), members)
    module.__class__ = made


def _refuse_copy(self: nn.Module, _: Any) -> nn.Module:
    """A copy would read the parameters of the original."""
    kind = type(self).__name__
    msg = (
        f"a {kind} that fully_shard has made cannot be copied. Make the model anew, shard it, and "
        "load the state_dict of this one."
    )
    raise UnsupportedModelError(msg)


def _set_sync(self: nn.Module, requires_gradient_sync: bool, /, *, recurse: bool = True) -> None:
    """As that of PyTorch's `FSDPModule`: False lets backwards hold whole gradients.

    Args:
        self: the model.
        requires_gradient_sync: whether backwards reduce gradients, with those that are held.
        recurse: must be True.
    """
    if not recurse:
        msg = (
            "set_requires_gradient_sync(recurse=False) would reduce the gradients of one part of "
            "the model. Here all parts wait together: leave recurse out."
        )
        raise UnsupportedModelError(msg)
    model: Any = sharded_model_of(self)
    model.held.holds = not requires_gradient_sync


@contextlib.contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    """Backwards within it hold whole gradients; the next one outside reduces their sum."""
    held = sharded_model_of(self).held
    before, held.holds = held.holds, True
    try:
        yield
    finally:
        held.holds = before


def _property(unit: Unit, place: Place) -> property:
    return property(lambda _: unit.read(place))


def _forward(
    plain: Callable[..., Any], unit: Unit, *, is_head: bool, is_root: bool
) -> Callable[..., Any]:
    policy = unit.model.policy
    dtype = policy.dtype if is_head and policy.casts_inputs else None

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args, kwargs = _cast((args, kwargs), dtype)
        with unit.running():
            output = plain(self, *args, **kwargs)
        if is_root and policy.output_dtype is not None:
            return _cast(output, policy.output_dtype)
        return output

    return forward


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """The same nesting with its floating-point tensors in a dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, values)
