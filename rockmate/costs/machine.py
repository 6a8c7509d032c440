"""Descriptions of machines for estimated costs: peak rates, efficiencies, latency, granularity.

A description is a small TOML file. Those in `rockmate/costs/machines/` are known by name, others by
their path. All keys but those of `[nanoseconds_per_element]` are required:

```toml
device = "cuda"              # "cuda" or "cpu"
launch_us = 4.0              # between the starts of two ops that do nothing
bandwidth_gb_per_s = 3350    # peak, 1e9 bytes a second
allocation_bytes = 512       # the allocator rounds up to multiples of it

[peak_tflops]                # by dtype, dense, 1e12 floating point operations a second
float32 = 66.9
bfloat16 = 989.4

[efficiency]                 # share of those peaks that each kind of op reaches
matmul = 0.7
convolution = 0.5
attention = 0.5
memory = 0.85

[nanoseconds_per_element]    # for ops bound by other arithmetic, as on CPUs; default 0
transcendental = 2.0         # gelu, softmax, exp and similar ops, per element written
normalization = 1.0          # layer and batch normalisation
random = 5.0                 # drawing a dropout mask

[link]                       # between ranks, for collectives; left out: the assumed rates of
latency_us = 14.0            # `rockmate.costs.collectives`
gb_per_s = 370               # that a rank sends and receives within a node
ranks_in_node = 8
gb_per_s_between_nodes = 40  # of each rank's network adapter
hop_latency_us = 1.9         # from rank to rank within a node; left out: 0
hop_latency_us_between_nodes = 4.0
to_host_gb_per_s = 50        # to another memory tier (of a CPU: a disk), for `offload`; the last
from_host_gb_per_s = 50      # four may be left out, or be the only ones
host_latency_us = 15.0       # of each copy
host_duplex = 0.85           # share of its rate that each direction keeps while both copy
```
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from rockmate._torch.allocator import block_bytes
from rockmate.errors import MachineError

_DEVICES = ("cpu", "cuda")
_EFFICIENCIES = ("matmul", "convolution", "attention", "memory")
_ELEMENT_KINDS = ("transcendental", "normalization", "random")
_NUMBERS = ("launch_us", "bandwidth_gb_per_s", "allocation_bytes")
_RANK_KEYS = ("latency_us", "gb_per_s", "ranks_in_node", "gb_per_s_between_nodes")
_HOP_KEYS = ("hop_latency_us", "hop_latency_us_between_nodes")
_HOST_KEYS = ("to_host_gb_per_s", "from_host_gb_per_s", "host_latency_us", "host_duplex")
_TABLES = ("peak_tflops", "efficiency", "nanoseconds_per_element", "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as cost models see it.

    Attributes:
        name: its name in messages.
        device: "cuda" or "cpu".
        launch_us: microseconds that an op takes if it does nothing.
        bandwidth_gb_per_s: peak bandwidth of its memory, in 1e9 bytes a second.
        allocation_bytes: the size of every allocation is a multiple of it.
        peak_tflops: peak rate by the dtype's name, in 1e12 floating point operations a second.
        efficiency: share of a peak that ops reach: "matmul", "convolution", "attention", "memory".
        nanoseconds_per_element: least time for an element that an op writes: "transcendental",
            "normalization", "random".
        link: latency and bandwidth between ranks, and to another memory tier. Without the former:
            those that are assumed of the device; without the latter: no offload.
    """

    name: str
    device: str
    launch_us: float
    bandwidth_gb_per_s: float
    allocation_bytes: int
    peak_tflops: Mapping[str, float]
    efficiency: Mapping[str, float]
    nanoseconds_per_element: Mapping[str, float] = field(default_factory=dict)
    link: Mapping[str, float] = field(default_factory=dict)

    @property
    def torch_device(self) -> torch.device:
        """The device of the tensors on this machine."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)

    def compute_ms(self, flops: float, dtype: torch.dtype, kind: str) -> float:
        """Time of floating point operations.

        Args:
            flops: number of operations.
            dtype: dtype in which they are computed.
            kind: "matmul", "convolution" or "attention".

        Raises:
            MachineError: the machine has no peak for the dtype.
        """
        if dtype.is_complex:  # a product of four
            flops, dtype = 4 * flops, dtype.to_real()
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak_tflops:
            msg = (
                f"machine {self.name!r} has no peak for {name}, in which the model computes "
                f"products; it has those for {', '.join(self.peak_tflops)}. Add {name} to "
                "[peak_tflops] in a description of your own, or change the model's dtype."
            )
            raise MachineError(msg)
        return flops / (self.peak_tflops[name] * self.efficiency[kind] * 1e9)

    def memory_ms(self, num_bytes: float) -> float:
        """Time to read or write `num_bytes`."""
        return num_bytes / (self.bandwidth_gb_per_s * self.efficiency["memory"] * 1e6)

    def elements_ms(self, num_elements: int, kind: str) -> float:
        """Least time to write `num_elements`, for an op of a kind."""
        return num_elements * self.nanoseconds_per_element.get(kind, 0.0) / 1e6

    @property
    def launch_ms(self) -> float:
        """Time of an op that does nothing."""
        return self.launch_us / 1e3

    def rounded_bytes(self, num_bytes: int) -> int:
        """The size of an allocation of `num_bytes`."""
        return block_bytes(num_bytes, self.allocation_bytes)


def known_machines() -> list[str]:
    """Names of the machines whose descriptions come with this package."""
    files = (entry.name for entry in _shipped().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load_machine(machine: str | Path | Machine) -> Machine:
    """A machine's description.

    Args:
        machine: the name of a known machine, the path of a TOML file, or a description. Text that
            ends in ".toml" is a path.

    Raises:
        MachineError: the name is not known, the file does not exist, lacks a figure or has an
            invalid one, or `machine` is of another type.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str | Path):
        msg = (
            f"machine {machine!r} is of type {type(machine).__name__}; a name, a path or a "
            f"rockmate.Machine is needed. {_how_to()}"
        )
        raise MachineError(msg)
    if isinstance(machine, Path) or machine.endswith(".toml"):
        name, file = Path(machine).stem, Path(machine)
        if not file.is_file():
            raise MachineError(f"there is no machine description {file}. {_how_to()}")
    else:
        name, file = machine, _shipped() / f"{machine}.toml"
        if machine not in known_machines():
            raise MachineError(f"machine {machine!r} is not known. {_how_to()}")
    return _read(name, str(machine), file.read_text(encoding="utf-8"))


def _shipped() -> Any:
    return resources.files("rockmate.costs") / "machines"


def _how_to() -> str:
    return (
        f"Known are {', '.join(known_machines())}. For another, write a TOML file with "
        f"{', '.join(('device', *_NUMBERS))} and the tables "
        f"{', '.join(f'[{table}]' for table in _TABLES)}, as `help('rockmate.costs.machine')` "
        "shows, and pass its path, which ends in .toml."
    )


def _read(name: str, origin: str, text: str) -> Machine:
    """The machine that a text describes; errors name its origin."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"{origin} is no TOML ({error}). {_how_to()}"
        raise MachineError(msg) from error
    _check_keys(origin, "the file", content, ("device", *_NUMBERS, *_TABLES), _NUMBERS)
    tables = {table: _figures(origin, f"[{table}]", content.get(table, {})) for table in _TABLES}
    numbers = _figures(origin, "the file", {key: content[key] for key in _NUMBERS})
    _check_tables(origin, tables)
    figures: Any = numbers | tables
    machine = Machine(name=name, device=str(content.get("device", "")), **figures)
    fault = _fault(machine)
    if fault:
        raise MachineError(f"{origin} has {fault}.")
    return replace(machine, allocation_bytes=int(machine.allocation_bytes))


def _check_tables(origin: str, tables: Mapping[str, Mapping[str, float]]) -> None:
    _check_keys(origin, "[efficiency]", tables["efficiency"], _EFFICIENCIES, _EFFICIENCIES)
    elements, link = tables["nanoseconds_per_element"], tables["link"]
    _check_keys(origin, "[nanoseconds_per_element]", elements, _ELEMENT_KINDS)
    between_ranks = _RANK_KEYS if link.keys() & {*_RANK_KEYS, *_HOP_KEYS} else ()
    to_host = _HOST_KEYS if link.keys() & {*_HOST_KEYS} else ()
    allowed = (*_RANK_KEYS, *_HOP_KEYS, *_HOST_KEYS)
    _check_keys(origin, "[link]", link, allowed, (*between_ranks, *to_host))


def _fault(machine: Machine) -> str:
    """What a description has that no machine has; empty if there is nothing."""
    peaks = machine.peak_tflops
    if machine.device not in _DEVICES:
        return f"device = {machine.device!r}; write one of {', '.join(map(repr, _DEVICES))}"
    if not peaks:
        return "no peak in [peak_tflops]; write one for each dtype of your models"
    if not all(isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in peaks):
        return f"a key in [peak_tflops] that is no dtype of torch: {', '.join(peaks)}"
    if machine.link.get("host_duplex", 1) > 1:
        return "a host_duplex above 1; it is the share of a rate that is kept"
    if any(share > 1 for share in machine.efficiency.values()):
        return f"an efficiency above 1: {machine.efficiency}; it is the share of a peak reached"
    if machine.allocation_bytes % 1:
        return f"allocation_bytes = {machine.allocation_bytes}; write a whole number"
    return ""


def _figures(origin: str, place: str, values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        raise MachineError(f"{origin} has {values!r} where {place} is a table. {_how_to()}")
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            msg = f"{origin} has {key} = {value!r} in {place}; write a number above 0."
            raise MachineError(msg)
    return dict(values)


def _check_keys(
    origin: str,
    place: str,
    found: Mapping[str, Any],
    allowed: tuple[str, ...],
    required: tuple[str, ...] = (),
) -> None:
    wrong = [key for key in found if key not in allowed]
    missing = [key for key in required if key not in found]
    if wrong or missing:
        what = f"has {wrong[0]!r} in {place}" if wrong else f"lacks {missing[0]!r} in {place}"
        raise MachineError(f"{origin} {what}, which holds {', '.join(allowed)}. {_how_to()}")
