"""What a fit is asked for, checked before anything is captured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from rockmate.budget import parse_memory
from rockmate.costs.machine import Machine, known_machines, load_machine
from rockmate.curves.errors import FitError, check_measuring
from rockmate.curves.size_axis import Dims, Kind
from rockmate.errors import InvalidBudgetError
from rockmate.memory_limit import MemoryLimit, Optimizer, device_of
from rockmate.planning.options import PlanOptions

TOKEN_STEP = 8
"""Lengths of sequences are multiples of it: attention kernels are made for such."""

_ZERO = re.compile(r"0+(\.0*)? *([KMGT]?I?B)?", re.IGNORECASE)
_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 22
_NOT_OF_FITS = ("kernels", "compile_limit_s", "gap_tolerance", "time_limit_s", "mesh", "shard")
_DEFAULTS = PlanOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """What a fit is asked for.

    Attributes:
        memory: of the device, in bytes or as a size ("24GiB").
        optimizer: an optimizer, or the name or class of one.
        steps_in_backward: whether each parameter is stepped, and its gradient freed, within the
            backward.
        vary: "batch" looks for the largest batch, "tokens" for the longest sequence, in multiples
            of 8.
        sizes: to have rows for, beside the largest; None chooses them.
        most: the largest size to consider. None takes 65,536 rows, or as many tokens as the model
            has positions.
        batch_axis: the dimension of the batch in each tensor of the sample: a number, or a mapping
            from keywords or positions. None takes the first.
        token_axis: the same for the tokens. None takes every later dimension of the size that the
            first tensor of integers has.
        reserve: what the device itself takes, in bytes or as a size; 0 for nothing. None measures
            or assumes it, and adds a margin; see `rockmate.curves.device_memory`.
        measure: then also measures costs, and trains `num_steps` steps at each size of the table,
            on the device that the model is on. The model is put back to what it was.
        num_steps: how many steps are timed.
        planning: options of planning; see `rockmate.PlanOptions`. Without a `machine`, costs are
            estimated by a description of the device that the model is on. With several forwards in
            flight, as many batches are held. Kernels are PyTorch's own, and time limits are those
            of a fit.
    """

    memory: int | str
    optimizer: Optimizer = "adamw"
    steps_in_backward: bool = False
    vary: Kind = "batch"
    sizes: Sequence[int] | None = None
    most: int | None = None
    batch_axis: Dims | None = None
    token_axis: Dims | None = None
    reserve: int | str | None = None
    measure: bool = False
    num_steps: int = 5
    planning: PlanOptions = _DEFAULTS

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> FitOptions:
        """The options of a fit and of planning that are given by name.

        Raises:
            UnknownOptionError: there is none of a name, or a fit has no such option.
        """
        names = [each.name for each in fields(cls)]
        given = {name: value for name, value in keywords.items() if name in names}
        planning = {name: value for name, value in keywords.items() if name not in names}
        given["planning"] = PlanOptions.of(
            given.get("planning"), planning, known=names, but=_NOT_OF_FITS, what="a fit has"
        )
        return cls(**given)

    def __post_init__(self) -> None:
        """Raises `FitError` for what cannot be read, `OffloadError` for a tier that is not here."""
        if self.vary not in ("batch", "tokens"):
            raise FitError(f"vary is {self.vary!r}; choose 'batch' or 'tokens'.")
        for size in (*(self.sizes or ()), *([] if self.most is None else [self.most])):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise FitError(f"size {size!r} is no whole number of at least 1.")
        try:
            _ = self.planning.moves
        except (ValueError, InvalidBudgetError) as error:
            raise FitError(str(error)) from error
        machine = self.planning.machine
        check_measuring(FitError, measure=self.measure, machine=machine, num_steps=self.num_steps)

    @property
    def limit(self) -> MemoryLimit:
        """The memory and the optimizer.

        Raises:
            FitError: the memory cannot be read.
            InvalidBudgetError: the optimizer has no rule for its state.
        """
        _num_bytes(self.memory, "memory")
        return MemoryLimit(
            limit=self.memory, optimizer=self.optimizer, steps_in_backward=self.steps_in_backward
        )

    @property
    def reserve_bytes(self) -> int | None:
        """What the device itself takes, if that was said."""
        if self.reserve is None:
            return None
        return 0 if _is_zero(self.reserve) else _num_bytes(self.reserve, "reserve")

    @property
    def axis(self) -> Dims | None:
        """The dimension of the size that varies, if that was said."""
        return self.batch_axis if self.vary == "batch" else self.token_axis

    @property
    def step(self) -> int:
        """Sizes are multiples of it."""
        return 1 if self.vary == "batch" else TOKEN_STEP

    def most_of(self, model: nn.Module) -> int:
        """The largest size to consider."""
        if self.most is not None:
            return self.most
        if self.vary == "batch":
            return _MOST_ROWS
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return getattr(text, "max_position_embeddings", None) or _MOST_TOKENS

    def machine_for(self, model: nn.Module) -> Machine:
        """The machine that costs are estimated for.

        Raises:
            MachineError: the machine is not known, or its description cannot be used.
            FitError: none is given, and none is known for the device of the model.
        """
        if self.planning.machine is not None:
            return load_machine(self.planning.machine)
        device = device_of(model)
        if device.type == "cpu":
            return load_machine("cpu-avx2")
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            plain = name.lower().replace(" ", "")
            known = [each for each in known_machines() if each in plain]
            if known:
                return load_machine(known[0])
            what = f"no description is known for {name!r}"
        else:
            what = f"the model is on the {device.type} device"
        raise FitError(
            f"{what}. Say for which machine costs are estimated: machine=..., one of "
            f"{', '.join(known_machines())}, or the path of a description."
        )


def _is_zero(value: int | str) -> bool:
    """Whether a size says that nothing is taken, which no budget may say."""
    if isinstance(value, str):
        return _ZERO.fullmatch(value.strip()) is not None
    return isinstance(value, int) and not isinstance(value, bool) and value == 0


def _num_bytes(value: int | str, what: str) -> int:
    try:
        return parse_memory(value, what)
    except InvalidBudgetError as error:
        raise FitError(str(error)) from error
