"""The disk as a tier: files without names, and one thread that copies.

The page cache is bypassed (`O_DIRECT`), so bytes that wait on the disk take no memory of the
machine, and a copy takes the time of the disk. Where the file system has no such access (as older
`tmpfs`, which is memory itself), the cache is used, and emptied after each copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rockmate.budget import size_text
from rockmate.errors import OffloadError
from rockmate.offload.tier import Slab, Tier

# Bytes of one transfer, and of the buffer through which it goes. The buffer begins at a page, as
# a transfer past the page cache needs; tensors do not.
CHUNK_BYTES = 4 << 20
# Such a transfer takes whole blocks.
_BLOCK_BYTES = 4096


class FileCopy:
    """One copy between a tensor and a file; the thread runs it, the step waits for it."""

    def __init__(
        self, future: Future[BaseException | None], what: str, times_s: list[float]
    ) -> None:
        self._future, self._what, self._times_s = future, what, times_s

    @property
    def has_ended(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def took_ms(self) -> float:
        """See `Pending`."""
        begin_s, end_s = self._times_s
        return 1e3 * (end_s - begin_s)

    def join(self) -> BaseException | None:
        """Waits until the copy has ended; returns the error if it has failed."""
        return self._future.result()

    def wait(self) -> None:
        """Waits until the copy has ended.

        Raises:
            OffloadError: it has failed.
        """
        error = self.join()
        if error is not None:
            msg = (
                f"{self._what} has failed: {error}. The step is lost; the next one begins anew. "
                "Make room there, or choose another folder or offload=None."
            )
            raise OffloadError(msg) from error


class DiskTier(Tier["DiskSlab"]):
    """Files in one folder."""

    def __init__(self, folder: str, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self._folder = folder
        self._pid = -1

    def borrow(self, num_bytes: int) -> DiskSlab:
        """See `Tier`."""
        self._start_in_process()
        return super().borrow(num_bytes)

    def _new_slab(self, num_bytes: int) -> DiskSlab:
        return DiskSlab(self._folder, num_bytes)

    def submit(
        self, copy: Callable[[memoryview], BaseException | None]
    ) -> Future[BaseException | None]:
        """Has the thread run a copy behind all others; it gets the buffer for transfers.

        Raises:
            OffloadError: the system has no memory for the thread or its buffer.
        """
        self._start_in_process()
        try:
            return self._thread.submit(copy, self._buffer)
        except RuntimeError as error:
            self._pid = -1
            raise OffloadError(_no_thread_text(error)) from error

    def _start_in_process(self) -> None:
        """Makes thread and buffer; in a forked process anew, where idle files are its parent's."""
        if self._pid == os.getpid():
            return
        try:
            self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        except OSError as error:
            raise OffloadError(_no_thread_text(error)) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rockmate-offload")
        self._pid = os.getpid()
        self._free.clear()


class DiskSlab(Slab):
    """A file without a name, of a fixed size; closed with its last reference.

    Attributes:
        num_bytes: its size, which the file system has set aside.
        descriptor: of the open file.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Makes the file.

        Raises:
            OffloadError: the folder does not exist, cannot be written to, or has too little room.
        """
        super().__init__(num_bytes)
        self._last: FileCopy | None = None
        self._mapped: mmap.mmap | None = None
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
            self.descriptor = file.fileno()
            # So a full disk shows before the step begins.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self._is_cached = not _bypass_cache(self.descriptor)
        except OSError as error:
            raise OffloadError(_no_file_text(error, folder, num_bytes)) from error

    def copy_out(self, offset: int, source: torch.Tensor) -> FileCopy:
        """See `Slab`."""
        if source.device.type != "cpu":
            msg = (
                f"offload='disk:...' moves values in the machine's memory, and one of this step is "
                f"on {source.device}. Use offload='host'."
            )
            raise OffloadError(msg)
        what = f"the copy of {size_text(source.numel())} to offload's folder"
        return self._begin(offset, source, what, is_out=True)

    def copy_in(self, offset: int, target: torch.Tensor) -> FileCopy:
        """See `Slab`."""
        what = f"the copy of {size_text(target.numel())} from offload's folder"
        return self._begin(offset, target, what, is_out=False)

    def view(self, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """See `Slab`. The file is mapped, and the device is the CPU."""
        del device
        if self._mapped is None:
            self._mapped = mmap.mmap(self.descriptor, self.num_bytes)
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=offset)

    def _begin(self, offset: int, tensor: torch.Tensor, what: str, *, is_out: bool) -> FileCopy:
        tensors, times_s = [tensor], list[float]()

        def copy(buffer: memoryview) -> BaseException | None:
            times_s.append(time.perf_counter())
            try:
                # Nothing but `_copy` may hold the tensor, once the step may go on.
                self._copy(offset, tensors.pop(), buffer, is_out=is_out)
            except BaseException as error:  # noqa: BLE001, the step that waits for it raises it
                return error.with_traceback(None)
            finally:
                times_s.append(time.perf_counter())
            return None

        self._last = FileCopy(self.tier.submit(copy), what, times_s)
        return self._last

    @property
    def is_busy(self) -> bool:
        """Whether a copy to or from it is under way."""
        return self._last is not None and not self._last.has_ended

    def join(self) -> None:
        """See `Slab`."""
        if self._last is not None:
            self._last.join()

    def _copy(self, offset: int, tensor: torch.Tensor, buffer: memoryview, *, is_out: bool) -> None:
        """Copies a tensor of bytes out or in by way of the buffer. The GIL is free meanwhile."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for begin in range(0, tensor.numel(), CHUNK_BYTES):
            size = min(CHUNK_BYTES, tensor.numel() - begin)
            part = buffer[: -(-size // _BLOCK_BYTES) * _BLOCK_BYTES]
            if is_out:
                ctypes.memmove(address, tensor.data_ptr() + begin, size)
                self._transfer(os.pwritev, part, offset + begin)
            else:
                self._transfer(os.preadv, part, offset + begin)
                ctypes.memmove(tensor.data_ptr() + begin, address, size)
        if self._is_cached:
            os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, offset, tensor.numel(), os.POSIX_FADV_DONTNEED)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], part: memoryview, offset: int
    ) -> None:
        """Repeats a transfer until all bytes are done: a call may do a part of them."""
        while part:
            number = call(self.descriptor, [part], offset)
            if number <= 0:
                msg = f"the file ends after {offset:,} bytes, {len(part):,} too early"
                raise OSError(msg)
            part, offset = part[number:], offset + number


def _bypass_cache(descriptor: int) -> bool:
    """Has transfers bypass the page cache; False if the file system cannot."""
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _no_thread_text(error: Exception) -> str:
    return (
        f"copies to offload's folder need a thread and {CHUNK_BYTES:,} bytes of memory, which "
        f"cannot be had: {error}. Free some, or leave offload out."
    )


def _no_file_text(error: OSError, folder: str, num_bytes: int) -> str:
    if error.errno == errno.ENOENT:
        return (
            f"the folder of offload='disk:{folder}' does not exist. Make it, or name another one; "
            "it should be on a disk of this machine."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return (
            f"offload takes {num_bytes:,} bytes of {folder}, which has {free:,} free. Free some, "
            "or name a folder on a larger disk; host_budget bounds what moved values take."
        )
    return (
        f"no file of {num_bytes:,} bytes can be made in the folder of offload='disk:{folder}': "
        f"{error}. Name a folder that can be written to, on a disk of this machine."
    )
