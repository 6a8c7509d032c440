"""Compilers that Inductor starts, with an end to their time.

Inductor waits for a compiler as long as it takes. A compiler that hangs, on a file system that does
not answer or for a licence, would halt the training script without a word.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Deadline:
    """When compiling ends.

    Attributes:
        limit_s: seconds that were given to it.
        end_s: by the monotonic clock.
    """

    limit_s: float
    end_s: float

    @staticmethod
    def after(limit_s: float) -> Deadline:
        """The deadline that begins now."""
        return Deadline(limit_s, time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 once it has passed."""
        return max(0.0, self.end_s - time.monotonic())

    def __str__(self) -> str:
        return f"compiling takes longer than {self.limit_s:g} s"


_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextlib.contextmanager
def compilers_end_by(deadline: Deadline) -> Iterator[None]:
    """Stops each compiler that is started inside, by any thread of `in_this_context`, at a time."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def in_this_context(task: Callable[[], Any]) -> Callable[[], Any]:
    """A task that another thread runs with the deadline of this one."""
    return partial(copy_context().run, task)


def watch_compilers(module: Any) -> None:
    """Lets a module that starts compilers by `subprocess` stop them at the deadline."""
    if not isinstance(module.subprocess, _Subprocess):
        module.subprocess = _Subprocess()


class _Subprocess:
    """`subprocess`, whose processes end by the deadline. Without one nothing is changed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, *command: Any, **options: Any) -> Any:
        deadline = _deadline.get()
        if deadline is None:
            return subprocess.run(*command, **options)
        return _run_until(deadline, *command, **options)

    def check_output(self, *command: Any, **options: Any) -> Any:
        return self.run(*command, stdout=subprocess.PIPE, check=True, **options).stdout

    def check_call(self, *command: Any, **options: Any) -> int:
        return self.run(*command, check=True, **options).returncode


def _run_until(
    deadline: Deadline,
    command: Any,
    *,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> Any:
    """`subprocess.run` that ends the command with all processes that it has started."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options.pop("timeout", None)
    # A compiler driver leaves its own children behind when it is killed, and they hold the pipes.
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=deadline.left_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
