"""What a fit is asked for, checked before anything is captured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate.budget import parse_budget
from rockmate.capture.options import num_in_flight_of
from rockmate.costs.machine import Machine, known_machines, load_machine
from rockmate.curves.errors import FitError, check_measuring
from rockmate.curves.size_axis import Dims, Kind
from rockmate.errors import InvalidBudgetError
from rockmate.memory_limit import MemoryLimit, Optimizer, device_of
from rockmate.offload.request import OffloadRequest
from rockmate.planning.numerics import Numerics, check_numerics

TOKEN_STEP = 8
"""Lengths of sequences are multiples of it: attention kernels are made for such."""

_ZERO = re.compile(r"0+(\.0*)? *([KMGT]?I?B)?", re.IGNORECASE)
_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 22


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
            or assumes it.
        machine: that costs are estimated for, as for `Planner`; None takes a description of the
            device that the model is on.
        measure: then also measures costs, and trains `num_steps` steps at each size of the table,
            on the device that the model is on. The model is put back to what it was.
        num_steps: how many steps are timed.
        numerics: as for `Planner`; "bitwise" leaves out chunks, which fit larger sizes.
        offload: lets values move to another memory tier and back, as for `Planner`: "host" for a
            machine with a GPU, "disk:FOLDER" for a CPU. Without `measure`, the rates of copies are
            those of the machine's description.
        host_budget: most bytes that moved values take there, an int or a size as "32GiB"; None for
            no limit.
        progress: shows progress bars.
        capture: options of the capture, as for `Planner`: "differentiable", "outputs", "gradients",
            "untraced", "marks", "policy", "existing_checkpoints", "in_flight". With several
            forwards in flight, as many batches are held.
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
    machine: str | Path | Machine | None = None
    measure: bool = False
    num_steps: int = 5
    numerics: Numerics = "any_order"
    offload: str | None = None
    host_budget: int | str | None = None
    progress: bool = False
    capture: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `FitError` for what cannot be read, `OffloadError` for a tier that is not here."""
        if self.vary not in ("batch", "tokens"):
            raise FitError(f"vary is {self.vary!r}; choose 'batch' or 'tokens'.")
        for size in (*(self.sizes or ()), *([] if self.most is None else [self.most])):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise FitError(f"size {size!r} is no whole number of at least 1.")
        check_numerics(self.numerics)
        num_in_flight_of(self.capture.get("in_flight", 1))
        check_measuring(
            FitError, measure=self.measure, machine=self.machine, num_steps=self.num_steps
        )
        try:
            OffloadRequest.parse(self.offload, self.host_budget)
        except (ValueError, InvalidBudgetError) as error:
            raise FitError(str(error)) from error

    @property
    def planner_options(self) -> dict[str, Any]:
        """Where values may move, as options of `Planner.of`."""
        return {"offload": self.offload, "host_budget": self.host_budget}

    @property
    def step_options(self) -> dict[str, Any]:
        """Options of the steps that are captured."""
        return {**self.capture, "whole_shared": self.numerics == "bitwise"}

    @property
    def limit(self) -> MemoryLimit:
        """The memory and the optimizer.

        Raises:
            FitError: the memory cannot be read.
            InvalidBudgetError: the optimizer has no rule for its state.
        """
        _num_bytes(self.memory, "memory")
        return MemoryLimit(
            limit=self.memory,
            optimizer=self.optimizer,
            steps_in_backward=self.steps_in_backward,
        )

    @property
    def reserve_bytes(self) -> int | None:
        """What the device itself takes, if that was said."""
        if self.reserve is None:
            return None
        return 0 if _is_zero(self.reserve) else _num_bytes(self.reserve, "reserve")

    @property
    def num_in_flight(self) -> int:
        """Number of forwards before the backward of the first."""
        return num_in_flight_of(self.capture.get("in_flight", 1))

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
        if self.machine is not None:
            return load_machine(self.machine)
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
    if isinstance(value, float):
        raise FitError(
            f'{what} {value} is a float. Write bytes as an int, or a size as "24GiB": there is '
            "nothing to take a share of."
        )
    try:
        return parse_budget(value, 0)
    except InvalidBudgetError as error:
        raise FitError(
            f"{what} {value!r} cannot be read. Write bytes above 0, or a size as 24GiB or 800MB."
        ) from error
