"""What goes wrong with a tier is named, costs one step, and leaves no file behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_gradients
from moves import X, layers, module_of, step

from rockmate import RockmateModule
from rockmate.errors import InvalidBudgetError, OffloadError
from rockmate.offload import disk_tier, step_moves
from rockmate.offload.disk_tier import DiskTier


def check_usable(module: RockmateModule, folder: Path) -> None:
    """The next step has eager's gradients, and the folder is empty."""
    same_gradients(module, copy.deepcopy(module.original), step)
    assert list(folder.iterdir()) == []


def failing_after(
    number: int, call: Callable[..., Any], error: BaseException
) -> Callable[..., Any]:
    calls = []

    def fail(*args: object, **options: object) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise error
        return call(*args, **options)

    return fail


@pytest.mark.parametrize(
    ("name", "number", "error", "text"),
    [
        ("pwritev", 2, OSError(errno.EIO, "I/O error"), r"I/O error.*next one begins anew"),
        ("preadv", 2, OSError(errno.EIO, "I/O error"), r"I/O error.*next one begins anew"),
        ("pwritev", 3, OSError(errno.ENOSPC, "No space left"), r"No space left.*Make room there"),
        ("posix_fallocate", 1, OSError(errno.ENOSPC, "No space"), r"takes [\d,]+ bytes .*host_b"),
        ("preadv", 1, None, r"the file ends after [\d,]+ bytes"),
    ],
    ids=["write", "read", "full", "full before the step", "short"],
)
def test_a_copy_that_fails(
    name: str, number: int, error: OSError | None, text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = module_of(tmp_path)
    with monkeypatch.context() as patch:
        failing = failing_after(number, getattr(os, name), error) if error else lambda *_: 0
        patch.setattr(os, name, failing)
        with pytest.raises(OffloadError, match=text):
            step(module)
    if name == "posix_fallocate":
        assert all(parameter.grad is None for parameter in module.parameters())
    check_usable(module, tmp_path)


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_transfers_that_do_a_part_are_gone_on_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path)
    call, number = getattr(os, name), [0]

    def part(descriptor: int, data: list[memoryview], offset: int) -> int:
        number[0] += 1
        return call(descriptor, [data[0][:4096]], offset)

    monkeypatch.setattr(os, name, part)
    check_usable(module, tmp_path)
    assert number[0] > len(module.plan.schedule.moves)


@pytest.mark.parametrize("name", ["mmap", "thread"])
def test_no_memory_for_the_copies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path)

    def fail(*_: object) -> None:
        if name == "mmap":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if name == "mmap":
            patch.setattr(disk_tier.mmap, "mmap", fail)
        else:
            patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(OffloadError, match=r"which cannot be had: .*(memory|thread)"):
            step(module)
    check_usable(module, tmp_path)


def test_no_memory_for_a_value_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path)
    output = module(X)
    with monkeypatch.context() as patch:
        fault = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        patch.setattr(step_moves.torch, "empty", failing_after(1, torch.empty, fault))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            output.square().mean().backward()
    del output
    gc.collect()
    check_usable(module, tmp_path)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    module = module_of(folder)
    shutil.rmtree(folder)
    with pytest.raises(OffloadError, match=r"does not exist\. Make it"):
        step(module)
    folder.mkdir()
    check_usable(module, folder)
    # A file that a step has, it keeps.
    output = module(X)
    shutil.rmtree(folder)
    output.square().mean().backward()
    step(module)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_an_interrupt_in_mid_copy(
    half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path)
    wait = disk_tier.FileCopy.wait
    with monkeypatch.context() as patch:
        # The copy goes on when the step has been given up.
        slow = lambda *args: (time.sleep(0.02), os_pwritev(*args))[1]  # noqa: E731
        os_pwritev = os.pwritev
        patch.setattr(os, "pwritev", slow)
        number = 1 if half == "forward" else len(module.plan.schedule.moves) + 2
        patch.setattr(disk_tier.FileCopy, "wait", failing_after(number, wait, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            step(module)
    check_usable(module, tmp_path)


def test_an_error_of_the_step_itself_gives_the_slab_back(tmp_path: Path) -> None:
    module = module_of(tmp_path)
    output = module(X)
    handle = module.original[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.square().mean().backward()
    handle.remove()
    del output
    gc.collect()
    check_usable(module, tmp_path)


def test_the_host_budget_bounds_all_pending_steps(tmp_path: Path) -> None:
    needed = module_of(tmp_path).plan.simulation.host_bytes
    module = module_of(tmp_path, host_budget=needed + needed // 2)
    first = module(X)
    with pytest.raises(OffloadError, match=f"host_budget is {needed + needed // 2:,}"):
        module(X)
    first.square().mean().backward()
    check_usable(module, tmp_path)


def test_arguments_that_cannot_be_read(tmp_path: Path) -> None:
    for offload in ("ssd", "disk", "disk:", "host:/tmp", 3):
        with pytest.raises(ValueError, match="choose None"):
            RockmateModule(layers(), X, 0.5, offload=offload)
    with pytest.raises(ValueError, match="bounds what moves"):
        RockmateModule(layers(), X, 0.5, host_budget="1GiB")
    with pytest.raises(ValueError, match="write bytes"):
        RockmateModule(layers(), X, 0.5, offload=f"disk:{tmp_path}", host_budget=0.5)
    with pytest.raises(InvalidBudgetError):
        RockmateModule(layers(), X, 0.5, offload=f"disk:{tmp_path}", host_budget="much")


def test_host_memory_is_no_tier_of_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(OffloadError, match=r"on cpu, which is there already\. Use offload='disk:"):
        RockmateModule(layers(), X, 0.5, offload="host")


def test_a_disk_is_no_tier_of_a_model_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rockmate import Planner

    monkeypatch.undo()
    with pytest.raises(OffloadError, match=r"is on cuda\. Use offload='host'"):
        Planner(layers(), X, machine="h100", offload=f"disk:{tmp_path}")


# --- files ------------------------------------------------------------------------------------


def test_files_have_no_name(tmp_path: Path) -> None:
    file = DiskTier(str(tmp_path)).borrow(1 << 20)
    assert not list(tmp_path.iterdir())
    assert os.fstat(file.descriptor).st_size == 1 << 20
    assert os.fstat(file.descriptor).st_blocks * 512 >= 1 << 20


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        _file = DiskTier(str(tmp_path)).borrow(1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_direct_access_is_used_by_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags, dropped = fcntl.fcntl, []

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args))
    module = module_of(tmp_path, trial="never")
    check_usable(module, tmp_path)
    assert len(dropped) == 2 * len(module.plan.schedule.moves)
    assert all(advice == os.POSIX_FADV_DONTNEED for *_, advice in dropped)


def test_copies_bypass_the_page_cache_where_they_can(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct access")
    file = DiskTier(str(tmp_path)).borrow(1 << 20)
    assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_a_forked_process_has_a_thread_and_files_of_its_own(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path))
    ones, found = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    idle, pending = tier.borrow(4096), tier.borrow(4096)
    idle.release()
    pending.copy_out(0, ones).wait()
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            pending.copy_in(0, found).wait()
            tier.borrow(4096).copy_out(0, 3 * ones).wait()
            code = 0 if torch.equal(found, ones) else 2
        os._exit(code)
    mine = tier.borrow(4096)  # the idle file
    mine.copy_out(0, 2 * ones).wait()
    assert os.waitpid(pid, 0)[1] == 0
    mine.copy_in(0, found).wait()
    assert torch.equal(found, 2 * ones)


def test_the_thread_ends_with_its_module(tmp_path: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("rockmate-offload")}

    others = threads()  # of earlier tests, some of which are about to end
    module = module_of(tmp_path)
    step(module)
    (thread,) = threads() - others
    del module
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
