"""The rates of a tier: from a machine's description, or measured here."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rockmate.costs.cost import Link
from rockmate.costs.machine import Machine
from rockmate.costs.measure import cpu_seconds
from rockmate.errors import MachineError
from rockmate.offload.disk_tier import DiskTier, FileCopy
from rockmate.schedule.move import SLOT_ALIGNMENT
from rockmate.schedule.offload_request import OffloadRequest

# Bytes of each of the copies that are timed, how many there are, and how often.
_COPY_BYTES, _NUM_COPIES, _NUM_ROUNDS = 4 << 20, 8, 3
_NUM_LATENCIES = 15
_EPSILON_S = 1e-6
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

    As in a step, one thread copies, several copies wait for it at a time, and the file has been
    written before. It takes some tenths of a second.
    """
    slab = tier.borrow(_COPY_BYTES * _NUM_COPIES)
    values = [torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(_NUM_COPIES)]
    alone_s = _product_s(_ALONE_S)
    # The first round writes where nothing was, which takes longer on some file systems.
    rounds = [
        (_timed(slab.copy_out, values, alone_s), _timed(slab.copy_in, values, alone_s))
        for _ in range(_NUM_ROUNDS + 1)
    ][1:]
    small = torch.ones(SLOT_ALIGNMENT, dtype=torch.uint8)
    latencies_s = []
    for _ in range(_NUM_LATENCIES):
        begin_s = time.perf_counter()
        slab.copy_out(0, small).wait()
        latencies_s.append(time.perf_counter() - begin_s)
    slab.release()
    out_s, in_s = (statistics.median(each[way].seconds for each in rounds) for way in (0, 1))
    slowdowns = [statistics.median(each[way].slowdown for each in rounds) for way in (0, 1)]
    return Link(
        out_gb_per_s=_COPY_BYTES * _NUM_COPIES / out_s / 1e9,
        in_gb_per_s=_COPY_BYTES * _NUM_COPIES / in_s / 1e9,
        latency_ms=1e3 * statistics.median(latencies_s),
        has_one_lane=True,
        slowdown=max(1.0, statistics.fmean(slowdowns)),
    )


class _Timed(NamedTuple):
    """Some copies: their time, and the factor by which products beside them took longer."""

    seconds: float
    slowdown: float


def _timed(
    copy: Callable[[int, torch.Tensor], FileCopy], values: Sequence[torch.Tensor], alone_s: float
) -> _Timed:
    """Times copies of some values, which are all issued at once, beside products."""
    begin_s, own_s, all_s = time.perf_counter(), cpu_seconds(), time.process_time()
    copies = [copy(index * _COPY_BYTES, value) for index, value in enumerate(values)]
    number = 0
    while not copies[-1].has_ended:
        _product()
        number += 1
    for each in copies:
        each.wait()
    seconds = time.perf_counter() - begin_s
    own_s, all_s = cpu_seconds() - own_s, time.process_time() - all_s
    slowdown = own_s / max(number, 1) / alone_s
    if torch.get_num_threads() == 1 and len(os.sched_getaffinity(0)) == 1:
        # The step stands still while the thread that copies has the core. With several threads,
        # its own clock shows what it loses.
        slowdown *= all_s / max(own_s, _EPSILON_S)
    return _Timed(seconds, slowdown)


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
    """Seconds of one product without copies beside it, by the clock of the ops' own times."""
    begin_s, begin_own_s, number = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - begin_s < seconds:
        _product()
        number += 1
    return (cpu_seconds() - begin_own_s) / number


def _product() -> None:
    torch.mm(torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE))
