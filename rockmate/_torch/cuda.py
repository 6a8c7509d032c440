"""CUDA: times of kernels, workspaces of libraries, host memory, streams at a backward's end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rockmate._torch.engine import at_end_of_backward

# Cycles for which a spinning kernel keeps the stream busy: about a millisecond.
_SPIN_CYCLES = 2_000_000
TF32_EPS = 2.0**-10
"""The spacing of numbers near one in that format."""


def kernel_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that the kernels of a function take on a device, without their launches.

    A spinning kernel runs first. Until it ends, the host has launched the function's kernels, so
    that the time between two events around them has no wait for the host. The time of an empty pair
    of events is subtracted. A function that synchronizes is timed from there on with its launches.

    The inputs should have been written just before, so that the cache of the GPU has of them what
    it has in training. PyTorch has no public way to keep a stream busy.
    """
    return max(0.0, _between_events_ms(function, device) - _empty_ms(device))


@lru_cache(maxsize=16)
def _empty_ms(device: torch.device) -> float:
    return min(_between_events_ms(lambda: None, device) for _ in range(10))


def _between_events_ms(function: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        result = function()
        end.record()
        end.synchronize()
        del result
    return start.elapsed_time(end)


@lru_cache(maxsize=16)
def make_workspaces(device: torch.device) -> None:
    """Has cuBLAS allocate its workspaces for this thread and for the thread of backwards.

    They stay allocated. Made here, they are no part of the first step that is measured.
    """
    left, right = (torch.ones(8, 8, device=device, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        total = (left @ right).sum()
    torch.autograd.grad(total, (left, right))
    torch.cuda.synchronize(device)


def rounds_to_tf32(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether products with these weights may round single precision to ten bits, as TF32 does.

    By default, convolutions do, whose weights have three or more dimensions, and no other product.
    """
    backends: Any = torch.backends
    by_setting = {
        True: backends.cudnn.conv.fp32_precision == "tf32",
        False: backends.cuda.matmul.fp32_precision == "tf32",
    }
    return any(
        each.is_cuda and each.dtype == torch.float32 and by_setting[each.dim() >= 3]
        for each in tensors
        if each.dim() >= 2
    )


def used_bytes(device: torch.device) -> int:
    """Bytes of a device that are not available to this process's allocator.

    These are its live tensors, its context and libraries, and all of other processes. The
    allocator's unused reserve is available.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total_bytes - free_bytes - unused_bytes


def pinned(num_bytes: int) -> torch.Tensor:
    """Pinned memory of the host, of just so many bytes.

    PyTorch's own allocator of such memory rounds up to a power of two.

    Raises:
        RuntimeError: it cannot be had.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


@dataclass(frozen=True, slots=True)
class _Shared:
    """Pinned bytes as CUDA's array interface has them, which keeps their memory."""

    memory: torch.Tensor
    offset: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.memory.data_ptr() + self.offset
        bytes_of: dict[str, Any] = {"shape": (self.num_bytes,), "typestr": "|u1"}
        return bytes_of | {"data": (address, False), "version": 3}


def device_view(
    memory: torch.Tensor, offset: int, num_bytes: int, device: torch.device
) -> torch.Tensor:
    """A tensor of a device whose bytes are these of `pinned` memory: kernels reach them there.

    Host and device have one address space, so the address is the same for both.
    """
    return torch.as_tensor(_Shared(memory, offset, num_bytes), device=device)


def join_stream_at_end(device: torch.device) -> None:
    """Has the caller's stream wait for the present one when the running backward ends.

    The engine does so for streams of leaves that it visits. A planned step accumulates gradients
    itself, on the stream of its forward. Nothing is done on the default stream, which is the
    caller's unless it chose another.
    """
    stream = torch.cuda.current_stream(device)
    if stream == torch.cuda.default_stream(device):
        return
    event = stream.record_event()

    def join() -> None:
        torch.cuda.current_stream(device).wait_event(event)

    at_end_of_backward(join)
