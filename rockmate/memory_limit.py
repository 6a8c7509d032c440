"""A bound on the whole device -> the activation budget that is left.

What a training process holds is, in the terms used here:

* *present*: what is allocated when the plan is made. On a CUDA device PyTorch's allocator says so.
  On the CPU it is the process's resident memory, interpreter and libraries included, for that is
  what the operating system counts;
* *gradients*: one element of `.grad` for each of a trainable parameter, minus what is there
  already; those of trained weights at home are there, with their state. With `steps_in_backward`
  (a post-accumulate hook that steps the parameter and frees its gradient) one is at rest at a
  time, while two temporary tensors of its size let the optimizer step: three times the largest
  parameter;
* *state*: what the optimizer will hold, minus what it holds already: by the rules below, else by
  what it has allocated;
* *activations*: the rest. The budget counts them, their gradients and the workspaces of ops.

Not counted: memory that the allocator keeps for reuse or loses to fragmentation, libraries' scratch
memory, and what the optimizer's step after the backward takes for a moment, when activations are
gone. Gradients count in full from the start, although they grow through the backward.

| optimizer | state for a parameter of n elements in a dtype of b bytes |
|---|---|
| Adam, AdamW, NAdam, RAdam | 2 n b (Kingma and Ba, 2015); one more n b with `amsgrad` |
| SGD | n b with momentum, else nothing |
| Adagrad, RMSprop | n b; RMSprop one more n b each with momentum and `centered` |
| Adafactor | 4 bytes a row and column of a matrix, 4 n for a vector; with `beta1` 4 n more |
| 8-bit Adam | 2 n and two 4-byte scales a block of 256 elements; below 4,096 elements 8 n |

Adafactor is of Shazeer and Stern (2018), 8-bit Adam of Dettmers et al. (2022).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate._torch.cuda import make_workspaces, used_bytes
from rockmate.budget import parse_memory, size_text
from rockmate.errors import InfeasibleMemoryLimitError, InvalidBudgetError

Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | str

_BLOCK_8BIT = 256
_LEAST_NUMEL_8BIT = 4096
# Growth of a process at its first steps: scratch of math libraries, code, the C heap. 8 to 10 MB
# were measured.
_CPU_RESERVE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a training process holds beside activations, in bytes; see the module docstring."""

    present_bytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.present_bytes + self.gradient_bytes + self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A bound on the whole device.

    Attributes:
        limit: bytes, or a size such as "24GiB".
        optimizer: what will step: an optimizer, or a name ("adamw", "sgd", "adafactor",
            "adamw_8bit", ...) or class of one.
        steps_in_backward: whether each parameter is stepped, and its gradient freed, within the
            backward.
    """

    limit: int | str
    optimizer: Optimizer = "adamw"
    steps_in_backward: bool = False

    def __post_init__(self) -> None:
        """Raises `InvalidBudgetError` for a limit or an optimizer that cannot be read."""
        _ = self.limit_bytes
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            _rule_of(self.optimizer)

    @property
    def limit_bytes(self) -> int:
        """The bound in bytes, rounded down."""
        return parse_memory(self.limit, "memory_limit")

    def holdings(self, model: nn.Module, weights: str = "resident") -> Holdings:
        """What is and will be held beside activations, as of now; arguments as below."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kept = kept_on_device(parameters, weights)
        if self.steps_in_backward:
            gradient_bytes = 3 * max((_shard(each).nbytes for each in parameters), default=0)
        else:
            gradient_bytes = sum(_shard(each).nbytes for each in kept if each.grad is None)
        return Holdings(
            present_bytes=present_bytes(device_of(model)),
            gradient_bytes=gradient_bytes,
            state_bytes=missing_state_bytes(self.optimizer, kept),
        )

    def activation_budget_bytes(self, model: nn.Module, weights: str = "resident") -> int:
        """What is left for activations.

        Args:
            model: the model.
            weights: which are at home, as for `Planner`: of "all", gradients and states, too.

        Raises:
            InfeasibleMemoryLimitError: nothing is.
        """
        holdings, limit_bytes = self.holdings(model, weights), self.limit_bytes
        if holdings.total_bytes >= limit_bytes:
            msg = (
                f"the memory limit of {size_text(limit_bytes)} ({limit_bytes:,} bytes) leaves "
                "nothing for activations: "
                f"{size_text(holdings.present_bytes)} are allocated, and "
                f"{size_text(holdings.gradient_bytes)} of gradients and "
                f"{size_text(holdings.state_bytes)} of optimizer state are still to come. Ask for "
                f"more than {holdings.total_bytes}, train "
                "fewer parameters, or take an optimizer with less state."
            )
            frozen_bytes = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
            is_resident = weights in ("by_limit", "resident")
            if is_resident and holdings.total_bytes - frozen_bytes < limit_bytes:
                msg += (
                    f" {size_text(frozen_bytes)} are frozen weights, which weights='auto' keeps "
                    "elsewhere, with offload='host' for a GPU, or offload='disk:FOLDER'."
                )
            raise InfeasibleMemoryLimitError(
                msg, limit_bytes=limit_bytes, held_bytes=holdings.total_bytes
            )
        return limit_bytes - holdings.total_bytes


def kept_on_device(parameters: Iterable[torch.Tensor], weights: str) -> list[torch.Tensor]:
    """The trained parameters whose gradients and states are not at home; `weights` as above."""
    if weights != "all":
        return [*parameters]
    from rockmate.offload.weight_home import can_go_home  # loads what moves

    return [each for each in parameters if not can_go_home(each)]


def present_bytes(device: torch.device) -> int:
    """Memory of a device that is in use.

    On CUDA all but what this process's allocator can still give: live tensors, workspaces, context,
    and other processes. On the CPU the process's resident memory, and a reserve for its growth.
    """
    if device.type == "cuda":
        make_workspaces(device)
        return used_bytes(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") + _CPU_RESERVE_BYTES


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def missing_state_bytes(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> int:
    """State that the optimizer will make for these parameters and does not hold yet, in bytes.

    An optimizer without a rule is taken to hold what it has allocated: nothing before its first
    step.
    """
    parameters = list(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        rule = _rule_of(optimizer)
        return sum(rule(_shard(parameter), {}) for parameter in parameters)
    rule = _RULES.get(type(optimizer).__name__.lower())
    if rule is None:
        return 0
    settings = {
        id(parameter): group for group in optimizer.param_groups for parameter in group["params"]
    }
    return sum(
        rule(_shard(parameter), settings[id(parameter)])
        for parameter in parameters
        if id(parameter) in settings and not optimizer.state.get(parameter)
    )


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter on this rank: all of it, unless it is a `DTensor`."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


Rule = Callable[[torch.Tensor, Mapping[str, Any]], int]
"""Bytes of state for one parameter under a parameter group's settings."""


def _rule_of(optimizer: type[torch.optim.Optimizer] | str) -> Rule:
    name = (optimizer if isinstance(optimizer, str) else optimizer.__name__).lower()
    rule = _RULES.get(name)
    if rule is None:
        msg = (
            f"optimizer {name!r} has no rule for its state; known are {', '.join(sorted(_RULES))}. "
            "Name one that holds as much, or pass "
            "the optimizer itself after its first step."
        )
        raise InvalidBudgetError(msg)
    return rule


def _adam(parameter: torch.Tensor, settings: Mapping[str, Any]) -> int:
    return (3 if settings.get("amsgrad") else 2) * parameter.nbytes


def _rmsprop(parameter: torch.Tensor, settings: Mapping[str, Any]) -> int:
    return (1 + bool(settings.get("momentum")) + bool(settings.get("centered"))) * parameter.nbytes


def _adafactor(parameter: torch.Tensor, settings: Mapping[str, Any]) -> int:
    numel = parameter.numel()
    rest, (rows, columns) = (
        math.prod(parameter.shape[:-2]),
        parameter.shape[-2:] if parameter.ndim >= 2 else (0, 0),
    )
    second = 4 * rest * (rows + columns) if parameter.ndim >= 2 else 4 * numel
    return second + (4 * numel if settings.get("beta1") is not None else 0)


def _adam_8bit(parameter: torch.Tensor, settings: Mapping[str, Any]) -> int:
    numel = parameter.numel()
    return 8 * numel if numel < _LEAST_NUMEL_8BIT else 2 * (numel + 4 * -(-numel // _BLOCK_8BIT))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("adam", "adamw", "nadam", "radam", "adamw_torch", "adamw_torch_fused"), _adam),
    "sgd": lambda each, settings: each.nbytes if settings.get("momentum") else 0,
    "adagrad": lambda each, _: each.nbytes,
    "sgd_momentum": lambda each, _: each.nbytes,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    **dict.fromkeys(
        ("adam8bit", "adamw8bit", "adam_8bit", "adamw_8bit", "adamw_bnb_8bit", "pagedadamw8bit"),
        _adam_8bit,
    ),
}
