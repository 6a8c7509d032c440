"""The rates of a tier: from a machine's description, or measured here."""

from __future__ import annotations

import statistics
import time

import torch

from rockmate.costs.link import Link
from rockmate.costs.machine import Machine
from rockmate.errors import MachineError
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.request import OffloadRequest
from rockmate.offload.tier import Pending, Tier

# Bytes of each of the copies that are timed, and how many there are.
_COPY_BYTES, _NUM_COPIES = 16 << 20, 4
# Side of the matrix products that run beside them, each below a millisecond.
_SIDE = 256


def link_to(request: OffloadRequest, machine: Machine | None) -> Link:
    """The rates of copies to the tier of a request.

    Raises:
        MachineError: the machine's description has no rates for copies to the host.
        OffloadError: the tier cannot be reached.
    """
    if machine is not None:
        return machine_link(machine)
    return measure_link(DiskTier(request.folder), torch.device("cpu"))


def machine_link(machine: Machine) -> Link:
    """The link to host memory in a machine's description.

    Raises:
        MachineError: it has none.
    """
    link = machine.link
    if "to_host_gb_per_s" not in link:
        msg = (
            f"machine {machine.name!r} has no rates of copies to another memory tier. Add "
            "to_host_gb_per_s, from_host_gb_per_s, host_latency_us and host_duplex to [link] in a "
            "description of your own."
        )
        raise MachineError(msg)
    return Link(
        out_gb_per_s=link["to_host_gb_per_s"],
        in_gb_per_s=link["from_host_gb_per_s"],
        latency_ms=link["host_latency_us"] / 1e3,
        duplex=link["host_duplex"],
        # On a CPU one thread copies in both directions.
        has_one_lane=machine.device == "cpu",
    )


def measure_link(tier: Tier, device: torch.device) -> Link:
    """The rates of a tier with one queue of copies, measured while matrix products run.

    It takes a few tenths of a second, and as many bytes of the tier as four copies.
    """
    slab = tier.borrow(_COPY_BYTES * _NUM_COPIES)
    values = [torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(_NUM_COPIES)]
    alone_s = _product_s(0.1)
    out_s, out_slowdown = _timed(
        lambda index: slab.copy_out(index * _COPY_BYTES, values[index]), alone_s
    )
    in_s, in_slowdown = _timed(
        lambda index: slab.copy_in(index * _COPY_BYTES, values[index]), alone_s
    )
    small = torch.ones(4096, dtype=torch.uint8, device=device)
    latencies_s = []
    for _ in range(5):
        begin_s = time.perf_counter()
        slab.copy_out(0, small).wait()
        latencies_s.append(time.perf_counter() - begin_s)
    slab.release()
    return Link(
        out_gb_per_s=_COPY_BYTES * _NUM_COPIES / out_s / 1e9,
        in_gb_per_s=_COPY_BYTES * _NUM_COPIES / in_s / 1e9,
        latency_ms=1e3 * statistics.median(latencies_s),
        has_one_lane=True,
        slowdown=max(1.0, (out_slowdown + in_slowdown) / 2),
    )


def _timed(copy, alone_s: float) -> tuple[float, float]:  # noqa: ANN001
    """Seconds that all copies take, and by how much products are slower meanwhile."""
    begin_s = time.perf_counter()
    pending: list[Pending] = [copy(index) for index in range(_NUM_COPIES)]
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    number = 0
    while not all(each.has_ended for each in pending):  # pyright: ignore
        torch.mm(left, right)
        number += 1
    seconds = time.perf_counter() - begin_s
    for each in pending:
        each.wait()
    return seconds, seconds / max(number, 1) / alone_s


def _product_s(seconds: float) -> float:
    """Seconds of one product without copies beside it."""
    left, right = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    begin_s, number = time.perf_counter(), 0
    while time.perf_counter() - begin_s < seconds:
        torch.mm(left, right)
        number += 1
    return (time.perf_counter() - begin_s) / number
