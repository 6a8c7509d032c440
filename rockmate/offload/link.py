"""The rates of a tier: from a machine's description, or measured here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rockmate.costs.link import Link
from rockmate.costs.machine import Machine
from rockmate.errors import MachineError
from rockmate.offload.copy_thread import FileCopy
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.request import OffloadRequest
from rockmate.schedule.move import SLOT_ALIGNMENT

# Bytes of each of the copies that are timed, and how many there are.
_COPY_BYTES, _NUM_COPIES = 16 << 20, 4
# Side of the matrix products that run beside them, each below a millisecond, and seconds for which
# they are timed alone.
_SIDE, _ALONE_S = 256, 0.1


def link_to(request: OffloadRequest, machine: Machine | None, device: torch.device) -> Link:
    """The rates of copies between a device and the tier of a request.

    Raises:
        MachineError: the machine's description has no rates for copies to the host.
        OffloadError: the device's values cannot move there, or the tier cannot be reached.
    """
    request.check_device(device)
    if machine is not None:
        return machine_link(machine)
    if request.kind == "host":
        return measure_pinned_link(device)
    return measure_disk_link(DiskTier(request.folder))


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


def measure_disk_link(tier: DiskTier) -> Link:
    """The rates of a disk, measured while matrix products run beside the copies.

    It takes a few tenths of a second, and as many bytes of the disk as four copies.
    """
    slab = tier.borrow(_COPY_BYTES * _NUM_COPIES)
    values = [torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(_NUM_COPIES)]
    alone_s = _product_s(_ALONE_S)

    def timed(copy: Callable[[int, torch.Tensor], FileCopy]) -> tuple[float, float]:
        begin_s = time.perf_counter()
        copies = [copy(index * _COPY_BYTES, value) for index, value in enumerate(values)]
        number = 0
        while not copies[-1].has_ended:
            _product()
            number += 1
        for each in copies:
            each.wait()
        seconds = time.perf_counter() - begin_s
        return seconds, seconds / max(number, 1) / alone_s

    (out_s, out_slowdown), (in_s, in_slowdown) = timed(slab.copy_out), timed(slab.copy_in)
    small = torch.ones(SLOT_ALIGNMENT, dtype=torch.uint8)
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


def measure_pinned_link(device: torch.device) -> Link:
    """The rates of copies between a GPU and pinned memory, each way alone and both together."""
    inside = [torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    outside = [torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out, back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out_ms() -> float:
        return _stream_ms(out, lambda: outside[0].copy_(inside[0], non_blocking=True))

    def back_ms() -> float:
        return _stream_ms(back, lambda: inside[1].copy_(outside[1], non_blocking=True))

    def both_ms() -> float:
        def copy() -> None:
            out.wait_stream(back)
            with torch.cuda.stream(out):
                outside[0].copy_(inside[0], non_blocking=True)
            inside[1].copy_(outside[1], non_blocking=True)
            back.wait_stream(out)

        return _stream_ms(back, copy)

    small, place = torch.ones(SLOT_ALIGNMENT, dtype=torch.uint8, device=device), outside[0]
    for each in (out_ms, back_ms, both_ms):
        each()
    one, other, both = (min(each() for _ in range(3)) for each in (out_ms, back_ms, both_ms))
    latency_ms = min(
        _stream_ms(out, lambda: place[: len(small)].copy_(small, non_blocking=True))
        for _ in range(3)
    )
    return Link(
        out_gb_per_s=_COPY_BYTES / one / 1e6,
        in_gb_per_s=_COPY_BYTES / other / 1e6,
        latency_ms=latency_ms,
        duplex=min(1.0, max(one, other) / both),
    )


def _stream_ms(stream: torch.cuda.Stream, function: Callable[[], object]) -> float:
    """Milliseconds that a function's copies take on a stream; the host waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        function()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _product_s(seconds: float) -> float:
    """Seconds of one product without copies beside it."""
    begin_s, number = time.perf_counter(), 0
    while time.perf_counter() - begin_s < seconds:
        _product()
        number += 1
    return (time.perf_counter() - begin_s) / number


def _product() -> None:
    torch.mm(torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE))
