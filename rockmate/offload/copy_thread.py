"""A thread that copies between memory and a file, one copy after the other."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from rockmate.errors import OffloadError

# Bytes of one transfer, and of the buffer through which it goes. The buffer begins at a page, as
# a transfer past the page cache needs; tensors do not.
CHUNK_BYTES = 4 << 20
# Such a transfer takes whole blocks.
BLOCK_BYTES = 4096


class FileCopy:
    """One copy between a tensor and a file; the thread runs it, the step waits for it."""

    def __init__(self, run: Callable[[mmap.mmap], None], what: str) -> None:
        self._run: Callable[[mmap.mmap], None] | None = run
        self._what = what
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def execute(self, buffer: mmap.mmap) -> None:
        """Runs the copy; called by the thread."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run(buffer)
        except BaseException as error:  # noqa: BLE001, the step that waits for it raises it
            # Its traceback would hold the tensor.
            self._error = error.with_traceback(None)
        del run  # the tensor's last holder here, before the step may go on
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether it is done, or has failed."""
        return self._ended.is_set()

    def join(self) -> None:
        """Waits until the copy has ended, well or not."""
        self._ended.wait()

    def wait(self) -> None:
        """Waits until the copy has ended.

        Raises:
            OffloadError: it has failed.
        """
        self._ended.wait()
        if self._error is not None:
            msg = (
                f"{self._what} has failed: {self._error}. The step is lost; the next one begins "
                "anew. Make room there, or choose another folder or offload=None."
            )
            raise OffloadError(msg) from self._error


class CopyThread:
    """Runs copies in the order in which they are given, and ends with its last reference."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[mmap.mmap], None] | None] = queue.SimpleQueue()
        self._pid = -1
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[mmap.mmap], None]) -> None:
        """Runs a function behind all others; it gets the buffer for transfers.

        Raises:
            OffloadError: the system has no memory for the thread or its buffer.
        """
        if self._thread is None or self._pid != os.getpid():
            # A forked process has no thread of its parent's.
            self._jobs, self._thread = queue.SimpleQueue(), None
            self._thread, self._pid = _started(self._jobs), os.getpid()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        self._jobs.put(job)


def _started(jobs: queue.SimpleQueue[Callable[[mmap.mmap], None] | None]) -> threading.Thread:
    """The thread, with all that it needs: if it failed by itself, steps would wait forever."""
    try:
        thread = threading.Thread(
            target=_work,
            args=(jobs, mmap.mmap(-1, CHUNK_BYTES)),
            name="rockmate-offload",
            daemon=True,
        )
        thread.start()
    except (OSError, RuntimeError) as error:
        msg = (
            f"copies to offload's folder need a thread and {CHUNK_BYTES:,} bytes of memory, which "
            f"cannot be had: {error}. Free some, or leave offload out."
        )
        raise OffloadError(msg) from error
    return thread


def _work(jobs: queue.SimpleQueue[Callable[[mmap.mmap], None] | None], buffer: mmap.mmap) -> None:
    while (job := jobs.get()) is not None:
        job(buffer)
        # Until the next job comes, this frame would hold what the last one refers to.
        del job


def write_tensor(descriptor: int, offset: int, source: torch.Tensor, buffer: mmap.mmap) -> None:
    """Writes a tensor of bytes to a file by way of the buffer. The GIL is free meanwhile."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for begin in range(0, source.numel(), CHUNK_BYTES):
        size = min(CHUNK_BYTES, source.numel() - begin)
        ctypes.memmove(address, source.data_ptr() + begin, size)
        _transfer(os.pwrite, descriptor, buffer, _whole_blocks(size), offset + begin)


def read_tensor(descriptor: int, offset: int, target: torch.Tensor, buffer: mmap.mmap) -> None:
    """Fills a tensor of bytes from a file by way of the buffer. The GIL is free meanwhile."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for begin in range(0, target.numel(), CHUNK_BYTES):
        size = min(CHUNK_BYTES, target.numel() - begin)
        _transfer(_read_into, descriptor, buffer, _whole_blocks(size), offset + begin)
        ctypes.memmove(target.data_ptr() + begin, address, size)


def _read_into(descriptor: int, part: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [part], offset)


def _transfer(
    call: Callable[[int, memoryview, int], int],
    descriptor: int,
    buffer: mmap.mmap,
    size: int,
    offset: int,
) -> None:
    """Repeats a transfer until all bytes are done: a call may do a part of them."""
    with memoryview(buffer) as whole:
        done = 0
        while done < size:
            with whole[done:size] as part:
                number = call(descriptor, part, offset + done)
            if number <= 0:
                msg = f"the file ends after {offset + done:,} bytes, {size - done:,} too early"
                raise OSError(msg)
            done += number


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
