"""The disk as a tier: files without names, and one thread that copies."""

from __future__ import annotations

import logging
import mmap
from functools import partial

import torch

from rockmate.budget import size_text
from rockmate.errors import OffloadError
from rockmate.offload.copy_thread import CopyThread, FileCopy, read_tensor, write_tensor
from rockmate.offload.disk_file import DiskFile, remove_stale_files

logger = logging.getLogger(__name__)


class DiskTier:
    """Files in one folder. A file that a step no longer needs serves the next one.

    Args:
        folder: where the files are.
        limit_bytes: most bytes of all files together; None for no limit.
    """

    def __init__(self, folder: str, limit_bytes: int | None = None) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._thread = CopyThread()
        self._free: list[DiskFile] = []
        # Files of steps that are over, each with its last copy, which may still be under way.
        self._returned: list[tuple[DiskFile, FileCopy | None]] = []
        self._num_lent_bytes = 0
        removed = remove_stale_files(folder)
        if removed:
            logger.info("removed %d files of processes that are gone: %s", len(removed), folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        idle = [*self._free, *(file for file, _ in self._returned)]
        return self._num_lent_bytes + sum(file.num_bytes for file in idle)

    def borrow(self, num_bytes: int) -> DiskSlab:
        """A slab of at least so many bytes; errors as for `Tier.borrow`."""
        file = self._free_file(num_bytes, waits=False) or self._free_file(num_bytes, waits=True)
        if file is None:
            # Smaller ones serve no step like this.
            self._free.clear()
            limit_bytes = self._limit_bytes
            if limit_bytes is not None and self._num_lent_bytes + num_bytes > limit_bytes:
                raise OffloadError(limit_text(num_bytes, self._num_lent_bytes, limit_bytes))
            file = DiskFile(self._folder, num_bytes)
        self._num_lent_bytes += file.num_bytes
        return DiskSlab(file, self)

    def put(self, copy: FileCopy) -> FileCopy:
        """Has the thread run a copy behind all others."""
        self._thread.put(copy.execute)
        return copy

    def take_back(self, file: DiskFile, last: FileCopy | None) -> None:
        """Takes a file back, whose last copy may still be under way."""
        self._num_lent_bytes -= file.num_bytes
        self._returned.append((file, last))

    def _free_file(self, num_bytes: int, *, waits: bool) -> DiskFile | None:
        """A file of at least so many bytes that nothing is copied to or from any more."""
        for entry in list(self._returned):
            file, last = entry
            if waits and last is not None:
                last.join()
            if last is None or last.has_ended:
                self._returned.remove(entry)
                self._free.append(file)
        fitting = [file for file in self._free if file.num_bytes >= num_bytes]
        if not fitting:
            return None
        file = min(fitting, key=lambda file: file.num_bytes)
        self._free.remove(file)
        return file


class DiskSlab:
    """A file that one step has to itself."""

    def __init__(self, file: DiskFile, tier: DiskTier) -> None:
        self._file, self._tier = file, tier
        self._last: FileCopy | None = None

    def copy_out(self, offset: int, source: torch.Tensor) -> FileCopy:
        """See `Slab`."""
        if source.device.type != "cpu":
            msg = (
                f"offload='disk:...' moves values in the machine's memory, and one of this step is "
                f"on {source.device}. Use offload='host'."
            )
            raise OffloadError(msg)
        what = f"the copy of {size_text(source.numel())} to offload's folder"
        return self._put(FileCopy(partial(_write, self._file, offset, source), what))

    def copy_in(self, offset: int, target: torch.Tensor) -> FileCopy:
        """See `Slab`."""
        what = f"the copy of {size_text(target.numel())} from offload's folder"
        return self._put(FileCopy(partial(_read, self._file, offset, target), what))

    def release(self) -> None:
        """See `Slab`."""
        self._tier.take_back(self._file, self._last)

    def _put(self, copy: FileCopy) -> FileCopy:
        self._last = self._tier.put(copy)
        return copy


def _write(file: DiskFile, offset: int, source: torch.Tensor, buffer: mmap.mmap) -> None:
    write_tensor(file.descriptor, offset, source, buffer)
    file.forget(offset, source.numel(), is_written=True)


def _read(file: DiskFile, offset: int, target: torch.Tensor, buffer: mmap.mmap) -> None:
    read_tensor(file.descriptor, offset, target, buffer)
    file.forget(offset, target.numel(), is_written=False)


def limit_text(num_bytes: int, taken_bytes: int, limit_bytes: int) -> str:
    """That a further step's values do not fit the limit, and what to do."""
    return (
        f"moved values of this step take {num_bytes:,} bytes beside {taken_bytes:,} of steps whose "
        f"backward has not run, and host_budget is {limit_bytes:,}. Raise it, or run each backward "
        "before the next forward."
    )
