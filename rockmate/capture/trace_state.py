"""State that a capture protects: random numbers, parameters, and kernels kept whole.

A trace runs the model's forward, several times, on fake tensors. Each context here sets one thing
for its duration or restores one thing afterwards. The compile flags are process-wide, so one
capture runs at a time (`CAPTURE_LOCK`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.engine import saving
from rockmate._torch.fake import attributes_answered, is_plain
from rockmate._torch.members import named_members, writable_tables
from rockmate._util import attributes_set
from rockmate.capture.attribute_access import Accesses
from rockmate.errors import UnsupportedModelError
from rockmate.state import random_state

# Differentiable ATen ops with a kernel of their own. PyTorch would trace a formula of smaller ops,
# which rounds otherwise.
EAGER_KERNELS = (
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"upsample_nearest{dims}d" for dims in (1, 2, 3)),
    *(f"_upsample_nearest_exact{dims}d" for dims in (1, 2, 3)),
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
    "softshrink", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
# Functions of `torch` and of `torch.random`.
_SETS_RANDOM_STATE = ("manual_seed", "seed", "set_rng_state")
CAPTURE_LOCK = threading.RLock()


@contextlib.contextmanager
def random_state_kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Restores torch's, Python's and NumPy's random state.

    Raises:
        UnsupportedModelError: the forward drew from Python or NumPy. A failure of the capture is
            its cause, since the draw is the likelier reason.
    """
    devices = {tensor.device for tensor in tensors}
    failure: UnsupportedModelError | None = None
    with random_state.random_state_kept(devices) as before:
        try:
            yield
        except UnsupportedModelError as error:
            failure = error
        drawn = {"Python", "NumPy"} & set(before.differences(random_state.RandomState(devices)))
    if drawn:
        raise UnsupportedModelError(
            "the model's forward draws from Python's or NumPy's random numbers, which a captured "
            "graph cannot repeat: every step would train with one outcome. Draw with torch, and "
            "let no control flow depend on it. In Hugging Face speech models, set "
            "config.apply_spec_augment=False."
        ) from failure
    if failure is not None:
        raise failure


@contextlib.contextmanager
def no_random_state_set() -> Iterator[None]:
    """Refuses a forward that sets torch's random state: a planned step would not set it.

    Raises:
        UnsupportedModelError: within the context, a seed or a state is set.
    """
    thread = threading.get_ident()

    def refuse(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        raise UnsupportedModelError(
            "the model's forward sets torch's random state (manual_seed, set_rng_state or "
            "fork_rng), which a plan does not repeat. Set it before the call, or keep that part "
            "outside of the model."
        )

    places = [
        (owner, name, partial(refuse, getattr(owner, name)))
        for owner in (torch, torch.random)
        for name in _SETS_RANDOM_STATE
    ]
    with attributes_set(*places):
        yield


@contextlib.contextmanager
def members_of_tensors_left() -> Iterator[None]:
    """Refuses a forward that asks for the `.grad` of an activation, or assigns to `.data`.

    Raises:
        UnsupportedModelError: within the context, it calls `retain_grad` on one, or gives a tensor
            of the trace other memory, of which the trace would not know.
    """
    thread, retain = threading.get_ident(), torch.Tensor.retain_grad
    data: Any = torch.Tensor.data

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() == thread and not (is_plain(self) and is_plain(value)):
            raise UnsupportedModelError(
                "the model's forward assigns to .data, which a plan cannot repeat. Write "
                "`tensor.copy_(value)` under torch.no_grad() for a buffer, and change parameters "
                "outside of the forward."
            )
        data.__set__(self, value)

    def refuse(self: torch.Tensor) -> None:
        if threading.get_ident() != thread:
            retain(self)
        elif self.requires_grad and not self.is_leaf:
            raise UnsupportedModelError(
                f"the model's forward calls retain_grad on a tensor of shape "
                f"{tuple(self.shape)}, and a planned step has no .grad of what it computes "
                "within. Call it on outputs, after the call; or in the forward take the gradient "
                "by a hook (tensor.register_hook)."
            )

    own = property(data.__get__, assign)
    with attributes_set((torch.Tensor, "retain_grad", refuse), (torch.Tensor, "data", own)):
        yield


def attributes_of_members(
    model: nn.Module, members: Mapping[str, torch.Tensor], accesses: Accesses
) -> contextlib.AbstractContextManager[None]:
    """Has what stands for a parameter or buffer in a trace give the attributes that users set.

    Args:
        model: the model, as it stands in the trace.
        members: its parameters and buffers by name, as they stand outside.
        accesses: gets the reads. An attribute that is asked for in vain may come later.
    """
    owners = {
        id(stand_in): members[name]
        for name, stand_in in named_members(model).items()
        if name in members
    }

    def value_of(stand_in: torch.Tensor, name: str) -> Any:
        owner = None if name.startswith("_") else owners.get(id(stand_in))
        if owner is not None:
            accesses.note(owner, name, is_read=True)
        if owner is None or name not in vars(owner):
            return object.__getattribute__(stand_in, name)  # raises Python's own error
        return vars(owner)[name]

    return attributes_answered(value_of)


@contextlib.contextmanager
def tensors_kept(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Restores parameters and buffers behind what puts its own in their places; yields the tables.

    The tracer swaps those of a module with two names once for each name, and restores the wrong
    ones.
    """
    tables = writable_tables(model)
    before = [dict(table) for table in tables]
    try:
        yield tables
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)


class DifferentiatedError(UnsupportedModelError):
    """A run that saves nothing for a backward needs one."""


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    """Runs with gradients on, and saves nothing for a backward.

    Raises:
        DifferentiatedError: what runs takes a gradient itself.
    """

    def refuse(_: Any) -> torch.Tensor:
        raise DifferentiatedError(
            "the forward takes a gradient itself (torch.autograd.grad or backward) of what an "
            "untraced submodule or function computes, which a plan cannot repeat."
        )

    with saving(lambda _: None, refuse):
        yield
