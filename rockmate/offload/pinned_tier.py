"""Pinned host memory as a tier of a CUDA device: a stream for each direction, and events.

No copy makes the host wait. Let C be the stream on which a step's ops run, and O and I the streams
of the two directions. What orders them:

| event of a move | on the streams | so that |
|---|---|---|
| send | O waits for C, then copies and records e | the copy reads what the op has made |
| sent | C waits for e | what C does next may use the value's memory |
| fetch | I waits for C, then copies and records f | the copy reads what was sent, for C has waited for e; and it writes into memory that C has done with |
| fetched | C waits for f | readers find the value |

The allocator gives memory that was allocated on C to later work on C at once, in host order. All
that O reads and I writes was allocated on C, and is released only when C has waited for the copy.
So `record_stream` is not needed, which would keep the memory until some later event, at a place
that no plan knows. Copies of an abandoned step are waited for before their memory is released.
"""  # noqa: E501

from __future__ import annotations

import torch

from rockmate._torch.cuda import device_view, pinned
from rockmate.errors import OffloadError
from rockmate.offload.tier import Slab, Tier


class PinnedTier(Tier["PinnedSlab"]):
    """Slabs of pinned memory."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        # Of each device: the streams of copies out and of copies back.
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def _new_slab(self, num_bytes: int) -> PinnedSlab:
        return PinnedSlab(_pinned(num_bytes))

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams of copies out and of copies back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class PinnedSlab(Slab):
    """Pinned memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(len(memory))
        self._memory = memory
        self._pending: list[StreamCopy] = []

    def copy_out(self, offset: int, source: torch.Tensor) -> StreamCopy:
        """See `Slab`."""
        _check_device(source)
        stream, _ = self.tier.streams(source.device)
        place = self._memory[offset : offset + len(source)]
        return self._issue(stream, source=source, target=place, device=source.device)

    def copy_in(self, offset: int, target: torch.Tensor) -> StreamCopy:
        """See `Slab`."""
        _, stream = self.tier.streams(target.device)
        place = self._memory[offset : offset + len(target)]
        return self._issue(stream, source=place, target=target, device=target.device)

    def view(self, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """See `Slab`. The host has a view, too."""
        if device.type == "cpu":
            memory = self._memory.numpy()
            return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        return device_view(self._memory, offset, num_bytes, device)

    def join(self) -> None:
        """Has the step's stream wait for all copies."""
        for copy in self._pending:
            copy.wait()
        self._pending.clear()

    def release(self) -> None:
        """See `Slab`. The tensors of the copies may go then."""
        self.join()
        super().release()

    def _issue(
        self,
        stream: torch.cuda.Stream,
        *,
        source: torch.Tensor,
        target: torch.Tensor,
        device: torch.device,
    ) -> StreamCopy:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            begin, event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        copy = StreamCopy(begin, event, device, (source, target))
        self._pending = [each for each in self._pending if not each.is_waited_for]
        self._pending.append(copy)
        return copy


class StreamCopy:
    """A copy on a stream of its own. It holds its tensors until the step's stream waits for it."""

    def __init__(
        self,
        begin: torch.cuda.Event,
        event: torch.cuda.Event,
        device: torch.device,
        tensors: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._begin, self._event, self._device = begin, event, device
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = tensors

    @property
    def is_waited_for(self) -> bool:
        """Whether the step's stream waits for it, or has done so."""
        return self._tensors is None

    def took_ms(self) -> float:
        """See `Pending`."""
        return self._begin.elapsed_time(self._event)

    def wait(self) -> None:
        """Has the current stream of the device wait; the host goes on."""
        if self._tensors is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._tensors = None


def _pinned(num_bytes: int) -> torch.Tensor:
    try:
        return pinned(num_bytes)
    except RuntimeError as error:
        msg = (
            f"moved values or weights take {num_bytes:,} bytes of pinned host memory, which cannot "
            f"be had: {error}. Bound it with host_budget, or leave offload out."
        )
        raise OffloadError(msg) from error


def _check_device(value: torch.Tensor) -> None:
    if value.device.type != "cuda":
        msg = (
            f"offload='host' moves values of a GPU, and one of this step is on {value.device}. "
            "Plan again on this machine."
        )
        raise OffloadError(msg)
