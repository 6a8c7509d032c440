"""A file without a name for the values of one step.

It is made under a name, locked and unlinked at once. So no file is left behind however the process
ends: the system frees the space with the last descriptor. Where a file keeps its name nonetheless
(a process that died between the two calls, a network file system that renames open files), the next
start removes it: nobody holds its lock any more.

The page cache is bypassed (`O_DIRECT`), so bytes that wait on the disk take no memory of the
machine. Where the file system has no such access (as `tmpfs`, which is memory itself), the cache is
used, and emptied of them after each copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path

from rockmate.errors import OffloadError

_PREFIX = "rockmate-offload-"
_MODE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class DiskFile:
    """An unnamed file of a fixed size; closed with its last reference.

    Attributes:
        num_bytes: its size, which the file system has set aside.
        descriptor: of the open file.
        is_cached: whether its bytes pass through the page cache.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Makes the file.

        Raises:
            OffloadError: the folder does not exist, cannot be written to, or has too little room.
        """
        self.num_bytes = num_bytes
        try:
            self.descriptor, self.is_cached = _open(Path(folder))
            close = weakref.finalize(self, _close, self.descriptor, os.getpid())
            close.atexit = False  # the thread may still copy then; the system closes it
            _set_aside(self.descriptor, num_bytes)
        except OSError as error:
            raise OffloadError(_text_of(error, folder, num_bytes)) from error

    def forget(self, offset: int, num_bytes: int, *, is_written: bool) -> None:
        """Empties the page cache of a part of the file, if it has any of it."""
        if not self.is_cached:
            return
        if is_written:
            os.fdatasync(self.descriptor)
        os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def remove_stale_files(folder: str) -> list[str]:
    """Removes files that processes which are gone have left; returns their names."""
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).glob(f"{_PREFIX}*")):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path.name)
                finally:
                    os.close(descriptor)
    return removed


def _open(folder: Path) -> tuple[int, bool]:
    """A new file's descriptor, and whether it passes through the page cache."""
    path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        descriptor, is_cached = os.open(path, _MODE | os.O_DIRECT, 0o600), False
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some systems have made the file before they refuse the access.
        path.unlink(missing_ok=True)
        descriptor, is_cached = os.open(path, _MODE, 0o600), True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        path.unlink(missing_ok=True)
    return descriptor, is_cached


def _set_aside(descriptor: int, num_bytes: int) -> None:
    """Has the file system reserve the bytes, so that a full disk shows before the step begins."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, num_bytes)


def _close(descriptor: int, pid: int) -> None:
    # A forked process has descriptors of its own, which end with it.
    if os.getpid() == pid:
        os.close(descriptor)


def _text_of(error: OSError, folder: str, num_bytes: int) -> str:
    if error.errno == errno.ENOENT:
        return (
            f"the folder of offload='disk:{folder}' does not exist. Make it, or name another one; "
            "it should be on a disk of this machine."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return (
            f"moved values take {num_bytes:,} bytes of {folder}, which has {free:,} free. Free "
            "some, name a folder on a larger disk, or bound it with host_budget."
        )
    return (
        f"no file of {num_bytes:,} bytes can be made in the folder of offload='disk:{folder}': "
        f"{error}. Name a folder that can be written to, on a disk of this machine."
    )
