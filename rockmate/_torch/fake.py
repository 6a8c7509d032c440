"""Fake tensors. PyTorch documents them and exports none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor

from rockmate._util import attributes_set
from rockmate.errors import InPlaceCollectiveError

__all__ = ["FakeTensor", "FakeTensorMode", "is_fake"]

LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Ops through which a trace takes the tensors that code makes of Python numbers."""


def mode_of(fake: Any) -> FakeTensorMode:
    """The mode in which ops on a fake tensor give fake tensors of the same kind."""
    return fake.fake_mode


def forget_tensors(fake: Any) -> None:
    """Drops weak references of a fake tensor's mode to real ones: `swap_tensors` allows none."""
    mode_of(fake).fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor that an op gets in a trace has values: nobody has wrapped it."""
    return type(tensor) is torch.Tensor and not torch._is_functional_tensor(tensor)


def functional_part(traced: torch.Tensor) -> torch.Tensor | None:
    """The tensor in AOTAutograd's wrapper, on which its `tolist` works; None without wrapper."""
    return traced.elem if isinstance(traced, FunctionalTensor) else None


def attributes_answered(
    value_of: Callable[[torch.Tensor, str], Any],
) -> contextlib.AbstractContextManager[None]:
    """Asks for attributes that AOTAutograd's wrapper does not have.

    `value_of` gets the wrapper and the name, and raises `AttributeError` if there is no value.
    """
    return attributes_set((FunctionalTensor, "__getattr__", value_of))


def hint_of(size: Any) -> Any:
    """The number that a symbolic one stands for in its trace. To read it sets no guard."""
    return size if isinstance(size, int) else size.node.hint


def move_to(fake: FakeTensor, device: torch.device) -> None:
    """Changes the device that a fake tensor reports, in place. `Tensor.to` would make another."""
    fake.fake_device = device


@contextlib.contextmanager
def results_corrected(
    correct: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Any],
) -> Iterator[Mapping[int, torch.Tensor]]:
    """Replaces the result of each call on fake tensors.

    `correct` gets the op, its arguments, its keywords and its result, within the fake mode.

    A trace makes its fake mode itself, so a subclass cannot be given to it. Calls in other threads
    are corrected, too. An op may read a tensor that has values, as one in an attribute: the mode
    refuses those, so a fake tensor, the same one each time, stands for it. Yields these by address.

    Raises:
        InPlaceCollectiveError: an op is a collective that writes into its arguments.
    """
    dispatch = FakeTensorMode.dispatch
    fakes: dict[int, torch.Tensor] = {}

    def fake(mode: Any, value: Any) -> Any:
        if isinstance(value, list | tuple) and any(map(torch.is_tensor, value)):
            return [fake(mode, each) for each in value]
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return value
        fakes[id(value)] = mode.fake_tensor_converter.from_real_tensor(mode, value)
        return fakes[id(value)]

    def dispatch_corrected(
        self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", "") == "c10d":
            raise InPlaceCollectiveError(
                f"the forward calls {func}, a collective that writes into a tensor, which a plan "
                "does not repeat. Call that of torch.distributed._functional_collectives, which "
                "returns its result, as all_to_all_single_autograd or permute_tensor."
            )
        if func not in LIFTS:
            args = [fake(self, each) for each in args]
        result = dispatch(self, func, types, args, kwargs or {})
        with self:
            return correct(func, tuple(args), kwargs or {}, result)

    with attributes_set((FakeTensorMode, "dispatch", dispatch_corrected)):
        yield fakes


def errors_unlogged() -> contextlib.AbstractContextManager[None]:
    """Keeps out of the log the traceback that fake tensors log before they raise an op's error."""
    return attributes_set((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
